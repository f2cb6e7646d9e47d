"""The host store: the authoritative copy of all weights, one flat pinned block per layer.

The user's ``Parameter`` objects become views of it, each with a storage of its own, so any optimizer, checkpoint and
callback works on them as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sp_lightning.device.device import Device
from sp_lightning.device.layout import PAGE, Span, addresses, lay_out, total_bytes, view
from sp_lightning.device.lease import Lease, lend
from sp_lightning.device.modes import no_inference_mode
from sp_lightning.device.pinned import PinnedMemory
from sp_lightning.model.found import Layer
from sp_lightning.plan.plan import PlannedLayer


class HostBlock:
    """One layer's weights on the host, and the memory that its gradients land in.

    Attributes:
        planned: where each parameter lies.
        parameters: the user's parameters, in the order of ``planned.spans``.
        weights: all of them, flat ``uint8`` of ``planned.nbytes`` bytes: what a fetch copies. Casts come behind them.
        apart: indices of parameters that were given another dtype inside a step (``module.float()`` in a forward). They
            are in memory of their own until the engine is made anew, before the next batch.

    Args:
        pin: page-lock the memory of gradients and, unless ``fetched_seldom``, of weights.
    """

    def __init__(
        self,
        layer: Layer,
        planned: PlannedLayer,
        device: Device,
        staging: Staging,
        *,
        pin: bool,
        fetched_seldom: bool = False,
    ) -> None:
        self.planned = planned
        self.parameters: Sequence[nn.Parameter] = [parameter for _, parameter in layer.parameters]
        self._device = device
        self._staging = staging
        self._pin = pin and not fetched_seldom
        self._fetched_seldom = fetched_seldom
        self.apart: set[int] = set()
        self._lent: list[StorageWeakRef | None] = [None] * len(planned.spans)
        self._allocate()
        self._gradients: PinnedMemory | None = None
        self._gradient_leases: dict[int, Lease] = {}
        self._alone = [replace(span, offset=0) for span in planned.spans]  # each in a storage of its own
        for index in range(len(self.parameters)):  # each original goes at once: set-up peaks at model plus one layer
            self._take(index)
        self.addresses = self._now()

    def _allocate(self) -> None:
        self._weights = PinnedMemory(self._device, self.planned.nbytes, pin=self._pin)
        self.weights = self._weights.bytes[: self.planned.nbytes]

    def _now(self) -> list[int]:
        return addresses(self.parameters)

    @property
    def displaced(self) -> list[int]:
        """The parameters that the user put something else under (``param.data = other``) since they were absorbed."""
        now = self._now()
        if now == self.addresses:
            return []
        pairs = enumerate(zip(now, self.addresses, strict=True))
        return [index for index, (at, before) in pairs if at != before and index not in self.apart]

    @property
    def pinned(self) -> bool:
        """Whether the weights are page-locked."""
        return self._weights.pinned

    def copy_of(self, index: int) -> Tensor:
        """A weight's present bytes, flat, in memory of their own."""
        return _part(self.weights, self.planned.spans[index]).clone()

    def write(self, index: int, value: Tensor) -> bool:
        """Take over a weight that may have been written on the device; synchronous, and visible as an in-place write.

        Returns:
            Whether it was: its bytes differ from the host's.

        Raises:
            RuntimeError: other shape; or other dtype, of a weight that travels as a cast or by its rows.
        """
        target, name = self.parameters[index], self.planned.spans[index].name
        if (value.shape, value.dtype) != (target.shape, target.dtype):
            if value.shape == target.shape and not self._fetched_seldom:
                self.apart.add(index)
                with no_inference_mode():
                    target.data = value.to("cpu", copy=True)
                return True
            raise RuntimeError(
                f"Parameter {name!r} is {target.dtype} of shape {tuple(target.shape)} and was given {value.dtype} of shape "
                f"{tuple(value.shape)} inside a step (param.data = other). Exchange it between two batches or before "
                f"trainer.fit, or keep it on the device: SuperpipelineStrategy(resident=[{name!r}])."
            )
        with no_inference_mode(), torch.no_grad():
            if index not in self.apart:
                found = torch.empty(target.nbytes, dtype=torch.uint8)
                view(found, self._alone[index]).copy_(value)
                if torch.equal(found, _part(self.weights, self.planned.spans[index])):
                    return False
                self._device.access(self.weights, None, write=True)
            target.copy_(value)
        return True

    def adopt(self) -> None:
        """Take in what the user put under parameters (``param.data = other``) since they were absorbed.

        If somebody holds the old values (another parameter, after a swap), the block leaves them its memory and takes new.
        The caller has waited for the transfers that read it.

        Raises:
            RuntimeError: other dtype or shape, which has no place in the block.
        """
        displaced = self.displaced
        for index in displaced:
            parameter, span = self.parameters[index], self.planned.spans[index]
            if parameter.dtype != span.dtype or parameter.shape != span.shape:
                raise RuntimeError(
                    f"Parameter {span.name!r} was {span.dtype} of shape {tuple(span.shape)} when its layer was absorbed; it "
                    f"is {parameter.dtype} of shape {tuple(parameter.shape)} now, in the middle of a step or in a call "
                    "outside any step. Exchange parameters between two batches, or before trainer.fit."
                )
        if any((lent := self._lent[index]) is not None and not lent.expired() for index in displaced):
            self._allocate()
            displaced = [index for index in range(len(self.parameters)) if index not in self.apart]
        for index in displaced:
            self._take(index)
        self.addresses = self._now()

    def gradient_target(self, index: int) -> Tensor | None:
        """Pinned memory that may become ``parameter.grad``; None while somebody still holds what it was lent for.

        There is some for the parameters that were trainable when the layer got its first gradient.
        """
        if index in self.apart:
            return None
        if self._gradients is None:
            trainable = [i for i, parameter in enumerate(self.parameters) if parameter.requires_grad]
            spans = lay_out((self.planned.spans[i].name, self.parameters[i]) for i in trainable)
            self._gradients = self._staging.take(total_bytes(spans))
            memory = self._gradients.bytes
            self._gradient_leases = {i: Lease(_part(memory, span)) for i, span in zip(trainable, spans, strict=True)}
        lease = self._gradient_leases.get(index)
        return None if lease is None or lease.in_use else lease.views(None, [self._alone[index]])[0].data

    def release_gradients(self) -> None:
        """Nobody needs the gradients any more; other layers may have their memory, unless somebody holds some of it."""
        if self._gradients is not None and not any(lease.in_use for lease in self._gradient_leases.values()):
            self._gradient_leases.clear()
            self._staging.give_back(self._gradients)
            self._gradients = None

    def unpin(self) -> None:
        """Give the page locks back; parameters and gradients stay where they are."""
        self._weights.unpin()
        if self._gradients is not None:
            self._gradients.unpin()

    def _take(self, index: int) -> None:
        parameter = self.parameters[index]
        with no_inference_mode():
            target = view(lend(_part(self._weights.bytes, self.planned.spans[index])), self._alone[index])
        self._device.access(self.weights, None, write=True)
        with no_inference_mode(), torch.no_grad():
            target.copy_(parameter.data)
            parameter.data = target
        self._lent[index] = StorageWeakRef(target.untyped_storage())


def _part(memory: Tensor, span: Span) -> Tensor:
    return memory[span.offset : span.offset + span.nbytes]


class Staging:
    """Pinned host memory for gradients, used again and again."""

    def __init__(self, device: Device, *, pin: bool) -> None:
        self._device = device
        self._pin = pin
        self._free: defaultdict[int, list[PinnedMemory]] = defaultdict(list)  # by bytes

    def take(self, nbytes: int) -> PinnedMemory:
        """A block of at least so many bytes."""
        padded = -(-max(nbytes, 1) // PAGE) * PAGE
        free = self._free[padded]
        return free.pop() if free else PinnedMemory(self._device, padded, pin=self._pin)

    def give_back(self, block: PinnedMemory) -> None:
        """The block may be overwritten."""
        self._free[block.bytes.nbytes].append(block)

    def unpin(self) -> None:
        """Let go of what is free."""
        self._free.clear()
