"""Files that are read and written past the page cache where the file system allows it, in pieces, by a few threads.

Kept libraries were looked at. kvikio and DeepNVMe bring bytes to a GPU's memory or need a compiler; bindings of io_uring
are compiled, too, and many containers forbid its calls; fsspec has no direct I/O. A few threads with ``preadv`` and
``pwritev`` on pieces of some MiB keep a drive's queue full, so the standard library is enough here.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from sp_lightning.device.layout import PAGE, whole_pages

with suppress(ImportError):  # Windows has none, and no direct I/O
    import fcntl

PIECE = 8 * 2**20
"""Bytes that one call reads or writes. Several pieces are under way at once."""

THREADS = 4
"""Reads, and as many writes, that are under way at once: enough for a fast drive's queue, and few beside the threads that
compute. They have threads of their own, because many drives, and limits of control groups, have a rate for each."""


def aligned_memory(nbytes: int) -> Tensor:
    """Returns whole pages of memory that begin at a page, which direct I/O needs.

    The pages are shared ones: a process that is forked while the disk writes them (a worker of a ``DataLoader``) has no copies.
    """
    return torch.frombuffer(mmap.mmap(-1, whole_pages(nbytes)), dtype=torch.uint8)


class Transfer:
    """Bytes on their way from or to files.

    Args:
        pieces: the calls.
    """

    def __init__(self, pieces: Sequence[Future[None]]) -> None:
        self._pieces = pieces

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return all(piece.done() for piece in self._pieces)

    def then(self, call: Callable[[], None]) -> None:
        """Calls something once the last piece has been done: in a thread of the disk, or at once if all are done."""
        for piece in self._pieces:
            piece.add_done_callback(lambda _: call() if self.done else None)

    def finish(self) -> None:
        """Waits until no call is under way: until then the memory is in use, even if one has failed."""
        wait(self._pieces)

    def wait(self) -> None:
        """Waits until all bytes are there.

        Raises:
            OSError: a read or a write failed.
        """
        self.finish()
        for piece in self._pieces:
            piece.result()


def in_pieces(
    threads: ThreadPoolExecutor, call: Callable[[int, Tensor], None], offset: int, memory: Tensor
) -> list[Future[None]]:
    """Has threads call something for each piece of memory, with the piece's place in a file."""
    return [threads.submit(call, offset + at, memory[at : at + PIECE]) for at in range(0, memory.nbytes, PIECE)]


class DirectFile:
    """An open file.

    Args:
        descriptor: the file's.
        path: what errors name.
        messages: what errors say if bytes cannot be read, cannot be written, and what ends too early; and what to do then.

    Attributes:
        direct: whether reads and writes go past the page cache.
    """

    def __init__(self, descriptor: int, path: str, messages: tuple[str, str, str, str]) -> None:
        self.descriptor = descriptor
        self.path = path
        self._messages = messages
        self.direct = self._switch(direct=True)

    def _switch(self, *, direct: bool) -> bool:
        """Has reads and writes go past the page cache, or through it. Returns whether they go past it."""
        try:
            flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
        except (AttributeError, OSError):  # the system has no direct I/O, or the file system has none
            return False
        return direct

    def read(self, memory: Tensor, offset: int, needed: int | None = None) -> None:
        """Reads whole pages to memory that begins at a page.

        Args:
            memory: flat ``uint8``.
            offset: where the pages begin in the file.
            needed: bytes without which it is an error: the file may end within the last page. All if it is not given.

        Raises:
            OSError: the disk failed, or the file ends before the bytes that are needed.
        """
        view, done, needed = buffer_of(memory), 0, memory.nbytes if needed is None else needed
        unread, _, short, remedy = self._messages
        while done < needed:
            try:
                count = os.preadv(self.descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise OSError(error.errno, f"{unread}: {error.strerror}{remedy}", self.path) from error
            if done + count < needed:
                if count < (PAGE if self.direct else 1):
                    missing = needed - done - count
                    raise OSError(errno.EIO, f"{short} ends {missing} bytes too early{remedy}", self.path)
                if self.direct:
                    count = count // PAGE * PAGE  # they go on at a page
            done += count
        self._leave_cache(offset, memory.nbytes)

    def write(self, memory: Tensor, offset: int) -> None:
        """Writes whole pages of memory that begins at a page.

        Raises:
            OSError: the disk failed.
        """
        view, done = buffer_of(memory), 0
        while done < len(view):
            try:
                done += os.pwritev(self.descriptor, [view[done:]], offset + done)
            except OSError as error:
                _, unwritten, _, remedy = self._messages
                raise OSError(error.errno, f"{unwritten}: {error.strerror}{remedy}", self.path) from error
        if not self.direct:
            os.fdatasync(self.descriptor)  # pages that are not on the disk yet cannot leave the page cache
        self._leave_cache(offset, memory.nbytes)

    def _leave_cache(self, offset: int, nbytes: int) -> None:
        if not self.direct:
            os.posix_fadvise(self.descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


def buffer_of(memory: Tensor) -> memoryview:
    """Flat ``uint8`` host memory, as calls of the system take it."""
    array: Any = memory.numpy()
    return memoryview(array)
