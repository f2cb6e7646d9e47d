"""A device whose streams are clocks: copies move no bytes and take the time that the machine would need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.device.timeline import Interval, Kind
from sp_lightning.tuning.visits import RESOURCES, Rates

_READ_AHEAD = 3  # layers that staging memory has room for, as in the engine


@dataclass(frozen=True)
class HostBytes:
    """Stands for bytes of a layer on the host.

    Attributes:
        layer: the layer's index.
        nbytes: how many bytes they are.
        on_disk: how many of them have to be read from a disk.
        parts: how many devices upload a part each, and get the others from each other.
    """

    layer: int
    nbytes: int
    on_disk: int = 0
    parts: int = 1


class ClockDevice(Device):
    """A device whose streams, and whose host, are clocks that show seconds.

    A copy moves its stream's clock on by the time that the machine would need. An event is a time; waiting for it sets
    the waiting clock to that time if it is earlier.

    Args:
        rates: how fast the machine is.

    Attributes:
        now: what each stream's clock shows.
        host: what the host's clock shows.
        intervals: what has happened since :meth:`clear`.
        copied: bytes that were copied since then.
    """

    def __init__(self, rates: Rates) -> None:
        super().__init__(torch.device("cpu"))
        self._rates = rates
        self.now = dict.fromkeys(Stream, 0.0)
        self.host = 0.0
        self.intervals: list[Interval] = []
        self.copied = 0
        self._disk = 0.0  # since when the disk is idle
        # Begin and end of steps on the device that no kernels of the model have overlapped yet.
        self._steps: list[tuple[float, float]] = []

    def empty(self, nbytes: int) -> Tensor:
        return super().empty(0)

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Any], stream: Stream, *, why: Wait | None = None
    ) -> None:
        for source in sources:
            part = -(-source.nbytes // source.parts)
            if source.on_disk:
                self.pass_disk(stream, ["read"], source.layer, source.on_disk, part / self._rates.upload)
            self.transfer("fetch" if stream is Stream.UPLOAD else "drain", source.layer, part)
            if source.parts > 1:
                self.spend(stream, source.nbytes / self._rates.links, "gather", source.layer, source.nbytes)

    def transfer(self, kind: Kind, layer: int, nbytes: int) -> None:
        """Issues a copy: a fetch or a return of activations to the device, or one to the host."""
        upload = kind in RESOURCES["fetch"]
        stream, rate = (Stream.UPLOAD, self._rates.upload) if upload else (Stream.DOWNLOAD, self._rates.download)
        self.spend(stream, nbytes / rate, kind, layer, nbytes)
        self.copied += nbytes

    def pass_disk(self, stream: Stream, ways: Sequence[Kind], layer: int, nbytes: int, beside: float) -> None:
        """Moves bytes from the disk, and back, for a stream, which waits for them. Some layers are read ahead.

        Args:
            stream: the stream.
            ways: ``"read"``, or that and ``"write"``: once for each.
            layer: the layer's index.
            nbytes: bytes each way.
            beside: the seconds that the stream takes for the same layer. The disk works meanwhile, so the slower of both
                sets the pace.
        """
        seconds = nbytes / self._rates.disk
        asked = max(self.now[stream], self.host)
        self._disk = max(self._disk, asked - _READ_AHEAD * seconds)
        for way in ways:
            self.intervals.append(Interval(way, layer, self._disk, self._disk + seconds, nbytes))
            self._disk += seconds
        self.now[stream] = max(self.now[stream], self._disk - beside)

    def spend(self, stream: Stream, seconds: float, kind: Kind, layer: int | None, nbytes: int = 0) -> None:
        """Issues work of so many seconds to a stream. It does not begin before the host has issued it."""
        begin = max(self.now[stream], self.host)
        if stream is Stream.COMPUTE and self._steps:
            seconds = self._beside_steps(begin, seconds)
        self.now[stream] = begin + seconds
        if seconds:
            self.intervals.append(Interval(kind, layer, begin, begin + seconds, nbytes))
        if self._rates.synchronous and stream is not Stream.UPDATE:
            self.host = self.now[Stream.COMPUTE] = self.now[stream]

    def step(self, seconds: float, layer: int | None) -> None:
        """Issues the kernels of a step to their stream. The model's kernels of that time take so much longer."""
        self.spend(Stream.STEP, seconds, "update", layer)
        end = self.now[Stream.STEP]
        if self.now[Stream.COMPUTE] >= end:
            self.now[Stream.COMPUTE] += seconds
        else:
            self._steps.append((end - seconds, end))

    def _beside_steps(self, begin: float, seconds: float) -> float:
        """The seconds that the model's kernels take from then on, beside steps that were issued before."""
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

    def clear(self) -> None:
        """Drops what was noted of the batch before; the clocks go on."""
        self.intervals.clear()
        self.copied = 0
        self._stalled = dict.fromkeys(Wait, 0.0)
