"""Gradients on their way to the host: drained while backward goes on, applied once they have landed.

``arrived`` (autograd put one on a device parameter) → ``drain`` (a layer's gradients leave) → ``retire`` (compute has
waited for the copy, device memory is free) → ``apply`` (the host waits for the copy and adds into ``param.grad``).
At most k' + 1 layers' gradients are on the device at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.device.device import Device, PinnedMemory, Stream, Wait
from sp_lightning.device.layout import aligned, normal_mode, strided
from sp_lightning.device.torch_private import accumulation_hooks, coalesced, sparse_indices, sparse_values
from sp_lightning.store.block import HostBlock, Staging


@dataclass
class _Landing:
    """One gradient's memory on the host.

    Attributes:
        compacted: whether ``memory`` is sparse and ``param.grad`` is not to be.
        own: memory that may become ``param.grad``: ``memory`` itself, or, while that is staging, the memory to widen it
            into; None if there is none.
    """

    parameter: nn.Parameter
    memory: Tensor
    own: Tensor | None
    compacted: bool = False


@dataclass
class _Drain:
    """One transfer of one layer's gradients.

    Attributes:
        gradients: kept alive on the device until compute has waited for the copy.
        landed: event of the copy.
    """

    layer: int
    gradients: list[Tensor]
    nbytes: int
    landings: deque[_Landing]
    staging: PinnedMemory | None
    landed: Any


class Gradients:
    """The gradients of all layers, from autograd to ``param.grad``.

    Args:
        blocks: of the layers and their masters, then of the residents.
        owners: masters → the layer that their gradients leave with.
        device: the seam.
        staging: host memory for gradients that are added to others.
        in_flight: layers whose gradients may be on the device at once (k' + 1).
        complete: called with a layer once all of its parameters have got their gradients in this backward.
    """

    def __init__(
        self,
        blocks: Sequence[HostBlock],
        owners: Mapping[int, int],
        device: Device,
        staging: Staging,
        *,
        in_flight: int,
        complete: Callable[[int], None],
    ) -> None:
        self._complete = complete
        self._blocks = blocks
        self._owners = owners
        self._masters = {owner: masters for masters, owner in owners.items()}
        self.compacted: set[int] = set()
        """The layers whose gradient in this backward is sparse on the device and would be dense by right."""
        self._device = device
        self.in_flight = in_flight
        self._residents = len(blocks) - 1
        self._staging = staging
        self._arrived: dict[int, dict[tuple[int, int], Tensor]] = {}  # by layer: (block, index) → gradient
        self._expected: dict[int, int] = {}  # how many gradients a layer that has some is to get
        self._applied: dict[int, set[int]] = {}
        self._flying: deque[_Drain] = deque()
        self._landed: deque[_Drain] = deque()
        self.device_bytes = 0
        self.drained_bytes = 0
        self.host_waits = 0
        """How often the host has waited for a sparse gradient, whose size compute decides."""

    def arrived(self, layer: int, index: int, gradient: Tensor) -> bool:
        """Autograd finished one gradient; it leaves with its layer's others. Returns whether they are all there.

        Raises:
            RuntimeError: a gradient with a graph of its own (``backward(create_graph=True)``).
        """
        block = self._blocks[layer]
        if gradient.requires_grad:
            name = block.planned.spans[index].name
            raise RuntimeError(
                f"The gradient of {name!r} has a graph of its own (backward(create_graph=True)); it would be lost on "
                f"the way to the host. Use torch.autograd.grad(loss, parameters, create_graph=True), which keeps it."
            )
        of, layer = layer, self._owners.get(layer, layer)
        if (of, index) in self._arrived.get(layer, ()):
            self.drain(layer)
        if layer not in self._arrived:
            self._arrived[layer] = {}
            self._expected[layer] = self._count(layer) + self._count(self._masters.get(layer))
        self._arrived[layer][of, index] = gradient
        self._device.access(gradient, Stream.COMPUTE, write=True)
        self.device_bytes += gradient.nbytes if gradient.layout is torch.strided else 0
        return len(self._arrived[layer]) == self._expected[layer] and layer != self._residents

    def drain(self, layer: int) -> None:
        """Send what has arrived of one layer to the host; with the next layer's, at most k' + 1 are on the device."""
        layer = self._owners.get(layer, layer)
        gradients = self._arrived.pop(layer, None)
        if gradients is None:
            return
        used = 0  # of the staging memory
        staging: PinnedMemory | None = None
        landings: deque[_Landing] = deque()
        targets, sources = [], []
        self._device.wait(Stream.DOWNLOAD, self._device.record(Stream.COMPUTE), Wait.DRAIN_AFTER_GRADIENT)
        for (of, index), gradient in gradients.items():
            block = self._blocks[of]
            parameter = block.parameters[index]
            if gradient.layout is not torch.strided:  # sparse: of no fixed size, as nn.Embedding(sparse=True) makes
                sparse = gradient.to("cpu")
                self.host_waits += 1
                self.drained_bytes += sparse_values(sparse).nbytes
                if of in self.compacted:
                    rows, own = _each_row_once(sparse), block.gradient_target(index) if parameter.grad is None else None
                    landings.append(_Landing(parameter, rows, own, compacted=True))
                else:
                    landings.append(_Landing(parameter, sparse, own=sparse))
                continue
            own = target = block.gradient_target(index) if parameter.grad is None else None
            if index in block.apart:
                own = target = torch.empty_like(gradient, device="cpu")
            elif target is None or target.dtype is not gradient.dtype:
                dense = (each for each in gradients.values() if each.layout is torch.strided)
                staging = staging or self._staging.take(sum(aligned(each.nbytes) for each in dense))
                span = block.planned.spans[index]
                target = strided(staging.bytes, used, gradient.dtype, span.shape, span.stride)
                used += aligned(gradient.nbytes)
            targets.append(target)
            sources.append(gradient)
            landings.append(_Landing(parameter, target, own))
        self.compacted -= {layer}
        begun = self._device.mark(Stream.DOWNLOAD)
        self._device.copy(targets, sources, Stream.DOWNLOAD)
        nbytes = sum(gradient.nbytes for gradient in sources)
        self._device.note("drain", layer, begun, Stream.DOWNLOAD, nbytes)
        self.drained_bytes += nbytes
        landed = self._device.record(Stream.DOWNLOAD)
        self._flying.append(_Drain(layer, list(gradients.values()), nbytes, landings, staging, landed))
        self.retire(self.in_flight - 1)

    def make_room(self, layers: Sequence[int]) -> None:
        """The backward of ``layers`` begins: what is left of others' gradients leaves (some parameters get none)."""
        layers = [self._owners.get(layer, layer) for layer in layers]
        for layer in list(self._arrived):
            if layer not in layers and layer != self._residents:
                self.drain(layer)

    def retire(self, keep: int) -> None:
        """Free the device memory of all but the ``keep`` latest transfers; compute waits for the others."""
        while len(self._flying) > keep:
            drain = self._flying.popleft()
            self._device.wait(Stream.COMPUTE, drain.landed, Wait.REUSE_AFTER_DRAIN)
            for gradient in drain.gradients:
                self._device.access(gradient, Stream.COMPUTE, write=True)  # whatever compute puts there next
            drain.gradients.clear()
            self.device_bytes -= drain.nbytes
            self._landed.append(drain)
        while len(self._landed) > self.in_flight:  # bounds the staging memory
            self._apply(self._landed.popleft())

    def settle(self) -> None:
        """Bring every gradient to ``param.grad``."""
        for layer in list(self._arrived):
            self.drain(layer)
        self.retire(0)
        while self._landed:
            self._apply(self._landed.popleft())

    def drop(self) -> None:
        """Forget gradients that did not reach the host: backward failed."""
        for drain in (*self._flying, *self._landed):
            self._device.synchronize(drain.landed, Wait.DROP_AFTER_DRAIN)
            for landing in drain.landings:
                self._device.access(landing.memory, None, write=True)
            if drain.staging is not None:
                self._staging.give_back(drain.staging)
        self._arrived.clear()
        self.compacted.clear()
        self._applied.clear()
        self._flying.clear()
        self._landed.clear()
        self.device_bytes = 0

    def _count(self, of: int | None) -> int:
        return 0 if of is None else sum(parameter.requires_grad for parameter in self._blocks[of].parameters)

    def _apply(self, drain: _Drain) -> None:
        self._device.synchronize(drain.landed, Wait.APPLY_AFTER_DRAIN)
        applied = self._applied.setdefault(drain.layer, set())
        try:
            while drain.landings:  # taken out: once a layer is complete nobody but its parameters holds its gradients
                applied.add(self._land(drain.landings.popleft()))
        finally:
            if drain.staging is not None:
                self._staging.give_back(drain.staging)
        if len(applied) == self._expected[drain.layer] and drain.layer != self._residents:
            self._complete(drain.layer)

    def _land(self, landing: _Landing) -> int:
        """One gradient becomes ``param.grad`` or is added to it. Returns the parameter's identity."""
        gradient = landing.memory
        self._device.access(gradient, None, write=True)  # it may become param.grad, which the user writes
        if landing.compacted and landing.own is None and landing.parameter.grad is None:
            gradient = gradient.to_dense()  # somebody holds what was lent for it
        elif landing.own is not None and landing.own is not gradient and landing.parameter.grad is None:
            with normal_mode():
                if gradient.layout is torch.strided:
                    gradient = landing.own.copy_(gradient)
                else:
                    gradient = landing.own.zero_().index_copy_(0, sparse_indices(gradient)[0], sparse_values(gradient))
        accumulate(landing.parameter, gradient, own=gradient is landing.own)
        return id(landing.parameter)


def _each_row_once(gradient: Tensor) -> Tensor:
    """The rows that several uses gave, summed as autograd sums dense gradients: one after the other."""
    if gradient.is_coalesced():
        return gradient
    with normal_mode():
        numbers, where = torch.unique(sparse_indices(gradient)[0], return_inverse=True)
        values = sparse_values(gradient)
        rows = values.new_zeros((len(numbers), *values.shape[1:])).index_add_(0, where, values)
        return coalesced(numbers, rows, gradient.shape)


def accumulate(parameter: nn.Parameter, gradient: Tensor, *, own: bool) -> None:
    """What autograd's ``AccumulateGrad`` does, on the host's parameter.

    The first gradient becomes ``param.grad``, later ones are added in place, the user's hooks that run after
    accumulation follow; a parameter that was frozen meanwhile takes none.

    Args:
        parameter: the user's parameter.
        gradient: on the host, shape of the parameter, its dtype or a lower one.
        own: whether ``gradient`` may be kept; a copy is kept otherwise.
    """
    if not parameter.requires_grad:
        return
    if parameter.grad is None and own:
        parameter.grad = gradient
    else:
        with normal_mode(), torch.no_grad():
            if parameter.grad is None:
                parameter.grad = gradient.to(parameter.dtype, copy=True)
            elif parameter.grad.layout is not torch.strided and gradient.layout is torch.strided:
                parameter.grad = gradient + parameter.grad
            else:
                parameter.grad += gradient
    after = accumulation_hooks(parameter)
    if after:
        with normal_mode(), torch.no_grad():
            for hook in list(after.values()):
                hook(parameter)
