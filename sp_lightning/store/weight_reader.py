"""Reads weights from the files that a user has them in. Nothing is copied to scratch, and nothing is written."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from sp_lightning.device.layout import PAGE, whole_pages
from sp_lightning.store.mapped import FilePlace, identity_of
from sp_lightning.store.scratch import Transfer, aligned_memory

_PIECE = 8 * 2**20
_THREADS = 4
BOUNCE = _THREADS * (_PIECE + PAGE)
"""Bytes of the memory that pages pass through before their bytes are copied to where they belong."""


class WeightReader:
    """Reads weights past the page cache where the file system allows it.

    The pages around a weight are read, and its bytes are copied to an aligned place: kernels compute other last bits on other
    alignments. A file is opened once and kept open, so that another one of its name changes nothing. Its size and the time of
    its last change are looked at before each read and after it.

    Attributes:
        read_bytes: what was read so far.
    """

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "superpipeline-weights")
        self._bounce = threading.local()
        self.read_bytes = 0

    def open(self, place: FilePlace) -> None:
        """Opens a file, which is to be as it was when it was found.

        Raises:
            OSError: it is another one now, or cannot be opened.
        """
        if place.path not in self._files:
            self._files[place.path] = file = _File(place.path, place.identity)
            file.refuse_changed()

    def read(self, places: Sequence[FilePlace], targets: Sequence[Tensor]) -> Transfer:
        """Begins to read weights to memory, flat ``uint8``.

        Raises:
            OSError: a file was changed since it was opened.
        """
        pieces = []
        for place, target in zip(places, targets, strict=True):
            file = self._files[place.path]
            file.refuse_changed()
            self.read_bytes += target.nbytes
            for at in range(0, target.nbytes, _PIECE):
                part = target[at : at + _PIECE]
                pieces.append(self._threads.submit(self._read, file, place.offset + at, part))
        return Transfer(pieces)

    def _read(self, file: _File, offset: int, target: Tensor) -> None:
        begin = offset // PAGE * PAGE
        length = whole_pages(offset + target.nbytes - begin)
        if not hasattr(self._bounce, "memory"):
            self._bounce.memory = aligned_memory(_PIECE + PAGE)
        bounce: Tensor = self._bounce.memory
        file.read(bounce, begin, length, offset + target.nbytes - begin)
        file.refuse_changed()  # while it was read
        target.copy_(bounce[offset - begin : offset - begin + target.nbytes])


class _File:
    """A file of weights that is open for reading."""

    def __init__(self, path: str, identity: tuple[int, int, int]) -> None:
        self._path = path
        self._identity = identity
        self._direct = True
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = False
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def refuse_changed(self) -> None:
        """Refuses to read a file that somebody has written or replaced since it was found.

        Raises:
            OSError: its size or the time of its last change is another one.
        """
        if identity_of(os.fstat(self._descriptor)) != self._identity:
            raise OSError(
                errno.ESTALE,
                "This file of weights was changed while a run reads it. Run again, and write a new file beside it instead",
                self._path,
            )

    def read(self, memory: Tensor, offset: int, length: int, needed: int) -> None:
        """Reads whole pages, of which the file may end within the last.

        Raises:
            OSError: the disk failed, or the file ends before the bytes that are needed.
        """
        array: Any = memory.numpy()
        view, done = memoryview(array), 0
        while done < needed:
            try:
                count = os.preadv(self._descriptor, [view[done:length]], offset + done)
            except OSError as error:
                raise OSError(error.errno, f"Weights could not be read: {error.strerror}", self._path) from error
            if done + count >= needed:
                break
            if count < PAGE:
                raise OSError(
                    errno.EIO, f"This file of weights ends {needed - done - count} bytes too early", self._path
                )
            done += count // PAGE * PAGE  # direct reads go on at a page
        if not self._direct:
            os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_DONTNEED)
