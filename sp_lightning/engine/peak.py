"""Measures the most device memory that weights and gradients have taken."""

from __future__ import annotations

from sp_lightning.model.found import Found, tensor_bytes
from sp_lightning.weights.gradient_sink import GradientSink
from sp_lightning.weights.residents import Residents
from sp_lightning.weights.slots import Slots


class Peak:
    """Keeps the largest sum of the memory of slots, residents and gradients, with what streaming does not move.

    Attributes:
        most: that sum in bytes.
    """

    def __init__(self, found: Found, slots: Slots, residents: Residents, gradients: GradientSink) -> None:
        self.most = 0
        self._staying = found.staying[0]
        self._aside = [parameter for _, module in found.aside for parameter in module.parameters()]
        self._slots = slots
        self._residents = residents
        self._gradients = gradients

    @property
    def weight_bytes(self) -> int:
        """Bytes of device memory that weights and buffers take now."""
        return self._slots.device_bytes + self._residents.nbytes + self._staying

    def note(self) -> None:
        """Measures; called whenever more memory may be in use than ever before."""
        now = self._slots.device_bytes + self._residents.nbytes + self._staying + self._gradients.device_bytes
        if self._aside:  # nearly always nothing, and this is called several times for each layer
            now += sum(tensor_bytes(parameter.grad) for parameter in self._aside if parameter.grad is not None)
        if now > self.most:
            self.most = now
