"""A device whose streams are clocks: copies move no bytes and take the time that the machine would need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_lightning.device.device import Device
from sp_lightning.device.timeline import Interval, Kind
from sp_lightning.device.waits import Stream, Wait
from sp_lightning.tune.visits import Rates


@dataclass(frozen=True)
class HostBytes:
    """Stands for memory on the host.

    Attributes:
        layer: the index of the layer that the bytes belong to.
        nbytes: how many bytes they are.
        kind: what a copy of them is called in the timeline. None: a fetch to the device, a drain to the host.
    """

    layer: int
    nbytes: int
    kind: Kind | None = None


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

    def empty(self, nbytes: int) -> Tensor:
        return super().empty(0)

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Any], stream: Stream, *, why: Wait | None = None
    ) -> None:
        rate = self._rates.upload if stream is Stream.UPLOAD else self._rates.download
        for source in sources:
            kind: Kind = source.kind or ("fetch" if stream is Stream.UPLOAD else "drain")
            self.spend(stream, source.nbytes / rate, kind, source.layer, source.nbytes)
            self.copied += source.nbytes

    def spend(self, stream: Stream, seconds: float, kind: Kind, layer: int | None, nbytes: int = 0) -> None:
        """Issues work of so many seconds to a stream. It does not begin before the host has issued it."""
        begin = max(self.now[stream], self.host)
        self.now[stream] = begin + seconds
        if seconds:
            self.intervals.append(Interval(kind, layer, begin, begin + seconds, nbytes))
        if self._rates.synchronous and stream is not Stream.UPDATE:
            self.host = self.now[Stream.COMPUTE] = self.now[stream]

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
