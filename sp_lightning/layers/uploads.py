"""Uploads: how a layer's bytes are copied from host memory into a slot.

``Uploads`` copies whole layers. A subclass may issue an upload in parts: ``send`` issues the first part and returns a
:class:`~sp_lightning.layers.layer.PendingUpload`, and ``go_on`` or ``finish`` issue the rest.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sp_lightning.device.device import Device, Stream
from sp_lightning.layers.layer import PendingUpload, StreamedLayer


class Uploads:
    """Copies whole layers.

    Args:
        device: issues the copies.

    Attributes:
        ring: the index of the ring that most bytes pass through.
        gathered_bytes: bytes that other devices have uploaded and sent.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.ring = 0
        self.gathered_bytes = 0

    def send(
        self, layer: StreamedLayer, target: Tensor, source: Tensor, landed: Callable[[], None]
    ) -> PendingUpload | None:
        """Begins the upload of a layer. The upload stream already waits for the slot's last use, and for the layer's bytes.

        Args:
            layer: the layer.
            target: its slot's memory, flat ``uint8``.
            source: its bytes in host memory, of the same size.
            landed: called when the last part of the upload was issued to the upload stream, if that is after this call.

        Returns:
            The part that is still to be issued; None if the whole upload was issued.
        """
        self.device.copy((target,), (source,), Stream.UPLOAD)
        return None

    def go_on(self, using: StreamedLayer | None = None) -> None:
        """Issues the parts of pending uploads that can be issued without a wait. Here uploads have one part.

        Args:
            using: the layer that compute uses next; None if it uses none.
        """

    def finish(self, last: PendingUpload | None = None) -> None:
        """Issues all pending uploads up to ``last``; None: all. This may wait, and raise an error of another process."""

    def end_round(self, *, after_error: bool = False) -> None:
        """Ends a *round*: issues all pending uploads, because other code may write weights before the next upload.

        A round is all uploads between two calls of this method, usually those of one step. The next upload begins another round.

        Args:
            after_error: True if an error is being raised already. An error of another rank is then not raised on top of it.
        """

    def close(self) -> None:
        """Ends the uploads. No upload begins afterwards."""
