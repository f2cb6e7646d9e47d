"""Uploads: how a layer's bytes are copied from host memory into a slot. A subclass may copy them from elsewhere."""

from __future__ import annotations

from torch import Tensor

from sp_lightning.device.device import Device, Stream
from sp_lightning.layers.layer import StreamedLayer


class Uploads:
    """Copies layers from host memory into slots.

    Args:
        device: issues the copies.
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def send(self, layer: StreamedLayer, target: Tensor, source: Tensor) -> None:
        """Issues the upload of a layer. The upload stream already waits for the slot's last use, and for the layer's bytes.

        Args:
            layer: the layer.
            target: the memory of the layer's slot, flat ``uint8``.
            source: the layer's bytes in host memory, of the same size.
        """
        self.device.copy((target,), (source,), Stream.UPLOAD)

    def before_use(self, layer: StreamedLayer) -> None:
        """Called before compute uses a layer that was fetched."""
