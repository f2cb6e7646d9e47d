"""Measures the most device memory that weights and gradients have taken."""

from __future__ import annotations

from sp_lightning.weights.gradient_sink import GradientSink
from sp_lightning.weights.residents import Residents
from sp_lightning.weights.slots import Slots


class Peak:
    """Keeps the largest sum of the memory of slots, residents and gradients.

    Attributes:
        most: that sum in bytes.
    """

    def __init__(self, slots: Slots, residents: Residents, gradients: GradientSink) -> None:
        self.most = 0
        self._slots = slots
        self._residents = residents
        self._gradients = gradients

    def note(self) -> None:
        """Measures; called whenever more memory may be in use than ever before."""
        now = self._slots.device_bytes + self._residents.nbytes + self._gradients.device_bytes
        if now > self.most:
            self.most = now
