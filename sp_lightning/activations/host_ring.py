"""Host memory for offloaded activations: a pool of buffers that are used again."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

from sp_lightning.device.device import Device, Wait
from sp_lightning.device.host_memory import PinnedMemory
from sp_lightning.device.layout import whole_pages

# An idle buffer is used for something smaller, down to this share of its size.
_FILLED = 1 / 2


class HostRing:
    """A pool of host buffers, pinned and bounded.

    Args:
        device: the device that the transfers are from and to.
        pin: whether the memory is page-locked.
        limit: the most bytes that the ring takes; None for no limit.

    Attributes:
        pin: the same.
        nbytes: bytes that the ring has taken.
        peak_bytes: the most bytes that it had taken at once.
    """

    def __init__(self, device: Device, *, pin: bool, limit: int | None) -> None:
        self._device = device
        self.pin = pin
        self.limit = limit
        self._idle: list[PinnedMemory] = []  # the smallest first
        # A buffer is returned when a graph is freed, by any thread and at any moment, while the ring is in use, too. A
        # deque takes it without a lock.
        self._returned: deque[PinnedMemory] = deque()
        self.nbytes = 0
        self.peak_bytes = 0

    @property
    def free_bytes(self) -> float:
        """Bytes that are idle, or that the limit still allows."""
        idle = sum(buffer.nbytes for buffer in (*self._idle, *self._returned))
        return math.inf if self.limit is None else self.limit - self.nbytes + idle

    def take(self, nbytes: int) -> PinnedMemory | None:
        """Gives out a buffer of at least so many bytes; None if the limit leaves no memory for one.

        Who takes it notes the last transfer from or to it (:attr:`~sp_lightning.device.host_memory.PinnedMemory.last`).
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
        buffer = PinnedMemory(self._device, nbytes, pin=self.pin)
        self.nbytes += buffer.nbytes
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
        return buffer

    def give_back(self, buffer: PinnedMemory) -> None:
        """Takes a buffer back whose contents its taker does not need any more."""
        self._returned.append(buffer)

    def close(self) -> None:
        """Frees the idle buffers. A graph that outlives the run keeps its own."""
        for buffer in (*self._idle, *self._returned):
            self._free(buffer)
        self._idle.clear()
        self._returned.clear()

    def _free(self, buffer: PinnedMemory) -> None:
        """Makes sure that no copy uses a buffer any more."""
        self._device.synchronize(buffer.last, Wait.CLOSE_AFTER_STORE)
        self._device.access(buffer.bytes, None, write=True)


def _size(buffer: PinnedMemory) -> int:
    return buffer.nbytes
