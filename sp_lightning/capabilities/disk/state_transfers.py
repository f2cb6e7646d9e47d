"""Reads optimizer state from a disk ahead of its use, and writes it behind, through reused buffers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from sp_lightning.capabilities.disk.direct_file import Extent, ScratchFile, Transfer, aligned_memory
from sp_lightning.core.device.layout import Span, whole_pages

_NOTHING = Transfer(())
"""A transfer that is complete."""


@dataclass(eq=False)
class Stored:
    """The state of one layer on the disk.

    Attributes:
        extent: the part of the file that the state takes.
        spans: the place of each tensor in the extent.
        tensors: weak references to the tensors. User code may have moved the tensors to another layer's parameters.
        buffer: memory for the bytes of the extent while they are read, used or written; otherwise None.
        transfer: the last read or write of the buffer.
    """

    extent: Extent
    spans: tuple[Span, ...]
    tensors: list[weakref.ref[Tensor]] = field(default_factory=list)
    buffer: Tensor | None = None
    transfer: Transfer = _NOTHING


class StateTransfers:
    """Reads and writes optimizer state through buffers of whole pages. Callers of all methods hold ``lock``.

    Args:
        file: the scratch file.
        limit: the most bytes of all buffers together. The buffers exceed it only if one buffer, or one update, needs more.
        coming: returns what updates will probably load next, in this order.

    Attributes:
        file, limit: as given.
        lock: protects this object. A thread of the disk acquires it, too, to read ahead.
        ahead: state that was read ahead, or is being read.
        behind: state that is being written.
        nbytes: the bytes of all buffers now.
        peak_bytes: the most bytes of all buffers so far.
    """

    def __init__(self, file: ScratchFile, limit: int, coming: Callable[[], Iterable[Stored]]) -> None:
        self.file = file
        self.limit = limit
        self.lock = threading.RLock()
        self._idle: list[Tensor] = []
        self.nbytes = self.peak_bytes = 0
        self._coming = coming
        self.ahead: list[Stored] = []
        self.behind: list[Stored] = []

    def load(self, stored: Stored) -> None:
        """Makes a layer's buffer contain its bytes: waits for a prefetch or a write of the buffer, or reads the bytes.

        Raises:
            OSError: the disk failed.
        """
        if stored in self.behind:
            stored.transfer.wait()  # the buffer still has the bytes
            self.behind.remove(stored)
        elif stored.buffer is None:
            self._read(stored, self.take(stored.extent.nbytes))
        try:
            stored.transfer.wait()
        except OSError:
            self.release(stored)
            raise
        if stored in self.ahead:
            self.ahead.remove(stored)
        stored.transfer = _NOTHING

    def write(self, stored: Stored) -> None:
        """Begins to write a layer's buffer. After the write, the next state is prefetched into the memory."""
        assert stored.buffer is not None
        stored.transfer = self.file.begin_write(stored.extent.offset, stored.buffer)
        self.behind.append(stored)
        stored.transfer.then(self._go_on)

    def read_ahead(self) -> None:
        """Prefetches the next state, within the limit of memory.

        Raises:
            OSError: an earlier write failed.
        """
        self._collect()
        for stored in self._coming():
            if stored.buffer is None:
                buffer = self.lend(stored.extent.nbytes)
                if buffer is None:
                    return
                self._read(stored, buffer)
                self.ahead.append(stored)

    def _read(self, stored: Stored, buffer: Tensor) -> None:
        stored.transfer = self.file.begin_read(stored.extent.offset, buffer)
        stored.buffer = buffer  # after `begin_read`, which raises a RuntimeError if the process is ending

    def _go_on(self) -> None:
        """Prefetches into the memory of a buffer that was written. Runs in a thread of the disk.

        It never waits for the lock. The thread that holds the lock may be waiting for this thread, and prefetches itself.
        """
        if self.lock.acquire(blocking=False):
            try:
                # The next thread that needs the memory raises the error of a write. A RuntimeError: the process is ending.
                with suppress(OSError, RuntimeError):
                    self.read_ahead()
            finally:
                self.lock.release()

    def make_room(self) -> None:
        """Frees all buffers that no update uses, because an optimizer is about to make state in memory of its own.

        Waits for all writes, and drops prefetched state.

        Raises:
            OSError: a write failed.
        """
        while self.behind:
            self.written(self.behind[0])
        while self.ahead:
            self.release(self.ahead[-1])
        while self._idle:
            self.nbytes -= self._idle.pop().nbytes

    def lend(self, nbytes: int) -> Tensor | None:
        """Returns a buffer of ``nbytes`` bytes, rounded up to whole pages; None if the limit leaves no memory for it now.

        If no idle buffer has this size, idle buffers of other sizes are freed for a new one.
        """
        nbytes = whole_pages(nbytes)
        for index, buffer in enumerate(self._idle):
            if buffer.nbytes == nbytes:
                return self._idle.pop(index)
        while self._idle and self.nbytes + nbytes > self.limit:
            self.nbytes -= self._idle.pop(0).nbytes
        return None if self.nbytes and self.nbytes + nbytes > self.limit else self.lend_more(nbytes)

    def lend_more(self, nbytes: int) -> Tensor:
        """Allocates a buffer, even beyond the limit. Beyond it, :meth:`give_back` frees buffers instead of keeping them."""
        memory = aligned_memory(nbytes)
        self.nbytes += memory.nbytes
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
        return memory

    def give_back(self, buffer: Tensor) -> None:
        """Takes back a buffer that no transfer uses any more: keeps it, or frees it if the buffers exceed the limit."""
        if self.nbytes > self.limit:
            self.nbytes -= buffer.nbytes
        else:
            self._idle.append(buffer)

    def take(self, nbytes: int) -> Tensor:
        """Returns a buffer, as :meth:`lend`. If the limit leaves no memory for it, frees some:

        - waits for the oldest write;
        - without writes, drops the state that was prefetched last;
        - without prefetched state, exceeds the limit.

        Raises:
            OSError: a write failed.
        """
        self._collect()
        while (buffer := self.lend(nbytes)) is None:
            if self.behind:
                self.written(self.behind[0])
            elif self.ahead:
                self.release(self.ahead[-1])
            else:  # one update uses all buffers: user code has exchanged tensors of several layers (`Stored.tensors`)
                return self.lend_more(nbytes)
        return buffer

    def _collect(self) -> None:
        """Takes back the buffers of complete writes.

        Raises:
            OSError: a write failed.
        """
        for stored in [each for each in self.behind if each.transfer.done]:
            self.written(stored)

    def written(self, stored: Stored) -> None:
        """Waits for the write of a layer, and gives back its buffer.

        Raises:
            OSError: the write failed. The bytes stay in the buffer.
        """
        stored.transfer.wait()
        self.behind.remove(stored)
        self.release(stored)

    def release(self, stored: Stored) -> None:
        """Gives back a layer's buffer after its transfer, which may have failed. Prefetched state is dropped."""
        if stored in self.ahead:
            self.ahead.remove(stored)
        stored.transfer.finish()
        if stored.buffer is not None:
            self.give_back(stored.buffer)
        stored.buffer, stored.transfer = None, _NOTHING
