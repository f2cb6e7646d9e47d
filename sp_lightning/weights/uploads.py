"""Uploads: how a layer's bytes come from the host into a slot. Here each device copies whole layers by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sp_lightning.device.device import Device
from sp_lightning.device.waits import Stream
from sp_lightning.weights.layer import StreamedLayer


@dataclass(eq=False)
class OnItsWay:
    """A layer of which some was sent to its slot; the rest is to come from other ranks, if these announce it, too.

    Attributes:
        number: of its gather, in the round.
        layer: which it is.
        target: its slot's memory, flat ``uint8``.
        source: its bytes on the host.
        part: bytes of each rank's part. What is left behind the last one was sent whole.
        landed: is called once the rest was issued.
    """

    number: int
    layer: StreamedLayer
    target: Tensor
    source: Tensor
    part: int
    landed: Callable[[], None]


class Uploads:
    """Copies whole layers.

    Args:
        device: copies them.

    Attributes:
        ring: the index of the ring that most bytes pass through.
        gathered_bytes: bytes that came from other devices.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.ring = 0
        self.gathered_bytes = 0

    def send(self, layer: StreamedLayer, target: Tensor, source: Tensor, landed: Callable[[], None]) -> OnItsWay | None:
        """Begins the upload of a layer. The upload stream waits already for what was in the slot, and for the layer's bytes.

        Args:
            layer: the layer.
            target: its slot's memory, flat ``uint8``.
            source: its bytes on the host, of the same size.
            landed: is called once all was issued to the upload stream, if that is later than now.

        Returns:
            The layer on its way; None if all was issued.
        """
        self.device.copy((target,), (source,), Stream.UPLOAD)
        return None

    def go_on(self) -> None:
        """Issues what can be issued by now of the layers on their way."""

    def finish(self, last: OnItsWay | None = None) -> None:
        """Issues all layers up to this one, or all that are on their way.

        Raises:
            RankError: another rank has failed.
        """

    def end_round(self) -> None:
        """Issues all that are on their way: what comes next may be other weights. The errors are those of :meth:`finish`."""

    def close(self) -> None:
        """Nothing is sent any more."""
