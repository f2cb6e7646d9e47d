"""The bytes of an optimizer's state between a disk and host memory: read ahead, in use, and written behind."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from sp_lightning.device.layout import Span, whole_pages
from sp_lightning.disk.direct_file import Extent, ScratchFile, Transfer, aligned_memory

_NOTHING = Transfer(())
"""A transfer that is over."""


@dataclass(eq=False)
class Stored:
    """The state of one layer on the disk.

    Attributes:
        extent: where it is.
        spans: where each tensor is in it.
        tensors: those that are there. Users may have given them to another layer's parameters.
        buffer: memory with the same bytes, as long as they are read or written.
        transfer: of those bytes; of none once they are there.
    """

    extent: Extent
    spans: tuple[Span, ...]
    tensors: list[weakref.ref[Tensor]] = field(default_factory=list)
    buffer: Tensor | None = None
    transfer: Transfer = _NOTHING


class StateTransfers:
    """The transfers of optimizers' state, through buffers of whole pages that are used again and again.

    The caller of a method has the lock. A disk's thread has it, too, when it goes on by itself.

    Args:
        file: where state is written.
        limit: the most bytes of all buffers together. One larger buffer is lent if nothing else is.
        coming: returns what updates will probably ask for next, in that order.

    Attributes:
        file, limit: as given.
        lock: the lock of all who use this.
        ahead: what was read ahead, or is being read.
        behind: what is being written.
        nbytes: bytes of all buffers now.
        peak_bytes: the most bytes that they were.
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
        """Has a layer's bytes in its buffer.

        Raises:
            OSError: the disk failed.
        """
        if stored in self.behind:
            stored.transfer.wait()  # the bytes are still there
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
        """Begins to write a layer's buffer. Once it is written, what is coming is read into its memory."""
        assert stored.buffer is not None
        stored.transfer = self.file.begin_write(stored.extent.offset, stored.buffer)
        self.behind.append(stored)
        stored.transfer.then(self._go_on)

    def read_ahead(self) -> None:
        """Reads what is coming, as far as the limit leaves memory for it.

        Raises:
            OSError: a write that has ended failed.
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
        stored.buffer = buffer  # only now, because a process that ends begins no read

    def _go_on(self) -> None:
        """Reads ahead into the memory of what was written. Runs in a thread of the disk.

        It never waits: the thread that has the lock may wait for this one, and goes on by itself.
        """
        if self.lock.acquire(blocking=False):
            try:
                # The thread that needs the memory gets the error of a write. There is another one if the process ends.
                with suppress(OSError, RuntimeError):
                    self.read_ahead()
            finally:
                self.lock.release()

    def make_room(self) -> None:
        """Leaves the memory of all buffers to state that an optimizer is about to make, in memory of its own.

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
        """Returns a buffer of at least so many bytes, in whole pages; None if the limit leaves no memory for it now."""
        nbytes = whole_pages(nbytes)
        for index, buffer in enumerate(self._idle):
            if buffer.nbytes == nbytes:
                return self._idle.pop(index)
        while self._idle and self.nbytes + nbytes > self.limit:
            self.nbytes -= self._idle.pop(0).nbytes
        return None if self.nbytes and self.nbytes + nbytes > self.limit else self.lend_more(nbytes)

    def lend_more(self, nbytes: int) -> Tensor:
        """Returns a new buffer, whatever the limit is. It is freed once it is given back."""
        memory = aligned_memory(nbytes)
        self.nbytes += memory.nbytes
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
        return memory

    def give_back(self, buffer: Tensor) -> None:
        """Takes a buffer back that is neither read nor written any more."""
        if self.nbytes > self.limit:
            self.nbytes -= buffer.nbytes
        else:
            self._idle.append(buffer)

    def take(self, nbytes: int) -> Tensor:
        """Takes a buffer. If there is none, it waits for what is written, or drops what was read ahead last.

        Raises:
            OSError: a write failed.
        """
        self._collect()
        while (buffer := self.lend(nbytes)) is None:
            if self.behind:
                self.written(self.behind[0])
            elif self.ahead:
                self.release(self.ahead[-1])
            else:  # one update has all of it: users have exchanged tensors of several layers
                return self.lend_more(nbytes)
        return buffer

    def _collect(self) -> None:
        """Takes back the buffers of writes that are done."""
        for stored in [each for each in self.behind if each.transfer.done]:
            self.written(stored)

    def written(self, stored: Stored) -> None:
        """Waits until a layer is written, and gives its buffer back.

        Raises:
            OSError: the write failed. The bytes stay in the buffer.
        """
        stored.transfer.wait()
        self.behind.remove(stored)
        self.release(stored)

    def release(self, stored: Stored) -> None:
        """Gives a buffer back, once no transfer writes to it any more."""
        if stored in self.ahead:
            self.ahead.remove(stored)
        stored.transfer.finish()
        if stored.buffer is not None:
            self.give_back(stored.buffer)
        stored.buffer, stored.transfer = None, _NOTHING
