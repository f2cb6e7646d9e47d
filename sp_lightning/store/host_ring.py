"""A ring of pinned host memory in which offloaded tensors wait for their backward."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from typing import Any

from sp_lightning.device.device import Device
from sp_lightning.device.layout import PAGE
from sp_lightning.device.pinned import PinnedMemory
from sp_lightning.device.waits import Wait

# An idle piece of the ring is used again only for tensors that fill at least this share of it.
_FILLED = 1 / 2


@dataclass(eq=False)
class Berth:
    """A piece of the ring.

    Attributes:
        memory: its bytes on the host.
        last: the event of the last transfer from or to it; None before the first.
    """

    memory: PinnedMemory
    last: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes that it has room for."""
        return self.memory.bytes.nbytes


class HostRing:
    """Pinned host memory for offloaded tensors, which is used again and again and has a limit.

    Pinning memory takes far longer than a copy, so what a batch has taken is kept for the next one.

    Args:
        device: allocates, and waits for transfers.
        pin: whether the memory is page-locked.
        limit: the most bytes that the ring may take; None for no limit.

    Attributes:
        nbytes: bytes that the ring has taken.
        peak_bytes: the most bytes that it ever had.
    """

    def __init__(self, device: Device, *, pin: bool, limit: int | None) -> None:
        self._device = device
        self._pin = pin
        self.limit = limit
        self._idle: list[Berth] = []  # smallest first
        # Any thread may let go of a graph at any moment, and with it of what the graph has offloaded. Appending to a deque
        # needs no lock; the next call of take sorts these in.
        self._returned: deque[Berth] = deque()
        self.nbytes = 0
        self.peak_bytes = 0

    @property
    def room(self) -> float:
        """Bytes that are idle or can still be taken; infinite without a limit."""
        idle = sum(berth.nbytes for berth in (*self._idle, *self._returned))
        return math.inf if self.limit is None else self.limit - self.nbytes + idle

    def take(self, nbytes: int) -> Berth | None:
        """Returns a berth of at least ``nbytes`` bytes; None if the limit leaves no room for one.

        If the limit is reached, idle berths are freed, the largest first.
        """
        while self._returned:
            insort(self._idle, self._returned.popleft(), key=_size)
        nbytes = -(-nbytes // PAGE) * PAGE
        at = bisect_left(self._idle, nbytes, key=_size)
        if at < len(self._idle) and self._idle[at].nbytes * _FILLED <= nbytes:
            return self._idle.pop(at)
        while self.limit is not None and self.nbytes + nbytes > self.limit:
            if not self._idle:
                return None
            idle = self._idle.pop()
            self._device.synchronize(idle.last, Wait.CLOSE_AFTER_STORE)
            self._device.access(idle.memory.bytes, None, write=True)
            self.nbytes -= idle.nbytes
        berth = Berth(PinnedMemory(self._device, nbytes, pin=self._pin))
        self.nbytes += berth.nbytes
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
        return berth

    def give_back(self, berth: Berth) -> None:
        """Takes a berth back whose content nobody needs any more. Any thread may call this."""
        self._returned.append(berth)

    def close(self) -> None:
        """Frees what is idle. A graph that outlives the run keeps its berths."""
        for berth in (*self._idle, *self._returned):
            self._device.synchronize(berth.last, Wait.CLOSE_AFTER_STORE)
            self._device.access(berth.memory.bytes, None, write=True)
        self._idle.clear()
        self._returned.clear()


def _size(berth: Berth) -> int:
    return berth.nbytes
