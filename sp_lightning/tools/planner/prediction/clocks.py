"""A simulated device that only counts time: a copy moves no bytes, and advances the clock of its stream by its predicted time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.device.timeline import Interval, Kind
from sp_lightning.tools.planner.prediction.visits import RESOURCES, Rates

_READ_AHEAD = 3  # layers that fit into staging memory, as in the engine


@dataclass(frozen=True)
class HostBytes:
    """A placeholder for bytes of a layer on the host.

    Attributes:
        layer: the layer's index.
        nbytes: the number of bytes.
        on_disk: the number of bytes that are read from a disk.
    """

    layer: int
    nbytes: int
    on_disk: int = 0


class ClockDevice(Device):
    """A device whose streams, and whose host, are clocks in seconds.

    A copy advances its stream's clock by its predicted time. An event is a time; a wait sets the waiting clock to this time
    if the clock is earlier.

    Args:
        rates: the speed of the machine.

    Attributes:
        now: the time of each stream.
        host: the time of the host.
        intervals: the work since :meth:`clear`.
        copied: the bytes that were copied since :meth:`clear`.
    """

    def __init__(self, rates: Rates) -> None:
        super().__init__(torch.device("cpu"))
        self._rates = rates
        self.now = dict.fromkeys(Stream, 0.0)
        self.host = 0.0
        self.intervals: list[Interval] = []
        self.copied = 0
        self._disk = 0.0  # the time from which the disk is idle
        # Begin and end of optimizer steps on the device that kernels of the model have not overlapped yet.
        self._steps: list[tuple[float, float]] = []

    def empty(self, nbytes: int) -> Tensor:
        return super().empty(0)

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Any], stream: Stream, *, why: Wait | None = None
    ) -> None:
        for source in sources:
            if source.on_disk:
                self.pass_disk(stream, ["read"], source.layer, source.on_disk, source.nbytes / self._rates.upload)
            self.transfer("fetch" if stream is Stream.UPLOAD else "drain", source.layer, source.nbytes)

    def transfer(self, kind: Kind, layer: int | None, nbytes: int) -> None:
        """Simulates a copy to the device (weights or activations) or to the host: advances the clock of its stream."""
        upload = kind in RESOURCES["fetch"]
        stream, rate = (Stream.UPLOAD, self._rates.upload) if upload else (Stream.DOWNLOAD, self._rates.download)
        self.spend(stream, nbytes / rate, kind, layer, nbytes)
        self.copied += nbytes

    def pass_disk(self, stream: Stream, ways: Sequence[Kind], layer: int, nbytes: int, beside: float) -> None:
        """Simulates disk transfers of a layer for which a stream waits. The disk begins up to :data:`_READ_AHEAD` layers early.

        Args:
            stream: the stream.
            ways: ``"read"``, or ``"read"`` and ``"write"``.
            layer: the layer's index.
            nbytes: the bytes of each transfer.
            beside: the seconds of the stream's own work for the same layer. The disk works at the same time, so the slower
                of the two determines the rate.
        """
        seconds = nbytes / self._rates.disk
        asked = max(self.now[stream], self.host)
        self._disk = max(self._disk, asked - _READ_AHEAD * seconds)
        for way in ways:
            self.intervals.append(Interval(way, layer, self._disk, self._disk + seconds, nbytes))
            self._disk += seconds
        self.now[stream] = max(self.now[stream], self._disk - beside)

    def spend(self, stream: Stream, seconds: float, kind: Kind, layer: int | None, nbytes: int = 0) -> None:
        """Issues work of some seconds to a stream. The work does not begin before the host has issued it.

        If the device is synchronous, the host and compute wait for the work, except for work in the background.
        """
        begin = max(self.now[stream], self.host)
        if stream is Stream.COMPUTE and self._steps:
            seconds = self._beside_steps(begin, seconds)
        self.now[stream] = begin + seconds
        if seconds:
            self.intervals.append(Interval(kind, layer, begin, begin + seconds, nbytes))
        if self._rates.synchronous and stream is not Stream.UPDATE:
            self.host = self.now[Stream.COMPUTE] = self.now[stream]

    def step(self, seconds: float, layer: int | None) -> None:
        """Issues the kernels of an optimizer step. Kernels of the model at the same time are delayed by the same seconds."""
        self.spend(Stream.STEP, seconds, "update", layer)
        end = self.now[Stream.STEP]
        if self.now[Stream.COMPUTE] >= end:
            self.now[Stream.COMPUTE] += seconds
        else:
            self._steps.append((end - seconds, end))

    def _beside_steps(self, begin: float, seconds: float) -> float:
        """Returns the seconds of the model's kernels that begin at ``begin``, longer by the steps that run at the same time.

        Forgets steps that end before these kernels.
        """
        for first, last in self._steps:
            if first < begin + seconds:
                seconds += max(0.0, last - max(first, begin))
        self._steps = [step for step in self._steps if step[0] >= begin + seconds]
        return seconds

    def record(self, stream: Stream) -> float:
        return max(self.now[stream], self.host)

    def wait(self, stream: Stream, event: float | None, why: Wait) -> None:
        if event is not None:
            late = event - max(self.now[stream], self.host)
            if late > 0:
                self.now[stream] = event
                if stream is Stream.COMPUTE:
                    self._stalled[why] += late

    def synchronize(self, event: float | None, why: Wait) -> None:
        if event is not None:
            self.host = max(self.host, event)

    def clock(self) -> float:
        self.host = max(self.host, self.now[Stream.COMPUTE])
        return self.host

    def clear(self) -> None:
        """Drops the intervals and counts of the last batch; the clocks continue."""
        self.intervals.clear()
        self.copied = 0
        self._stalled = dict.fromkeys(Wait, 0.0)
