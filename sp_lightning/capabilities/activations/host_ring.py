"""Host memory for offloaded activations: a pool of buffers that are used again."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

from sp_lightning.core.device.device import Device, Wait
from sp_lightning.core.device.host_memory import PinnedMemory
from sp_lightning.core.device.layout import whole_pages

_FILLED = 1 / 2
"""A tensor uses an idle buffer only if the tensor takes at least this share of the buffer."""


class HostRing:
    """A pool of host buffers, pinned and bounded.

    Args:
        device: the device that copies from and to the buffers.
        pin: True to page-lock the memory.
        limit: the most bytes of all buffers together; None for no limit.

    Attributes:
        pin, limit: as given.
        nbytes: bytes of all buffers now.
        peak_bytes: the most bytes of all buffers so far.
    """

    def __init__(self, device: Device, *, pin: bool, limit: int | None) -> None:
        self._device = device
        self.pin = pin
        self.limit = limit
        self._idle: list[PinnedMemory] = []  # the smallest first
        # A buffer is returned when a graph is freed: by any thread, at any moment. A deque needs no lock for that.
        self._returned: deque[PinnedMemory] = deque()
        self.nbytes = 0
        self.peak_bytes = 0

    @property
    def free_bytes(self) -> float:
        """Bytes of idle buffers and of buffers that the limit still allows; infinite without a limit."""
        idle = sum(buffer.nbytes for buffer in (*self._idle, *self._returned))
        return math.inf if self.limit is None else self.limit - self.nbytes + idle

    def take(self, nbytes: int) -> PinnedMemory | None:
        """Returns a buffer of at least ``nbytes``; None if the limit or the system leaves no memory for one.

        Frees idle buffers if necessary.

        The caller sets :attr:`~sp_lightning.core.device.host_memory.PinnedMemory.last` to the event of each copy from or to it.
        """
        while self._returned:
            insort(self._idle, self._returned.popleft(), key=_size)
        nbytes = whole_pages(nbytes)
        at = bisect_left(self._idle, nbytes, key=_size)
        if at < len(self._idle) and self._idle[at].nbytes * _FILLED <= nbytes:
            return self._idle.pop(at)
        while self.limit is not None and self.nbytes + nbytes > self.limit:
            if not self._idle:
                return None
            self._free(largest := self._idle.pop())
            self.nbytes -= largest.nbytes
        try:
            buffer = PinnedMemory(self._device, nbytes, pin=self.pin)
        except (RuntimeError, MemoryError):  # the system has less memory than the limit allows
            self.limit = self.nbytes
            return None
        self.nbytes += buffer.nbytes
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
        return buffer

    def give_back(self, buffer: PinnedMemory) -> None:
        """Makes a buffer available for other tensors. Its contents are not needed any more."""
        self._returned.append(buffer)

    def close(self) -> None:
        """Frees the idle buffers. A graph that outlives the run keeps its own buffers."""
        for buffer in (*self._idle, *self._returned):
            self._free(buffer)
        self._idle.clear()
        self._returned.clear()

    def _free(self, buffer: PinnedMemory) -> None:
        """Waits for the last copy from or to a buffer. The memory is freed when the caller drops the buffer."""
        self._device.synchronize(buffer.last, Wait.CLOSE_AFTER_STORE)
        self._device.access(buffer.bytes, None, write=True)


def _size(buffer: PinnedMemory) -> int:
    return buffer.nbytes
