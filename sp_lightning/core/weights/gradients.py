"""Copies gradients to the host while backward runs, and adds them to ``param.grad``.

1. ``arrived``: autograd has set a gradient of a device parameter.
2. ``drain``: a layer's gradients are copied to the host.
3. ``retire``: compute waits for the copy, and the device memory of the gradients is freed.
4. ``apply``: the host waits for the copy, and makes each gradient ``param.grad``, or adds it to ``param.grad``.

The gradients of at most k' + 1 layers are on the device at once. Gradients of residents are not counted, because they are copied
when backward ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.device.layout import aligned, lay_out, part, strided
from sp_lightning.core.store.block_memory import BlockMemory, Staging
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.core.torch_compat.private import (
    NodeHooks,
    accumulation_hooks,
    has_accumulation_hooks,
    node_hooks,
    sparse_indices,
    sparse_rows,
    sparse_values,
)
from sp_lightning.core.weights.gradient_roles import (
    drop,
    keep_narrow,
)
from sp_lightning.core.weights.layer import Kind, StreamedLayer

Wanted = Callable[[StreamedLayer], bool]
"""Returns True if an optimizer's step waits for a layer's gradients, to update the layer in this backward."""

W = TypeVar("W")


class Transfers(Generic[W]):
    """The transfers of gradients to the host, in the order in which they were issued.

    Each transfer has a value of the type ``W``, by which ``apply`` knows the gradients. Callers let one thread at a time call
    methods.

    Args:
        device: copies, and waits for the transfers.
        in_flight: the number of transfers, each with the gradients of a layer, that may be on the device at once (k' + 1).
        apply: applies the gradients of a transfer, given its value. Called after the host has waited for the transfer.

    Attributes:
        in_flight: the same number.
        retired: transfers that compute has waited for, and whose gradients are not applied yet: the value, and the copy's event
            (None: nothing was copied).
        device_bytes: bytes of gradients that are on the device now.
    """

    def __init__(self, device: Device, in_flight: int, apply: Callable[[W], None]) -> None:
        self.device = device
        self.in_flight = in_flight
        self._apply = apply
        self.device_bytes = 0
        # Transfers in flight: the value, the device tensors to keep until compute has waited for the copy, the copy's event.
        self._flying: deque[tuple[W, list[Tensor], Any]] = deque()
        self.retired: deque[tuple[W, Any]] = deque()

    def send(self, layer: int, targets: Sequence[Tensor], sources: Sequence[Any], alive: list[Tensor], what: W) -> None:
        """Issues a transfer. Retires older ones, so that ``in_flight`` is not exceeded when the next layer's gradients arrive.

        Args:
            layer: the index of the layer, for timelines.
            targets: the host memory for each tensor of ``sources``.
            sources: the tensors to copy.
            alive: the device tensors to keep until compute has waited for the copies.
            what: the value of the transfer.
        """
        nbytes = sum(map(_nbytes, sources))
        with self.device.timed("drain", layer, Stream.DOWNLOAD, nbytes):
            self.device.copy(targets, sources, Stream.DOWNLOAD)  # (8)
        self.device.stats.offloaded_gradient_bytes += nbytes
        self._flying.append((what, alive, self.device.record(Stream.DOWNLOAD)))
        self.retire(self.in_flight - 1)

    def retire(self, keep: int) -> None:
        """Makes compute wait for all transfers except the ``keep`` latest ones. Frees the device memory of these transfers."""
        while len(self._flying) > keep:
            what, alive, copied = self._flying.popleft()
            self.device.wait(Stream.COMPUTE, copied, Wait.REUSE_AFTER_DRAIN)
            self.device.access(alive, Stream.COMPUTE, write=True)  # the allocator may give this memory to compute next
            self.device_bytes -= sum(map(bytes_of_dense, alive))
            self.retired.append((what, copied))

    def finish(self, keep: int = 1) -> None:
        """Makes the host wait for retired transfers, except the ``keep`` latest ones, and applies their gradients.

        This limits the host memory of gradients, and how far the host runs ahead of the device.
        """
        while len(self.retired) > keep:
            what, copied = self.retired.popleft()
            self.device.synchronize(copied, Wait.APPLY_AFTER_DRAIN)
            self._apply(what)

    @property
    def under_way(self) -> list[tuple[W, Any]]:
        """The transfers whose gradients are not applied yet: the value and the event of each."""
        return [(what, copied) for what, _, copied in self._flying] + [*self.retired]

    def drop(self) -> list[W]:
        """Makes the host wait for all transfers, and drops their gradients. Returns the values of the transfers."""
        under_way = self.under_way
        self._flying.clear()
        self.retired.clear()
        for _, copied in under_way:
            self.device.synchronize(copied, Wait.DROP_AFTER_DRAIN)
        self.device_bytes = 0
        return [what for what, _ in under_way]


class GradientSink:
    """Takes gradients from backward to ``param.grad``: one device directly, several devices after they have summed them.

    Several of autograd's threads may have gradients at once. The caller lets one thread at a time call methods, except
    :meth:`apply`.

    Args:
        device: copies the gradients.
        transfers: the transfers to the host.

    Attributes:
        transfers: the same object.
        keep_narrow: True if gradients in a lower dtype than their parameter's keep that dtype until user code reads them.
        arriving: the layers with gradients that have arrived, and whose transfer is not issued yet.
    """

    def __init__(self, device: Device, transfers: Transfers[Any]) -> None:
        self.device = device
        self.transfers = transfers
        self.keep_narrow = False
        self.arriving: dict[Any, None] = {}

    def arrived(self, layer: StreamedLayer, index: int, gradient: Tensor) -> bool:
        """Takes one gradient of a layer. Returns True if all gradients of the layer have arrived."""
        raise NotImplementedError

    def drain(self, layer: StreamedLayer) -> None:
        """Issues the transfer of the gradients of one layer that have arrived."""

    def make_room(self, layers: Sequence[StreamedLayer]) -> None:
        """Issues the transfer of other layers' gradients, because the backward of ``layers`` begins."""

    def expect(self, wanted: Wanted | None = None) -> None:
        """Called when the backward of a loss begins. Sinks that keep gradients on the GPU, or update early, store ``wanted``.

        Args:
            wanted: returns True if an optimizer's step waits for a layer, to update it in this backward. None if no step waits.
        """

    def apply(self, *, everything: bool = False) -> None:
        """Applies gradients that are on the host, and runs the user's hooks.

        Args:
            everything: True to wait for all gradients, because a graph task ends.
        """

    def settle(self, arrivals: AbstractContextManager[Any]) -> None:
        """Applies all gradients that have arrived, because a hook of backward uses ``param.grad``, or steps an optimizer.

        Args:
            arrivals: the lock under which gradients arrive. It is not held while hooks of the user run.
        """

    def end(self, *, last: bool) -> None:
        """Issues the transfers of all gradients, because a graph task ends. ``last``: True if it is the outermost task."""

    def freed(self, layer: StreamedLayer) -> None:
        """Called when a layer's step has used the layer's gradients, and they are no longer in ``param.grad``."""

    def drop(self) -> None:
        """Drops the gradients that are not in ``param.grad``, after a backward that failed."""


def bytes_of_dense(gradient: Tensor) -> int:
    """Returns the bytes of a gradient; 0 if it is sparse, because its bytes are few, and the host would wait for their number."""
    return gradient.nbytes if gradient.layout is torch.strided else 0


_nbytes: Callable[[Tensor], int] = attrgetter("nbytes")

_OnHost = tuple[nn.Parameter, Tensor, Tensor | None, bool]
"""One gradient on the host. A plain tuple, because one is made for each gradient, in the host's critical path.

- the user's parameter.
- the gradient.
- memory that may become ``param.grad``: the gradient itself or, if the gradient is in staging memory, the memory into which it is
  converted. None if the gradient is added to an earlier one.
- True if the gradient is sparse although ``param.grad`` is dense.
"""

_Drain = tuple[StreamedLayer, deque[_OnHost], BlockMemory | None]
"""One copy of a layer's gradients: the layer, each gradient, and the staging memory, or None."""


@dataclass
class Received:
    """The gradients of a layer and its masters in the running backward.

    Attributes:
        gradients: the gradients that are not drained yet, by layer and index of the parameter.
        expected: the number of parameters that get a gradient.
        applied: the ids of the parameters whose gradient is in ``param.grad``.
    """

    expected: int = 0
    gradients: dict[tuple[StreamedLayer, int], Tensor] = field(default_factory=dict)
    applied: set[int] = field(default_factory=set)


class Gradients(GradientSink):
    """The gradients of all layers, from autograd to ``param.grad``: the :class:`GradientSink` of one device.

    Args:
        device: copies gradients.
        staging: provides host memory for gradients that are added to earlier ones or converted, and for sparse gradients.
        in_flight: the number of layers whose gradients may be on the device at once (k' + 1).
        keep_for_step: True if all layers step on the GPU. If a step waits for a layer, the layer's gradients are then not copied
            to the host.
    """

    def __init__(
        self,
        device: Device,
        staging: Staging,
        *,
        in_flight: int,
        keep_for_step: bool = False,
    ) -> None:
        super().__init__(device, Transfers(device, in_flight, self._apply_drain))
        self._staging = staging
        self._keep_for_step = keep_for_step
        self._received: dict[StreamedLayer, Received] = {}
        # The thread that applies gradients holds this lock, so that several gradients of a parameter are added in order.
        self._applying = threading.RLock()
        self._applier = 0  # the identifier of this thread; 0 without one
        self._wanted: Wanted | None = None  # in this backward
        # By layer, bytes of gradients that wait on the GPU for the layer's step.
        self._kept_bytes: dict[StreamedLayer, int] = {}
        # True if user code has read a narrow gradient. It will probably read the next ones, and a gradient that is read takes
        # memory in both dtypes. So later gradients are not kept narrow.
        self._was_read = False

    def arrived(self, layer: StreamedLayer, index: int, gradient: Tensor) -> bool:
        """Receives a gradient that autograd has computed. It is copied to the host with the other gradients of its layer.

        If the parameter has a gradient that is not copied yet, the layer's gradients are copied first.

        Returns:
            True if all gradients of the layer have arrived; always False for residents.
        """
        owner = layer.owner
        place = (layer, index)
        received = self._received.get(owner)
        if received is None:
            received = self._received[owner] = Received()
        elif place in received.gradients:  # a second gradient of one parameter: the host adds the two
            self.drain(owner)
        if not received.gradients:
            self.arriving[owner] = None
            received.expected = sum(sum(map(_requires_grad, member.block.parameters)) for member in owner.with_masters)
        received.gradients[place] = gradient
        self.transfers.device_bytes += bytes_of_dense(gradient)
        return len(received.gradients) == received.expected and owner.kind is not Kind.RESIDENTS

    def drain(self, layer: StreamedLayer) -> None:
        """Issues the copies to the host of all gradients of a layer and its masters that have arrived.

        If :meth:`_may_keep` allows it, the gradients wait on the GPU for the layer's step instead.
        """
        owner = layer.owner
        received = self._received.get(owner)
        if received is None or not received.gradients:
            return
        gradients, received.gradients = received.gradients, {}
        del self.arriving[owner]
        self.device.access(gradients.values(), Stream.COMPUTE, write=True)  # by backward's kernels
        if self._may_keep(owner, received, gradients):
            self._keep(owner, received, gradients)
            return
        self.device.wait(Stream.DOWNLOAD, self.device.record(Stream.COMPUTE), Wait.DRAIN_AFTER_GRADIENT)
        copies, staging, targets, sources = self._place(gradients)
        owner.rows.sparse_on_device = False  # a table's next gradient sets it again
        self.transfers.send(owner.index, targets, sources, list(gradients.values()), (owner, copies, staging))

    def expect(self, wanted: Wanted | None = None) -> None:
        self._wanted = wanted

    def _may_keep(
        self, owner: StreamedLayer, received: Received, gradients: dict[tuple[StreamedLayer, int], Tensor]
    ) -> bool:
        """Returns True if gradients may wait on the GPU for the layer's step there, instead of being copied to the host.

        This needs all gradients of the layer at once, no sparse gradient, no hook of the user for accumulated gradients, and no
        earlier gradient, and a step must wait for the layer.
        """
        if not self._keep_for_step or self._wanted is None or len(gradients) != received.expected:
            return False
        parameters = [layer.block.parameters[index] for layer, index in gradients]
        dense = all(gradient.layout is torch.strided for gradient in gradients.values())
        alone = all(p.grad is None and not has_accumulation_hooks(p) for p in parameters)
        return dense and alone and owner.kind is not Kind.RESIDENTS and self._wanted(owner)

    def _keep(
        self, owner: StreamedLayer, received: Received, gradients: dict[tuple[StreamedLayer, int], Tensor]
    ) -> None:
        """Keeps gradients on the GPU, as narrow gradients: reading ``param.grad`` copies the gradient to the host."""
        computed = self.device.record(Stream.COMPUTE)
        for (layer, index), gradient in gradients.items():
            parameter = layer.block.parameters[index]
            drop(parameter)
            keep_narrow(parameter, gradient, self._note_read, computed=computed)
            received.applied.add(id(parameter))
        self.transfers.device_bytes -= self._kept_bytes.get(owner, 0)  # the layer's earlier kept gradients are freed
        self._kept_bytes[owner] = sum(map(bytes_of_dense, gradients.values()))
        # There is nothing to copy, but `apply` reports that the gradients are complete.
        self.transfers.retired.append(((owner, deque(), None), None))

    def _place(
        self, gradients: dict[tuple[StreamedLayer, int], Tensor]
    ) -> tuple[deque[_OnHost], BlockMemory | None, list[Tensor], list[Tensor]]:
        """Chooses the host memory of each gradient.

        The first gradient of a parameter is copied to the memory that becomes ``param.grad`` (``own``). If ``param.grad`` exists
        already, or will have another dtype than the gradient, the gradient is copied to staging memory, and added or converted
        later.

        Returns:
            The copies, the staging memory or None, and the targets and sources of the copies.
        """
        used = 0  # bytes of the staging memory
        staging: BlockMemory | None = None
        copies: deque[_OnHost] = deque()
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for (layer, index), gradient in gradients.items():
            block, parameter = layer.block, layer.block.parameters[index]
            if gradient.layout is not torch.strided:
                staging = staging or self._staging.take(_staged_bytes(gradients.values()))
                copy, parts = self._place_sparse(layer, index, gradient, staging.common[used:])
                copies.append(copy)
                targets += parts
                sources += _parts(gradient)
                used += sum(aligned(each.nbytes) for each in parts)
                continue
            own = target = None
            if index in block.retyped:  # the block has no place for this dtype
                own = target = torch.empty_like(gradient, device="cpu")
            elif parameter.grad is None:
                stay_narrow = self.keep_narrow and not self._was_read and not has_accumulation_hooks(parameter)
                own = target = block.gradients.target(index, gradient.dtype if stay_narrow else parameter.dtype)
            if target is None or target.dtype is not gradient.dtype:
                staging = staging or self._staging.take(_staged_bytes(gradients.values()))
                span, begin = block.planned.spans[index], int(staging.common.storage_offset()) + used
                target = strided(staging.common, begin, gradient.dtype, span.shape, span.stride)
                used += aligned(gradient.nbytes)
            rows = None if layer.whole else self._rows_of(layer, index)
            if rows is None:
                targets.append(target)
                sources.append(gradient)
            else:
                self.device.access(target, None, write=True)  # the other rows are zero, and are not copied
                target.zero_()
                targets += [target[row] for row in sorted(rows)]
                sources += [gradient[row] for row in sorted(rows)]
            copies.append((parameter, target, own, False))
        return copies, staging, targets, sources

    def _rows_of(self, layer: StreamedLayer, index: int) -> Any:
        """Returns the numbers of the rows of a gradient that are not zero; None for all rows. The layer is not uploaded whole."""
        return layer.rows.gradient_rows(index)

    def _place_sparse(
        self, layer: StreamedLayer, index: int, gradient: Tensor, memory: Tensor
    ) -> tuple[_OnHost, list[Tensor]]:
        """Chooses staging memory for a sparse gradient: its indices and its values, two dense tensors.

        If ``param.grad`` will be dense (``sparse_on_device``), also chooses the memory of ``param.grad`` (``own``), to which the
        rows are copied later.

        Returns:
            The gradient's copy, and the targets of the copies of its dense tensors.
        """
        block, parameter = layer.block, layer.block.parameters[index]
        targets = [part(memory, span) for span in lay_out([("", each) for each in _parts(gradient)])]
        copied = sparse_rows(targets[0], targets[1], gradient.shape, once=gradient.is_coalesced())
        dense = layer.rows.sparse_on_device  # True if param.grad is dense although the gradient is sparse
        own = dense and parameter.grad is None and index not in block.retyped
        return (parameter, copied, block.gradients.target(index, parameter.dtype) if own else None, dense), targets

    def make_room(self, layers: Sequence[StreamedLayer]) -> None:
        """Drains the gradients of other layers before the backward of ``layers`` begins.

        If some parameters of a layer get no gradient, the layer is never complete, and its gradients are drained here.
        """
        owners = [layer.owner for layer in layers]
        for layer in list(self.arriving):
            if layer not in owners and layer.kind is not Kind.RESIDENTS:
                self.drain(layer)

    def apply(self, *, everything: bool = False) -> None:
        """Applies gradients whose copy is complete: all except the latest layer's, or all if ``everything`` is set.

        If another thread is applying gradients, this returns at once. The other thread may be in a user's hook, and a backward
        in that hook may need this thread. The other thread then applies the rest, after the hook, except perhaps the latest
        layer's. The end of the outermost graph task applies all that are left (``Backward._ends``): no hook runs any more then.
        """
        # The latest gradients were kept on the GPU if their list of copies is empty. The host then waits for nothing, and the
        # layer's step should free their memory soon.
        retired = self.transfers.retired
        were_kept = bool(retired) and not retired[-1][0][1]
        if not (everything or were_kept or len(retired) > 1) or not self._applying.acquire(blocking=False):
            return
        try:
            self._finish(0 if everything or were_kept else 1)
        finally:
            self._applying.release()
        if everything and not (self.arriving or self.transfers.under_way):
            self.drop()  # clears the records of this backward

    def _finish(self, keep: int) -> None:
        """Applies retired gradients, except the ``keep`` latest ones. The caller holds ``_applying``."""
        before, self._applier = self._applier, threading.get_ident()
        try:
            self.transfers.finish(keep)
        finally:
            self._applier = before

    def settle(self, arrivals: AbstractContextManager[Any]) -> None:
        # In a hook of an accumulated gradient, on plain Lightning later gradients have not been accumulated either.
        if self._applier == threading.get_ident():
            return
        with arrivals:
            self.end(last=False)
        with self._applying:
            self._finish(0)

    def end(self, *, last: bool) -> None:
        """Drains all gradients."""
        for layer in list(self.arriving):
            self.drain(layer)
        self.transfers.retire(0)

    def freed(self, layer: StreamedLayer) -> None:
        self.transfers.device_bytes -= self._kept_bytes.pop(layer, 0)

    def drop(self) -> None:
        """Drops the gradients that are not in ``param.grad``, and clears the records of this backward.

        Called after a backward that failed. After a complete backward there are only records.
        """
        for _, copies, staging in self.transfers.drop():
            self.device.access(map(_memory, copies), None, write=True)
            if staging is not None:
                self._staging.give_back(staging)
        self._received.clear()
        self._kept_bytes.clear()
        self.arriving.clear()

    def _apply_drain(self, drain: _Drain) -> None:
        """Applies the gradients of one transfer, for which the host has waited. Reports the layer if it is complete."""
        layer, copies, staging = drain
        received = self._received[layer]
        try:
            # The memory may become param.grad, which the user may write: declared as a write of the host.
            self.device.access(map(_memory, copies), None, write=True)
            # Gradients without own memory are added to param.grad, which may have left host memory.
            if any(own is None for _, _, own, _ in copies):
                layer.use_gradients()
            # They are removed, so that only parameters reference the gradients when the layer is complete.
            while copies:
                received.applied.add(self._apply_one(*copies.popleft()))
        finally:
            if staging is not None:
                self._staging.give_back(staging)
        if len(received.applied) == received.expected and layer.kind is not Kind.RESIDENTS:
            layer.parameters.engine.gradients_complete(layer)

    def _note_read(self) -> None:
        self._was_read = True

    def _apply_one(self, parameter: nn.Parameter, gradient: Tensor, own: Tensor | None, sparse_on_device: bool) -> int:
        """Makes a gradient ``param.grad``, or adds it to ``param.grad``. Returns the parameter's id.

        The arguments are those of a :data:`_OnHost`. In the common case the gradient is in ``own`` memory, and becomes
        ``param.grad`` as it is. Staged gradients are converted into ``own`` memory before.
        """
        first = parameter.grad is None
        if sparse_on_device:
            gradient = each_row_once(gradient)
        if sparse_on_device and own is None and first:
            # `own` is None because that memory is still referenced, or because the weight has another dtype now.
            gradient = gradient.to_dense()
        elif own is not None and own is not gradient and first:  # staged, so it is converted into its own memory
            with no_inference_mode():
                if gradient.layout is torch.strided:
                    gradient = own.copy_(gradient)
                else:
                    gradient = own.zero_().index_copy_(0, sparse_indices(gradient)[0], sparse_values(gradient))
        narrow = own is gradient and gradient.dtype is not parameter.dtype
        on_node = node_hooks(parameter)
        if first and own is gradient and on_node is None and not accumulation_hooks(parameter):  # nearly always
            if narrow:
                keep_narrow(parameter, gradient, self._note_read)
            else:
                parameter.grad = gradient  # (9)
        else:
            accumulate(parameter, gradient, on_node, own=own is gradient and not narrow)
        return id(parameter)


def _parts(gradient: Tensor) -> tuple[Tensor, ...]:
    """Returns the dense tensors of a gradient: the gradient itself, or the indices and values of a sparse one."""
    dense = gradient.layout is torch.strided
    return (gradient,) if dense else (sparse_indices(gradient), sparse_values(gradient))


def _staged_bytes(gradients: Collection[Tensor]) -> int:
    """Returns the bytes of staging memory for a layer's gradients.

    Sparse gradients have another size in each step, and free staging memory is kept by size. So with a sparse gradient the bytes
    are rounded up to a power of two.
    """
    sizes = [sum(aligned(each.nbytes) for each in _parts(gradient)) for gradient in gradients]
    dense = all(each.layout is torch.strided for each in gradients)
    return sum(sizes) if dense else 1 << (sum(sizes) - 1).bit_length()


_requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")
_memory: Callable[[_OnHost], Tensor] = itemgetter(1)


def accumulate(parameter: nn.Parameter, gradient: Tensor, on_node: NodeHooks | None, *, own: bool) -> None:
    """Accumulates a gradient into the host's parameter, like autograd's ``AccumulateGrad``.

    The first gradient becomes ``param.grad``, and later ones are added in place. Then the user's hooks for accumulated gradients
    run. So do hooks on the parameter's own ``AccumulateGrad`` node: backward does not reach this node, because modules use the
    device parameter.

    Args:
        parameter: the user's parameter.
        gradient: a tensor on the host with the parameter's shape, and its dtype or a lower one.
        on_node: the hooks on the parameter's own node; None if there are none.
        own: True if ``gradient`` itself may become ``param.grad``. Otherwise a copy becomes ``param.grad``.
    """
    if on_node is not None:
        gradient, own = _before_accumulation(on_node.before, gradient.to(parameter.dtype), own)
    if parameter.grad is None and own:
        parameter.grad = gradient
    else:
        with no_inference_mode(), torch.no_grad():
            if parameter.grad is None:
                parameter.grad = gradient.to(parameter.dtype, copy=True)
            elif parameter.grad.layout is not torch.strided and gradient.layout is torch.strided:
                parameter.grad = gradient + parameter.grad  # a sparse tensor cannot take a dense sum in place
            else:
                parameter.grad += gradient
    after = accumulation_hooks(parameter)
    if after:
        with no_inference_mode(), torch.no_grad():
            for hook in list(after.values()):
                if hook(parameter) is not None:
                    raise RuntimeError("Tensor post accumulate grad hooks should return None.")  # torch's message
    if on_node is not None:
        with no_inference_mode(), torch.no_grad():
            for hook in on_node.after:
                hook((), (gradient,))


def _before_accumulation(hooks: Sequence[Callable[..., Any]], gradient: Tensor, own: bool) -> tuple[Tensor, bool]:
    """Runs hooks that may replace a gradient. Returns the gradient, and whether it may become ``param.grad`` itself."""
    with no_inference_mode(), torch.no_grad():
        for hook in hooks:
            if (replaced := hook((gradient,))) is not None:
                (gradient,) = replaced if isinstance(replaced, tuple) else (replaced,)
                own = False  # user code may hold the other tensor
    return gradient, own


def each_row_once(gradient: Tensor) -> Tensor:
    """Returns a sparse gradient with one entry per row: the sum over all uses of that row.

    The sums are computed in the order in which autograd adds dense gradients, so that they have the same bits.
    """
    if gradient.is_coalesced():
        return gradient
    with no_inference_mode():
        numbers, where = torch.unique(sparse_indices(gradient)[0], return_inverse=True)
        values = sparse_values(gradient)
        rows = values.new_zeros((len(numbers), *values.shape[1:])).index_add_(0, where, values)
        return sparse_rows(numbers[None], rows, gradient.shape)
