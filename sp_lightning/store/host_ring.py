"""Pinned host memory that saved tensors pass through."""

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

# An idle piece of the ring is used for something smaller, down to this share.
_FILLED = 1 / 2


@dataclass(eq=False)
class Berth:
    """A piece of the ring.

    Attributes:
        memory: on the host.
        last: event of the last transfer from or to it.
    """

    memory: PinnedMemory
    last: Any = None

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.memory.bytes.nbytes


class HostRing:
    """Pinned host memory that saved tensors pass through, used again and again; bounded.

    Args:
        device: the seam.
        pin: page-lock it.
        limit: most bytes; None for no end.
    """

    def __init__(self, device: Device, *, pin: bool, limit: int | None) -> None:
        self._device = device
        self._pin = pin
        self.limit = limit
        self._idle: list[Berth] = []  # smallest first
        self._returned: deque[Berth] = deque()  # by whatever thread lets go of a graph, at any moment
        self.nbytes = 0
        self.peak_bytes = 0

    @property
    def room(self) -> float:
        """Bytes that are idle or can still be taken."""
        idle = sum(berth.nbytes for berth in (*self._idle, *self._returned))
        return math.inf if self.limit is None else self.limit - self.nbytes + idle

    def take(self, nbytes: int) -> Berth | None:
        """A berth of at least so many bytes; None if the host has no room for one."""
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
        """Nobody needs what is in it."""
        self._returned.append(berth)

    def close(self) -> None:
        """Free what is idle. Graphs that outlive the run keep theirs."""
        for berth in (*self._idle, *self._returned):
            self._device.synchronize(berth.last, Wait.CLOSE_AFTER_STORE)
            self._device.access(berth.memory.bytes, None, write=True)
        self._idle.clear()
        self._returned.clear()


def _size(berth: Berth) -> int:
    return berth.nbytes
