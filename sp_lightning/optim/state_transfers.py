"""The bytes of an optimizer's state between a disk and host memory: read ahead, in use, and written behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from sp_lightning.device.layout import Span
from sp_lightning.store.direct_file import Transfer
from sp_lightning.store.host_ring import StagingRing
from sp_lightning.store.scratch import Extent, ScratchFile


@dataclass(eq=False)
class Stored:
    """The state of one layer on the disk.

    Attributes:
        extent: where it is.
        spans: where each tensor is in it.
        tensors: those that are there. Users may have given them to another layer's parameters.
        buffer: memory with the same bytes, as long as they are read or written.
        transfer: of those bytes.
    """

    extent: Extent
    spans: tuple[Span, ...]
    tensors: list[weakref.ref[Tensor]] = field(default_factory=list)
    buffer: Tensor | None = None
    transfer: Transfer | None = None


class StateTransfers:
    """The transfers of optimizers' state, through the memory of a ring.

    The caller of a method has the ring's lock. A disk's thread has it, too, when it goes on by itself.

    Args:
        file: where state is written.
        ring: the memory that state passes through.
        coming: returns what updates will probably ask for next, in that order.

    Attributes:
        file, ring: as given.
        ahead: what was read ahead, or is being read.
        behind: what is being written.
    """

    def __init__(self, file: ScratchFile, ring: StagingRing, coming: Callable[[], Iterable[Stored]]) -> None:
        self.file = file
        self.ring = ring
        self._coming = coming
        self.ahead: list[Stored] = []
        self.behind: list[Stored] = []

    def load(self, stored: Stored) -> None:
        """Has a layer's bytes in its buffer.

        Raises:
            OSError: the disk failed.
        """
        if stored in self.behind:
            assert stored.transfer is not None
            stored.transfer.wait()  # the bytes are still there
            self.behind.remove(stored)
        elif stored.buffer is None:
            self._read(stored, self.take(stored.extent.nbytes))
        try:
            if stored.transfer is not None:
                stored.transfer.wait()
        except OSError:
            self.release(stored)
            raise
        if stored in self.ahead:
            self.ahead.remove(stored)
        stored.transfer = None

    def write(self, stored: Stored) -> None:
        """Begins to write a layer's buffer. Once it is written, what is coming is read into its memory."""
        assert stored.buffer is not None
        stored.transfer = self.file.begin_write(stored.extent.offset, stored.buffer)
        self.behind.append(stored)
        stored.transfer.then(self._go_on)

    def read_ahead(self) -> None:
        """Reads what is coming, as far as the ring has memory for it.

        Raises:
            OSError: a write that has ended failed.
        """
        self._collect()
        for stored in self._coming():
            if stored.buffer is None:
                buffer = self.ring.take(stored.extent.nbytes)
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
        if self.ring.lock.acquire(blocking=False):
            try:
                # The thread that needs the memory gets the error of a write. There is another one if the process ends.
                with suppress(OSError, RuntimeError):
                    self.read_ahead()
            finally:
                self.ring.lock.release()

    def make_room(self) -> None:
        """Leaves all memory of the ring to state that an optimizer is about to make, in memory of its own.

        Raises:
            OSError: a write failed.
        """
        while self.behind:
            self.written(self.behind[0])
        while self.ahead:
            self.release(self.ahead[-1])
        self.ring.free()

    def take(self, nbytes: int) -> Tensor:
        """Takes memory of the ring. If there is none, it waits for what is written, or drops what was read ahead last.

        Raises:
            OSError: a write failed.
        """
        self._collect()
        while (buffer := self.ring.take(nbytes)) is None:
            if self.behind:
                self.written(self.behind[0])
            elif self.ahead:
                self.release(self.ahead[-1])
            else:  # one update has all of it: users have exchanged tensors of several layers
                return self.ring.take_more(nbytes)
        return buffer

    def _collect(self) -> None:
        """Takes back the buffers of writes that are done."""
        for stored in [each for each in self.behind if each.transfer is not None and each.transfer.done]:
            self.written(stored)

    def written(self, stored: Stored) -> None:
        """Waits until a layer is written, and gives its buffer back.

        Raises:
            OSError: the write failed. The bytes stay in the buffer.
        """
        assert stored.transfer is not None
        stored.transfer.wait()
        self.behind.remove(stored)
        self.release(stored)

    def release(self, stored: Stored) -> None:
        """Gives a buffer back, once no transfer writes to it any more."""
        if stored in self.ahead:
            self.ahead.remove(stored)
        if stored.transfer is not None:
            stored.transfer.finish()
        if stored.buffer is not None:
            self.ring.give_back(stored.buffer)
        stored.buffer = stored.transfer = None
