"""Weights in the files that a user has them in: which are nowhere else, how they are read, and a layer that has some there.

A weight is nowhere but in a file if its memory is a private mapping of the file, and no page of it was written. Nothing is
written to files.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from sp_lightning.device.layout import PAGE, addresses, bytes_of, whole_pages
from sp_lightning.device.pages import pages_in_memory, was_written
from sp_lightning.disk.direct_file import PIECE, THREADS, DirectFile, Transfer, aligned_memory, in_pieces
from sp_lightning.disk.mapped_file import page_out
from sp_lightning.layers.writes import digest_of_values, known_digests
from sp_lightning.model.found import Layer
from sp_lightning.store.block import HostBlock
from sp_lightning.store.block_memory import BlockMemory
from sp_lightning.torch_compat.modes import no_inference_mode
from sp_lightning.trainer.part_files import identity_of


@dataclass(frozen=True)
class FilePlace:
    """Where a weight is in a file, contiguous and in its own dtype.

    Attributes:
        path: the file.
        offset: bytes from its beginning, aligned to nothing.
        identity: what changes if the file is replaced or written.
    """

    path: str
    offset: int
    identity: tuple[int, int, int]

    @property
    def unchanged(self) -> bool:
        """Whether the file is the one that it was.

        Raises:
            OSError: there is none of its name.
        """
        return identity_of(os.stat(self.path)) == self.identity


class Mappings:
    """The files that are mapped to this process's memory, as Linux lists them.

    safetensors, ``torch.load(mmap=True)`` and transformers' ``from_pretrained`` leave weights so. A page that was written has
    been copied; until then it is the file's.

    Attributes:
        resident_bytes: bytes of files in the memory of the weights that :meth:`place` has found.
    """

    def __init__(self) -> None:
        self.resident_bytes = 0
        self._mappings: list[tuple[int, int, int, int, str]] = []
        pages_in_memory(0, 1)  # not every process may ask
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[4] != "0" and fields[1].endswith("p"):
                begin, end = (int(each, 16) for each in fields[0].split("-"))
                self._mappings.append((begin, end, int(fields[2], 16), int(fields[4]), fields[5]))

    def place(self, tensor: Tensor) -> FilePlace | None:
        """Where the bytes of a tensor are in a file; None if they are anywhere else, too."""
        address = tensor.data_ptr()
        index = bisect_right(self._mappings, address, key=itemgetter(0)) - 1
        if index < 0 or not tensor.nbytes:
            return None
        begin, end, offset, node, path = self._mappings[index]
        if address + tensor.nbytes > end or not os.path.isfile(path):
            return None
        identity = identity_of(os.stat(path))
        # A file that was replaced since it was mapped has another node: these values are in no file any more.
        if identity[0] != node or (pages := pages_in_memory(address, tensor.nbytes)) is None:
            return None
        self.resident_bytes += PAGE * pages
        return FilePlace(path, offset + address - begin, identity)


BOUNCE = THREADS * (PIECE + PAGE)
"""Bytes of the memory that pages pass through before their bytes are copied to where they belong."""


class WeightReader:
    """Reads weights past the page cache where the file system allows it.

    The pages around a weight are read, and its bytes are copied to an aligned place: kernels compute other last bits on other
    alignments. A file is opened once and kept open, so that another one of its name changes nothing. Its size and the time of
    its last change are looked at before each read and after it.
    """

    def __init__(self) -> None:
        self._files: dict[str, DirectFile] = {}
        self._threads = ThreadPoolExecutor(THREADS, "superpipeline-weights")
        self._bounce = threading.local()

    def open(self, place: FilePlace) -> None:
        """Opens a file, which is to be as it was when it was found.

        Raises:
            OSError: it is another one now, or cannot be opened.
        """
        if place.path not in self._files:
            descriptor = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
            self._files[place.path] = file = DirectFile(descriptor, place.path, _MESSAGES)
            weakref.finalize(file, os.close, descriptor)
            _refuse_changed(file, place)

    def read(self, places: Sequence[FilePlace], targets: Sequence[Tensor]) -> Transfer:
        """Begins to read weights to memory, flat ``uint8``.

        Raises:
            OSError: a file was changed since it was opened.
        """
        pieces = []
        for place, target in zip(places, targets, strict=True):
            file = self._files[place.path]
            _refuse_changed(file, place)
            pieces += in_pieces(self._threads, partial(self._read, file, place), place.offset, target)
        return Transfer(pieces)

    def _read(self, file: DirectFile, place: FilePlace, offset: int, target: Tensor) -> None:
        before = offset % PAGE
        needed = before + target.nbytes
        if not hasattr(self._bounce, "memory"):
            self._bounce.memory = aligned_memory(PIECE + PAGE)
        bounce: Tensor = self._bounce.memory
        file.read(bounce[: whole_pages(needed)], offset - before, needed)
        _refuse_changed(file, place)  # while it was read
        target.copy_(bounce[before:needed])


_MESSAGES = "Weights could not be read", "", "This file of weights", ""


def _refuse_changed(file: DirectFile, place: FilePlace) -> None:
    """Refuses to read a file that another program has written or replaced since it was found.

    Raises:
        OSError: its size or the time of its last change is another one.
    """
    if identity_of(os.fstat(file.descriptor)) != place.identity:
        raise OSError(
            errno.ESTALE,
            "This file of weights was changed while a run reads it. Run again, and write a new file beside it instead",
            file.path,
        )


# ---------------------------------------------------------------------- the block of a layer


class SparseMemory(BlockMemory):
    """Memory of a block most of whose weights are in files. Pages that are not written take no memory."""

    pinned = True  # uploads read staging memory, which is

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.anew()

    def anew(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        pages = mmap.mmap(-1, whole_pages(self._nbytes), flags=flags)
        pages.madvise(mmap.MADV_NOHUGEPAGE)
        self.common = torch.frombuffer(pages, dtype=torch.uint8)[: self._nbytes]


class FileBlock(HostBlock):
    """A block with memory for some weights and for casts. The others stay in the user's memory, which is mapped from files.

    User code finds ordinary parameters there: what it reads comes by itself, and a page that it writes is a private one from
    then on. A fetch reads files past the page cache, and copies from memory what was written.

    Args:
        layer, args, pin: as for a :class:`~sp_lightning.store.block.HostBlock`, whose ``allocate`` is not asked.
        reader: reads files, which it has open.
        places: where each parameter is; None for those that come to memory.

    Attributes:
        in_file: indices of the parameters whose values are those of the file.
        pin: whether memory that fetches read is page-locked.
    """

    def __init__(
        self, layer: Layer, *args: Any, reader: WeightReader, places: Sequence[FilePlace | None], pin: bool
    ) -> None:
        self._places = {index: place for index, place in enumerate(places) if place is not None}
        # Kept: graphs may ask for values that a user has replaced, and an address says nothing of memory that is gone.
        with no_inference_mode(), torch.DisableTorchFunctionSubclass():
            self._mapped = {index: layer.parameters[index][1].data for index in self._places}
        self.in_file = set(self._places)
        self.pin = pin
        self._reader = reader
        planned, device, staging, _ = args
        super().__init__(layer, planned, device, staging, lambda nbytes, _: SparseMemory(nbytes), pin=pin)
        for index, place in self._places.items():
            parameter = self.parameters[index]
            _left_in_files[parameter] = place, parameter.data_ptr(), StorageWeakRef(parameter.untyped_storage())
            known_digests[parameter] = _digest
            page_out(parameter.data_ptr(), parameter.nbytes)

    def _take(self, index: int, into: Tensor | None) -> None:
        mapped = self._mapped.get(index)
        if mapped is None or addresses([self.parameters[index]]) != [mapped.data_ptr()]:
            super()._take(index, into)
            self._mapped.pop(index, None)
            self.in_file.discard(index)

    def present(self, index: int) -> Tensor:
        if index not in self._mapped:
            return super().present(index)
        with no_inference_mode():
            return self._mapped[index].reshape(-1).view(torch.uint8)

    def read(self, memory: Tensor) -> Transfer:
        """Begins to read what is in files to memory of the block's size, each weight to its place."""
        indices = sorted(self.in_file)
        targets = [bytes_of(memory, self.planned.spans[index]) for index in indices]
        return self._reader.read([self._places[index] for index in indices], targets)

    def complete(self, memory: Tensor) -> None:
        """Copies what is not in files, or not any more, to such memory, which has been read to."""
        # User code may have written the mapping since the read began: torch counts no write of numpy's, the system does.
        for index in self.in_file - self.retyped:
            if was_written(self._mapped[index]):
                self.in_file.discard(index)
        for index, span in enumerate(self.planned.spans):
            if index not in self.in_file:
                bytes_of(memory, span).copy_(self.present(index))
        for span in self.planned.casts:
            bytes_of(memory, span).copy_(bytes_of(self.weights, span))


_left_in_files: Any = WeakIdKeyDictionary()
"""The places of parameters that runs have left in files, their addresses and their memory."""


def place_of(tensor: Tensor) -> FilePlace | None:
    """The place of a parameter that a run has left in its file, and that has the file's values still."""
    if (left := _left_in_files.get(tensor)) is None:
        return None
    place, address, memory = left
    with torch.DisableTorchFunctionSubclass():
        # Other memory may have the address of memory that is gone; and the same memory may be seen in another order.
        same = (
            not memory.expired() and memory == StorageWeakRef(tensor.untyped_storage()) and tensor.data_ptr() == address
        )
        in_order = same and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        try:
            return place if in_order and place.unchanged and not was_written(tensor) else None
        except OSError:  # the file has no name any more
            return None


_digests: dict[tuple[FilePlace, torch.dtype, torch.Size], str] = {}
"""The digests of weights that are in files, each of which is read once."""


def _digest(tensor: Tensor) -> str:
    """Returns the digest of a parameter that a run has left in its file. Its file is read once for that."""
    place = place_of(tensor)
    if place is None:
        return digest_of_values(tensor)
    key = place, tensor.dtype, tensor.shape
    if key not in _digests:
        _digests[key] = digest_of_values(tensor)
        page_out(tensor.data_ptr(), tensor.nbytes)
    return _digests[key]
