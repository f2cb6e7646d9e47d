"""Files that are read and written past the page cache if the file system allows it, in pieces, by a few threads.

Libraries were considered. kvikio and DeepNVMe read to GPU memory or need a compiler. Bindings of io_uring are compiled, and many
containers forbid its calls. fsspec has no direct I/O. A few threads with ``preadv`` and ``pwritev`` on pieces of some MiB keep
the queue of a drive full, so the standard library is enough.
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

from sp_lightning.core.device.layout import PAGE, whole_pages

with suppress(ImportError):  # Windows has no fcntl and no direct I/O
    import fcntl

PIECE = 8 * 2**20
"""Bytes that one call reads or writes. Several pieces are in flight at once."""

THREADS = 4
"""The number of threads that read, and of threads that write: enough to fill the queue of a fast drive, and few compared to the
threads that compute. Reads and writes have separate threads, because many drives and control groups limit the rate of each
separately."""


def aligned_memory(nbytes: int) -> Tensor:
    """Returns at least ``nbytes`` bytes of page-aligned memory in whole pages, flat ``uint8``, as direct I/O needs it.

    The mapping is shared. A private mapping would be copied on write if a process (a ``DataLoader`` worker) is forked during a
    transfer, and direct I/O could then use the wrong copy (``man 2 open``).
    """
    return torch.frombuffer(mmap.mmap(-1, whole_pages(nbytes)), dtype=torch.uint8)


class Transfer:
    """Reads or writes in flight.

    Args:
        pieces: the futures of the calls that read or write a piece each.
    """

    def __init__(self, pieces: Sequence[Future[None]]) -> None:
        self._pieces = pieces

    @property
    def done(self) -> bool:
        """True if :meth:`wait` would not block."""
        return all(piece.done() for piece in self._pieces)

    def then(self, call: Callable[[], None]) -> None:
        """Calls ``call`` when all pieces are done: in a thread of the disk, or at once if they are done already.

        ``call`` may run several times, for example if two pieces end at the same time.
        """
        for piece in self._pieces:
            piece.add_done_callback(lambda _: call() if self.done else None)

    def finish(self) -> None:
        """Waits until all pieces have ended, successfully or not. From then on this transfer does not use the memory."""
        wait(self._pieces)

    def wait(self) -> None:
        """Waits until all bytes are transferred.

        Raises:
            OSError: a read or a write failed.
        """
        self.finish()
        for piece in self._pieces:
            piece.result()


def in_pieces(
    threads: ThreadPoolExecutor, call: Callable[[int, Tensor], None], offset: int, memory: Tensor
) -> list[Future[None]]:
    """Divides memory into pieces of :data:`PIECE` bytes, and submits a call for each.

    Args:
        threads: run the calls.
        call: is called with the offset of a piece in the file, and the piece.
        offset: the offset of ``memory`` in the file.
        memory: flat ``uint8``.
    """
    return [threads.submit(call, offset + at, memory[at : at + PIECE]) for at in range(0, memory.nbytes, PIECE)]


class DirectFile:
    """An open file that is read and written past the page cache if the file system allows it.

    Args:
        descriptor: the descriptor of the file.
        path: the path that errors show.
        messages: the parts of error messages: a read failed, a write failed, the subject of "ends too early", and a remedy.

    Attributes:
        direct: True if reads and writes bypass the page cache.
    """

    def __init__(self, descriptor: int, path: str, messages: tuple[str, str, str, str]) -> None:
        self.descriptor = descriptor
        self.path = path
        self._messages = messages
        self.direct = self._switch(direct=True)

    def _switch(self, *, direct: bool) -> bool:
        """Turns direct I/O on or off. Returns True if it is on."""
        try:
            flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
        except (AttributeError, OSError):  # the system or the file system has no direct I/O
            return False
        return direct

    def read(self, memory: Tensor, offset: int, needed: int | None = None) -> None:
        """Reads whole pages to page-aligned memory.

        Args:
            memory: flat ``uint8``.
            offset: the offset of the pages in the file.
            needed: the number of bytes that must be read. It may be less than ``memory``, because the file may end within the
                last page. None: all bytes of ``memory``.

        Raises:
            OSError: the disk failed, or the file ends before ``needed`` bytes.
        """
        view, done = buffer_of(memory), 0
        needed = memory.nbytes if needed is None else needed
        unread, _, short, remedy = self._messages
        while done < needed:
            try:
                count = os.preadv(self.descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise OSError(error.errno, f"{unread}: {error.strerror}{remedy}", self.path) from error
            if done + count < needed:
                if count < (PAGE if self.direct else 1):  # the file has ended
                    missing = needed - done - count
                    raise OSError(errno.EIO, f"{short} ends {missing} bytes too early{remedy}", self.path)
                if self.direct:
                    count = count // PAGE * PAGE  # direct I/O: the next read must begin at a page
            done += count
        self._leave_cache(offset, memory.nbytes)

    def write(self, memory: Tensor, offset: int) -> None:
        """Writes page-aligned memory in whole pages.

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
            os.fdatasync(self.descriptor)  # the page cache cannot drop dirty pages
        self._leave_cache(offset, memory.nbytes)

    def _leave_cache(self, offset: int, nbytes: int) -> None:
        if not self.direct:
            os.posix_fadvise(self.descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


def buffer_of(memory: Tensor) -> memoryview:
    """Returns flat ``uint8`` host memory as a buffer for system calls."""
    array: Any = memory.numpy()
    return memoryview(array)
