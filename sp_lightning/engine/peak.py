"""The most device memory that weights and gradients have taken."""

from __future__ import annotations

from sp_lightning.weights.gradients import Gradients
from sp_lightning.weights.residents import Residents
from sp_lightning.weights.slots import Slots


class Peak:
    """Keeps the largest sum of what slots, residents and gradients take.

    Attributes:
        most: bytes.
    """

    def __init__(self, slots: Slots, residents: Residents, gradients: Gradients) -> None:
        self.most = 0
        self._slots = slots
        self._residents = residents
        self._gradients = gradients

    def note(self) -> None:
        """More memory may be in use than ever."""
        now = self._slots.device_bytes + self._residents.nbytes + self._gradients.device_bytes
        if now > self.most:
            self.most = now
