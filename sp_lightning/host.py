"""The host store: the authoritative copy of all weights, one flat pinned block per layer.

The user's ``Parameter`` objects become views of it, each with a storage of its own, so any optimizer, checkpoint and
callback works on them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sp_lightning.device import Device, PinnedMemory
from sp_lightning.layers import Layer
from sp_lightning.memory import Loan, Span, lend, normal_mode, view
from sp_lightning.plan import PlannedLayer


class HostBlock:
    """One layer's weights on the host, and the memory that its gradients land in.

    Attributes:
        planned: where each parameter lies.
        parameters: the user's parameters, in the order of ``planned.spans``.
        weights: all of them, flat ``uint8`` of ``planned.nbytes`` bytes: what a fetch copies. Casts come behind them.

    Args:
        pin: page-lock the memory of gradients and, unless ``fetched_seldom``, of weights.
    """

    def __init__(
        self, layer: Layer, planned: PlannedLayer, device: Device, *, pin: bool, fetched_seldom: bool = False
    ) -> None:
        self.planned = planned
        self.parameters: Sequence[nn.Parameter] = [parameter for _, parameter in layer.parameters]
        self._device = device
        self._pin = pin
        self._weights = PinnedMemory(device, planned.nbytes, pin=pin and not fetched_seldom)
        self.weights = self._weights.bytes[: planned.nbytes]
        self._gradients: PinnedMemory | None = None
        self._gradient_loans: list[Loan] = []
        self._alone = [replace(span, offset=0) for span in planned.spans]  # each in a storage of its own
        for index in range(len(self.parameters)):  # each original goes at once: set-up peaks at model plus one layer
            self._take(index)
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]

    @property
    def pinned(self) -> bool:
        """Whether the weights are page-locked."""
        return self._weights.pinned

    def write(self, index: int, value: Tensor) -> None:
        """Take over a weight that was written on the device; synchronous, and visible as an in-place write."""
        target = self.parameters[index]
        self._device.access(self.weights, None, write=True)
        with normal_mode(), torch.no_grad():
            target.copy_(value)

    def adopt(self) -> None:
        """Take in what the user put under a parameter (``param.data = other``) since it was absorbed.

        A transfer of the old values may still be under way. It does no harm: what it fills is forgotten, because the
        address has changed, and the next transfer comes after it on the same stream.

        Raises:
            RuntimeError: other dtype or shape, which has no place in the block.
        """
        for index, (parameter, address) in enumerate(zip(self.parameters, self._addresses, strict=True)):
            if parameter.data_ptr() == address:
                continue
            span = self.planned.spans[index]
            if parameter.dtype != span.dtype or parameter.shape != span.shape:
                raise RuntimeError(
                    f"Parameter {span.name!r} was {span.dtype} of shape {tuple(span.shape)} when its layer was absorbed; it "
                    f"is {parameter.dtype} of shape {tuple(parameter.shape)} now, in the middle of a step or in a call "
                    "outside any step. Exchange parameters between two batches, or before trainer.fit."
                )
            self._take(index)

    def gradient_target(self, index: int) -> Tensor | None:
        """Pinned memory that may become ``parameter.grad``; None while somebody still holds what it was lent for."""
        if self._gradients is None:
            self._gradients = PinnedMemory(self._device, self.planned.nbytes, pin=self._pin)
            self._gradient_loans = [Loan(_part(self._gradients.bytes, span)) for span in self.planned.spans]
        loan = self._gradient_loans[index]
        return None if loan.held else loan.views(None, [self._alone[index]])[0].data

    def unpin(self) -> None:
        """Give the page locks back; parameters and gradients stay where they are. The caller has synchronised."""
        self._weights.unpin()
        if self._gradients is not None:
            self._gradients.unpin()

    def _take(self, index: int) -> None:
        parameter = self.parameters[index]
        with normal_mode():
            target = view(lend(_part(self._weights.bytes, self.planned.spans[index])), self._alone[index])
        self._device.access(self.weights, None, write=True)
        with normal_mode(), torch.no_grad():
            target.copy_(parameter.data)
            parameter.data = target


def _part(memory: Tensor, span: Span) -> Tensor:
    return memory[span.offset : span.offset + span.nbytes]


class Staging:
    """Pinned host memory for gradients that are added to others: blocks of one size, used again and again."""

    def __init__(self, device: Device, nbytes: int, *, pin: bool) -> None:
        self._device = device
        self._nbytes = nbytes
        self._pin = pin
        self._free: list[PinnedMemory] = []

    def take(self) -> PinnedMemory:
        """A block of at least the size of the largest layer."""
        return self._free.pop() if self._free else PinnedMemory(self._device, self._nbytes, pin=self._pin)

    def give_back(self, block: PinnedMemory) -> None:
        """The block may be overwritten."""
        self._free.append(block)
