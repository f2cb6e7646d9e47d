"""The disk of a simulated machine: one queue of reads and writes, each of which takes the time that its bytes need."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from itertools import islice

from sp_lightning.device.timeline import Interval, Kind
from sp_lightning.plan.succession import Succession
from sp_lightning.tune.clocks import ClockDevice

_BUFFERS = 3
"""Layers that are in staging memory at once: one is read, one is in use, one is written, as in the engine."""


class DiskQueue:
    """What of layers is on a disk, and when it is in memory. All times are in seconds.

    As in the engine, layers that came next in the last batch are read ahead, as far as there are buffers.

    Args:
        device: the device of clocks, which keeps the intervals.
        rate: bytes that the disk reads or writes in a second.
        sizes: bytes that are on the disk, by the layer's index.
    """

    def __init__(self, device: ClockDevice, rate: float, sizes: Mapping[int, int]) -> None:
        self._device = device
        self._rate = rate
        self._sizes = sizes
        self._idle_from = 0.0
        self._free = [0.0] * _BUFFERS  # since when each free buffer is free
        self._there: dict[int, float] = {}  # when what is read ahead is there
        self._uses = Succession[int](1)

    def ready(self, index: int) -> bool:
        """Whether a layer is in memory now. If not, it is read, if there is a buffer for it."""
        return index not in self._sizes or self._read(index, self._device.host) <= self._device.host

    def bring(self, index: int, now: float, ahead: int = _BUFFERS) -> float:
        """Returns when a layer is in memory. Those that follow it are read ahead from then on.

        Args:
            index: of the layer.
            now: when it is asked for.
            ahead: how many layers are read ahead at most.
        """
        if index not in self._sizes:
            return now
        there = max(now, self._read(index, now))
        self._there.pop(index, None)
        self._uses.note(index)
        for following in islice(self._uses.coming(), ahead):
            if not self._free:
                break
            self._read(following, there)
        return there

    def write(self, index: int, now: float) -> None:
        """A layer is written, which frees its buffer."""
        if index in self._sizes:
            heappush(self._free, self._transfer("write", index, now))

    def free(self, index: int, now: float) -> None:
        """A layer's buffer is free, without a write."""
        if index in self._sizes:
            heappush(self._free, now)

    def _read(self, index: int, now: float) -> float:
        if index not in self._there:
            if not self._free:
                # Something was read in vain: its buffer is taken.
                _, wrong = max((there, other) for other, there in self._there.items())
                heappush(self._free, max(now, self._there.pop(wrong)))
            self._there[index] = self._transfer("read", index, max(now, heappop(self._free)))
        return self._there[index]

    def _transfer(self, kind: Kind, index: int, now: float) -> float:
        begin = max(self._idle_from, now)
        self._idle_from = begin + self._sizes[index] / self._rate
        self._device.intervals.append(Interval(kind, index, begin, self._idle_from, self._sizes[index]))
        return self._idle_from
