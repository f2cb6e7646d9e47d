"""Gradients on their way to the host: they are drained while backward goes on, and applied once they are there.

``arrived`` (autograd has put a gradient on a device parameter) → ``drain`` (a layer's gradients leave) → ``retire``
(compute has waited for the copy, and the device memory is free) → ``apply`` (the host waits for the copy and adds it to
``param.grad``). The gradients of at most k' + 1 layers are on the device at once; those of residents come on top, and leave
when backward ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter

import torch
from torch import Tensor, nn

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.device.layout import aligned, lay_out, part, strided
from sp_lightning.layers.gradient_sink import GradientSink, Wanted, bytes_of_dense
from sp_lightning.layers.layer import Kind, StreamedLayer
from sp_lightning.layers.narrow_gradient import add_on_device, drop, keep_narrow, stored, waits_on_device
from sp_lightning.store.block_memory import BlockMemory, Staging
from sp_lightning.torch_compat.modes import no_inference_mode
from sp_lightning.torch_compat.private import accumulation_hooks, sparse_indices, sparse_rows, sparse_values

_Landing = tuple[nn.Parameter, Tensor, Tensor | None, bool]
"""One gradient's memory on the host; a plain tuple, because there is one for each gradient, and each costs the host time.

- the user's parameter.
- the gradient.
- memory that may become ``param.grad``: the gradient's itself or, if that is in staging memory, the memory that the gradient is
  converted into. None if there is none.
- whether the gradient is sparse although ``param.grad`` is to be dense.
"""


_Drain = tuple[StreamedLayer, deque[_Landing], BlockMemory | None]
"""One transfer of one layer's gradients: the layer, where they land, and the staging memory if they need any."""


@dataclass
class _Received:
    """The gradients that one layer, and its masters with it, has received in the running backward.

    Attributes:
        gradients: the gradients that have not left yet, by layer and index of the parameter.
        expected: how many parameters are to get a gradient.
        applied: the parameters, by identity, whose gradient is in ``param.grad``.
    """

    expected: int = 0
    gradients: dict[tuple[StreamedLayer, int], Tensor] = field(default_factory=dict)
    applied: set[int] = field(default_factory=set)


class Gradients(GradientSink[_Drain]):
    """The gradients of all layers, from autograd to ``param.grad``: the :class:`GradientSink` of one device.

    Args:
        device: copies the gradients.
        staging: host memory for gradients that are added to others.
        in_flight: the number of layers whose gradients may be on the device at once (k' + 1).
    """

    def __init__(self, device: Device, staging: Staging, *, in_flight: int) -> None:
        super().__init__(device, in_flight, self._apply)
        self._staging = staging
        self._received: dict[StreamedLayer, _Received] = {}
        # Held by the thread that applies gradients: parts of one are added in order.
        self._landing = threading.RLock()
        self._wanted: Wanted | None = None  # in this backward
        self._kept: dict[StreamedLayer, int] = {}  # bytes of gradients that stay on the device until they are used
        # Whether user code has read one. The next ones would be read, too, and take memory in both dtypes.
        self._looked_at = False

    def arrived(self, layer: StreamedLayer, index: int, gradient: Tensor) -> bool:
        """Takes a gradient that autograd has finished, which leaves with its layer's others.

        Returns:
            Whether all gradients of the layer have arrived; never for residents.
        """
        owner, place = layer.owner, (layer, index)
        received = self._received.get(owner)
        if received is None:
            received = self._received[owner] = _Received()
        elif place in received.gradients:
            self.drain(owner)
        if not received.gradients:
            self.arriving[owner] = None
            received.expected = sum(sum(map(_requires_grad, member.block.parameters)) for member in owner.family)
        received.gradients[place] = gradient
        self.device_bytes += bytes_of_dense(gradient)
        return len(received.gradients) == received.expected and owner.kind is not Kind.RESIDENTS

    def drain(self, layer: StreamedLayer) -> None:
        """Sends the gradients of one layer and of its masters that have arrived to the host."""
        owner = layer.owner
        received = self._received.get(owner)
        if received is None or not received.gradients:
            return
        gradients, received.gradients = received.gradients, {}
        del self.arriving[owner]
        self.device.access(gradients.values(), Stream.COMPUTE, write=True)
        if self._may_stay(owner, received, gradients):
            self._keep(owner, received, gradients)
            return
        self.device.wait(Stream.DOWNLOAD, self.device.record(Stream.COMPUTE), Wait.DRAIN_AFTER_GRADIENT)
        landings, staging, targets, sources = self._place(gradients)
        owner.rows.sparse_on_device = False  # the layer's next gradient says anew whether it is
        self.send(owner.index, targets, sources, list(gradients.values()), (owner, landings, staging))

    def expect(self, wanted: Wanted | None = None) -> None:
        self._wanted = wanted

    def _may_stay(
        self, owner: StreamedLayer, received: _Received, gradients: dict[tuple[StreamedLayer, int], Tensor]
    ) -> bool:
        """Whether a step on the device waits for these gradients, which are all that its layer gets."""
        if owner.own_slot is not None:
            return self.keep_there and self._may_stay_there(owner, received, gradients)
        if not self.stay or self._wanted is None or len(gradients) != received.expected:
            return False
        parameters = [layer.block.parameters[index] for layer, index in gradients]
        dense = all(gradient.layout is torch.strided for gradient in gradients.values())
        alone = all(p.grad is None and not accumulation_hooks(p) for p in parameters)
        return dense and alone and owner.kind is not Kind.RESIDENTS and self._wanted(owner)

    def _may_stay_there(
        self, owner: StreamedLayer, received: _Received, gradients: dict[tuple[StreamedLayer, int], Tensor]
    ) -> bool:
        """Whether gradients of a layer that stays may wait there for its step, or are added to those that wait."""
        parameters = [layer.block.parameters[index] for layer, index in gradients]
        return (
            len(gradients) == received.expected
            and all(gradient.layout is torch.strided for gradient in gradients.values())
            and not any(map(accumulation_hooks, parameters))
            and all(stored(p) is None or waits_on_device(p) for p in parameters)
        )

    def _keep(
        self, owner: StreamedLayer, received: _Received, gradients: dict[tuple[StreamedLayer, int], Tensor]
    ) -> None:
        """Leaves gradients on the device. They come to the host if user code looks at them."""
        hosts = [layer.block.parameters[index] for layer, index in gradients]
        kept = [add_on_device(p, gradient) for p, gradient in zip(hosts, gradients.values(), strict=True)]
        computed = self.device.record(Stream.COMPUTE)
        for parameter, gradient in zip(hosts, kept, strict=True):
            drop(parameter)
            keep_narrow(parameter, gradient, self._look, computed=computed)
            received.applied.add(id(parameter))
        nbytes = sum(map(bytes_of_dense, kept))
        # Those of the step before are gone, or are among these.
        self.device_bytes += nbytes - sum(map(bytes_of_dense, gradients.values())) - self._kept.get(owner, 0)
        self._kept[owner] = nbytes
        self._landed.append(((owner, deque(), None), None))

    def _place(
        self, gradients: dict[tuple[StreamedLayer, int], Tensor]
    ) -> tuple[deque[_Landing], BlockMemory | None, list[Tensor], list[Tensor]]:
        """Decides where each gradient goes on the host.

        Returns:
            The landings, the staging memory if they need any, and the targets and sources of the copies.
        """
        used = 0  # bytes of the staging memory
        staging: BlockMemory | None = None
        landings: deque[_Landing] = deque()
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for (layer, index), gradient in gradients.items():
            block, parameter = layer.block, layer.block.parameters[index]
            if gradient.layout is not torch.strided:
                staging = staging or self._staging.take(_staged_bytes(gradients.values()))
                landing, came = self._place_sparse(layer, index, gradient, staging.common[used:])
                landings.append(landing)
                targets += came
                sources += _parts(gradient)
                used += sum(aligned(each.nbytes) for each in came)
                continue
            own = target = None
            if index in block.retyped:
                own = target = torch.empty_like(gradient, device="cpu")
            elif parameter.grad is None:
                stays = self.keep_narrow and not self._looked_at and not accumulation_hooks(parameter)
                own = target = block.gradients.target(index, gradient.dtype if stays else parameter.dtype)
            if target is None or target.dtype is not gradient.dtype:
                staging = staging or self._staging.take(_staged_bytes(gradients.values()))
                span, begin = block.planned.spans[index], int(staging.common.storage_offset()) + used
                target = strided(staging.common, begin, gradient.dtype, span.shape, span.stride)
                used += aligned(gradient.nbytes)
            rows = None if layer.whole else layer.rows.gradient_rows(index)
            if rows is None:
                targets.append(target)
                sources.append(gradient)
            else:
                self.device.access(target, None, write=True)
                target.zero_()
                targets += [target[row] for row in sorted(rows)]
                sources += [gradient[row] for row in sorted(rows)]
            landings.append((parameter, target, own, False))
        return landings, staging, targets, sources

    def _place_sparse(
        self, layer: StreamedLayer, index: int, gradient: Tensor, memory: Tensor
    ) -> tuple[_Landing, list[Tensor]]:
        """Decides where a sparse gradient goes: to staging memory, to whose parts those of the gradient are to be copied."""
        block, parameter = layer.block, layer.block.parameters[index]
        came = [part(memory, span) for span in lay_out([("", each) for each in _parts(gradient)])]
        there = sparse_rows(came[0], came[1], gradient.shape, once=gradient.is_coalesced())
        dense = layer.rows.sparse_on_device  # param.grad is
        own = dense and parameter.grad is None and index not in block.retyped
        return (parameter, there, block.gradients.target(index, parameter.dtype) if own else None, dense), came

    def make_room(self, layers: Sequence[StreamedLayer]) -> None:
        """Sends off what is left of other layers' gradients, because the backward of ``layers`` begins.

        Something is left of layers of which some parameters get no gradient, so that they are never complete.
        """
        owners = [layer.owner for layer in layers]
        for layer in list(self.arriving):
            if layer not in owners and layer.kind is not Kind.RESIDENTS:
                self.drain(layer)

    def land(self, *, everything: bool = False) -> None:
        """Applies gradients that have landed, all but the latest layer's unless ``everything`` is set.

        No thread waits for another one that does so: that one may be in a hook, whose own backward may need this thread.
        """
        # What has stayed has nothing to land, and its memory on the device is needed.
        stays = bool(self._landed) and not self._landed[-1][0][1]
        if not (everything or stays or len(self._landed) > 1) or not self._landing.acquire(blocking=False):
            return
        try:
            self.finish(0 if everything or stays else 1)
        finally:
            self._landing.release()
        if everything and not (self.arriving or self._flying or self._landed):
            self.drop()  # nothing but what was noted of them

    def end(self, *, last: bool) -> None:
        """Sends off every gradient."""
        for layer in list(self.arriving):
            self.drain(layer)
        self.retire(0)

    def freed(self, layer: StreamedLayer) -> None:
        self.device_bytes -= self._kept.pop(layer, 0)

    def drop(self) -> None:
        """Drops the gradients that did not reach ``param.grad``, after a backward that failed."""
        for _, landings, staging in self.drop_drains():
            self.device.access(map(_memory, landings), None, write=True)
            if staging is not None:
                self._staging.give_back(staging)
        self._received.clear()
        self._kept.clear()
        self.arriving.clear()

    def _apply(self, drain: _Drain) -> None:
        layer, landings, staging = drain
        received = self._received[layer]
        try:
            # They may become param.grad, which the user writes.
            self.device.access(map(_memory, landings), None, write=True)
            if any(own is None for _, _, own, _ in landings):  # these are added to others
                layer.use_gradients()
            # Landings are taken out, so that its parameters alone hold a layer's gradients once it is complete.
            while landings:
                received.applied.add(self._land(*landings.popleft()))
        finally:
            if staging is not None:
                self._staging.give_back(staging)
        if len(received.applied) == received.expected and layer.kind is not Kind.RESIDENTS:
            layer.parameters.doors.gradients_complete(layer)

    def _look(self) -> None:
        self._looked_at = True

    def _land(self, parameter: nn.Parameter, gradient: Tensor, own: Tensor | None, sparse_on_device: bool) -> int:
        """Makes one gradient ``param.grad``, or adds it to that. Returns the parameter's identity."""
        first = parameter.grad is None
        if sparse_on_device:
            gradient = each_row_once(gradient)
        if sparse_on_device and own is None and first:
            gradient = gradient.to_dense()  # the block's memory for it is still held
        elif own is not None and own is not gradient and first:
            with no_inference_mode():
                if gradient.layout is torch.strided:
                    gradient = own.copy_(gradient)
                else:
                    gradient = own.zero_().index_copy_(0, sparse_indices(gradient)[0], sparse_values(gradient))
        narrow = own is gradient and gradient.dtype is not parameter.dtype
        if first and own is gradient and not accumulation_hooks(parameter):  # nearly always
            if narrow:
                keep_narrow(parameter, gradient, self._look)
            else:
                parameter.grad = gradient
        else:
            accumulate(parameter, gradient, own=own is gradient and not narrow)  # (9)
        return id(parameter)


def _parts(gradient: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors of a gradient: itself, or the indices and values of a sparse one."""
    dense = gradient.layout is torch.strided
    return (gradient,) if dense else (sparse_indices(gradient), sparse_values(gradient))


def _staged_bytes(gradients: Collection[Tensor]) -> int:
    """How much staging memory a layer's gradients take at most.

    Memory that is free is kept by its size. That of a sparse gradient, another one in each step, is a power of two.
    """
    sizes = [sum(aligned(each.nbytes) for each in _parts(gradient)) for gradient in gradients]
    dense = all(each.layout is torch.strided for each in gradients)
    return sum(sizes) if dense else 1 << (sum(sizes) - 1).bit_length()


_requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")
_memory: Callable[[_Landing], Tensor] = itemgetter(1)


def accumulate(parameter: nn.Parameter, gradient: Tensor, *, own: bool) -> None:
    """Does for the host's parameter what autograd's ``AccumulateGrad`` does.

    The first gradient becomes ``param.grad``, later ones are added in place, and the user's hooks that run after
    accumulation follow.

    Args:
        parameter: the user's parameter.
        gradient: a tensor on the host with the parameter's shape, and its dtype or a lower one.
        own: whether ``gradient`` itself may become ``param.grad``; otherwise a copy does.
    """
    if parameter.grad is None and own:
        parameter.grad = gradient
    else:
        with no_inference_mode(), torch.no_grad():
            if parameter.grad is None:
                parameter.grad = gradient.to(parameter.dtype, copy=True)
            elif parameter.grad.layout is not torch.strided and gradient.layout is torch.strided:
                parameter.grad = gradient + parameter.grad
            else:
                parameter.grad += gradient
    after = accumulation_hooks(parameter)
    if after:
        with no_inference_mode(), torch.no_grad():
            for hook in list(after.values()):
                if hook(parameter) is not None:
                    raise RuntimeError("Tensor post accumulate grad hooks should return None.")  # torch's own words


def each_row_once(gradient: Tensor) -> Tensor:
    """Adds up the rows that several uses of an embedding gave, in the order in which autograd adds dense gradients."""
    if gradient.is_coalesced():
        return gradient
    with no_inference_mode():
        numbers, where = torch.unique(sparse_indices(gradient)[0], return_inverse=True)
        values = sparse_values(gradient)
        rows = values.new_zeros((len(numbers), *values.shape[1:])).index_add_(0, where, values)
        return sparse_rows(numbers[None], rows, gradient.shape)
