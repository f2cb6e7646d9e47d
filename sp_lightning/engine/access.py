"""Access: all requests for a layer at the moment when its weights are needed. There are four cases:

- a module is called (:meth:`Access.enter`, :meth:`Access.leave`, called by :mod:`sp_lightning.engine.module_calls`),
- autograd unpacks a weight that it saved (:mod:`sp_lightning.engine.saved_tensors`),
- another operation computes with a stand-in (:meth:`Access.operation_on`, called by the stand-in's class),
- a batch looks up rows of a table (:meth:`Access.reading_rows`).

A wrong guess of the prefetch costs a fetch and never a result.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.device.own_threads import CALLED_ELSEWHERE, LEAVES_FAST_PATH, LateError, OwnThreads
from sp_lightning.engine.activations import Activations
from sp_lightning.engine.backward import Backward
from sp_lightning.engine.host_source import tied
from sp_lightning.engine.module_calls import Visits
from sp_lightning.engine.saved_tensors import RunningCalls, SavedTensors, packs
from sp_lightning.engine.schedule import Residency
from sp_lightning.engine.step import Step
from sp_lightning.layers.bound_weights import BoundWeights
from sp_lightning.layers.device_parameter import DeviceParameter, hides_stand_ins
from sp_lightning.layers.layer import Kind, StreamedLayer
from sp_lightning.layers.residents import Residents
from sp_lightning.layers.ring import BlockSource, Staged
from sp_lightning.layers.swap import ParameterSwap
from sp_lightning.layers.write_back import WriteBack
from sp_lightning.torch_compat.modes import held
from sp_lightning.torch_compat.patched import elsewhere, scope
from sp_lightning.torch_compat.private import (
    DIFFERENTIATING,
    interpreter_stack,
    tree_leaves,
)
from sp_lightning.updates.background import BackgroundUpdates


@dataclass(eq=False, repr=False, kw_only=True)
class Access:
    """Fetches and attaches layers on request. It is the ``EngineCallbacks`` of device parameters.

    Attributes:
        lock: the engine's lock.
        threads: the threads that belong to the run.
        layers: all layers.
        saved_tensors: the saved-tensor hooks.
        fast_paths: the modules of torch that leave a fast path in evaluation if uses of their weights are noticed.
        calls: the calls of modules that are running.
    """

    lock: threading.RLock
    threads: OwnThreads
    device: Device
    layers: Sequence[StreamedLayer]
    residency: Residency
    bound_weights: BoundWeights
    residents: Residents
    source: BlockSource
    swap: ParameterSwap
    writes: WriteBack
    activations: Activations
    updates: BackgroundUpdates
    step: Step
    backward: Backward
    saved_tensors: SavedTensors
    fast_paths: Sequence[nn.Module]

    def __post_init__(self) -> None:
        moving = [layer for layer in self.layers if layer.kind is not Kind.RESIDENTS]
        self._streams = bool(moving)  # False if the module has only residents, which need no packing
        self._casts = any(layer.masters is not None for layer in moving)
        self._first = next((layer for layer in moving if layer.kind is Kind.BLOCK), None)
        self.gradient_arrived = (
            self.backward.gradient_arrived
        )  # called directly, because it is called for each gradient
        self.gradients_complete = self.backward.complete
        self.calls = RunningCalls()
        self._scope = scope.get()
        self._closed = False

    # ------------------------------------------------------------------ a module is called

    def enter(self, visits: Visits, inputs: Any) -> Visits:
        """Locks and attaches the layers of a module before its call, and activates the saved-tensor hooks.

        Outside a step the call is a short step of its own: :meth:`leave` ends it. A thread outside the run becomes a helper.

        Args:
            visits: the layers that the module uses.
            inputs: the arguments of the call.

        Returns:
            The layers for :meth:`leave`: none for a table whose rows are looked up; also the masters if other code may read them.

        Raises:
            RuntimeError: the call is traced or transformed; or another thread makes the call, and no forward runs in which the
                thread could be a helper.
        """
        if visits and visits[0].kind is Kind.TABLE and not hides_stand_ins(inputs):
            visits = ()  # the look-up itself fetches the rows that it needs
        if torch.jit.is_tracing() or interpreter_stack():
            self._refuse_transforms_and_traces(visits)
        # If torch asks other code before the stand-ins, that code may read a master, which has memory only while it is attached.
        if self._casts and hides_stand_ins(inputs):
            visits = (*visits, *(layer.masters for layer in visits if layer.masters is not None))
        step = self.step
        if visits and (make_room := self.activations.make_room) is not None:
            make_room(visits, inputs)
        with held(self.lock):
            helps = self.threads.beside
            if helps:
                self._admit(visits)
            outside = self._outside()
            try:
                if outside:
                    step.begin_outside()
                step.activate(in_backward=bool(self.backward.tasks))
                self.residents.group.sync_requires_grad()
                self.residency.begin_call(visits, backward=bool(self.backward.tasks))
            except BaseException:  # user code may catch the error, so undo everything: no call has begun
                if outside:
                    step.end(writes_follow=True)
                if helps:
                    self.threads.end()
                raise
            packs_any = self._streams or self.activations.packs
            self.calls.begin(self.saved_tensors.hooks if packs_any else None, helps=helps)
            for layer in visits:
                if layer.running_calls == 1:  # this call is the outermost one that uses the layer
                    layer.parameters.count_references()
        return visits

    def _outside(self) -> bool:
        """Returns True if no step, backward or module call runs."""
        return not (self.step.running or self.backward.tasks or self.calls.depth)

    def _admit(self, visits: Visits) -> None:
        """Admits this thread as a helper in the running forward. The thread is outside the run and calls a module.

        Every use of a weight is noticed from then on; see :meth:`_share`.

        Args:
            visits: the layers of the module; the error names the first one.

        Raises:
            RuntimeError: no forward runs, or the thread was a helper of a forward that has ended.
        """
        self.threads.refuse_late()
        if not (self.threads.here.depth or self._may_help()):
            raise RuntimeError(CALLED_ELSEWHERE.format(name=repr(visits[0].name) if visits else "A module"))
        self._share()
        self.threads.begin()

    def _may_help(self) -> bool:
        """Returns True if a thread outside the run may become a helper now: a forward runs, and no backward."""
        return (self.step.admits or self.calls.depth > 0) and not self.backward.tasks

    def leave(self, visits: Visits, output: Any) -> None:
        """Releases the layers of a module whose call has returned or raised, and prefetches other layers.

        Also adds hooks to the outputs that notice the backward of the call. Ends the short step of a call outside a step.

        Raises:
            LateError: a helper made the call, and the forward has ended before the call.
        """
        with held(self.lock):
            helps = self.threads.here.depth > 0
            if helps:
                late = self.threads.late
                self.threads.end()
                if late:  # the helper's layers are released by the end of the step, which resets `running_calls`
                    self.calls.end(helps=True)
                    if sys.exception() is None:
                        raise LateError
                    return
            try:
                if torch.is_grad_enabled() and visits:
                    self._watch(visits, output)
                if self.step.shown:
                    self.step.renew_shown()
                # The frames of an exception hold the weights as long as the exception is handled. So the layers are
                # released later. This is common: checkpoints end their recompute by an exception.
                self.residency.end_call(visits, release=sys.exception() is None)  # (4)
            finally:  # releasing a layer copies writes back, which may raise
                self.calls.end(helps=helps)
                outside = self._outside()
                if outside:
                    self.step.end(writes_follow=True)
            if visits and not outside:
                self.residency.fetch_ahead()

    @contextmanager
    def rerun(self, visits: Visits, inputs: Any) -> Iterator[None]:
        """A context for a forward that runs again in backward, for which no module is called.

        Args:
            visits: the layers that the forward uses.
            inputs: its positional arguments.
        """
        self.backward.join()
        entered = self.enter(visits, inputs)
        try:
            yield
        finally:
            self.leave(entered, None)

    def _watch(self, visits: Visits, output: Any) -> None:
        """Adds a hook to the outputs of a module call. Autograd calls the hook when the backward of the call begins."""
        pre_backward = self.backward.awaited(self._pre_backward, tuple(visits))
        for tensor in (output,) if isinstance(output, Tensor) else tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(pre_backward)

    def _pre_backward(self, visits: Visits, gradient: Tensor) -> None:
        """Releases layers whose backward is over, and issues the transfer of their gradients.

        Hook on the outputs of a module call: the backward of the module's layers, ``visits``, begins. So the backward of later
        layers is over.
        """
        with held(self.lock):
            self.backward.join()
            self.step.activate(in_backward=True)
            self.residency.pre_backward(visits)
        self.backward.make_room(visits)

    # ------------------------------------------------------------------ weights are used outside module calls

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """A context for the user code of a step. Saved tensors are packed in it, so that the graph holds no slot.

        Afterwards no call of this thread counts as running.
        """
        with self.saved_tensors.hooks() if self._streams else nullcontext():
            try:
                yield
            finally:
                self.calls.reset()  # Ctrl-C may have interrupted the end of a call

    def saves_raw(self) -> bool:
        """Returns True if autograd would now save tensors as they are: the engine's saved-tensor hooks are not active."""
        return torch.is_grad_enabled() and not packs()

    def refuse_over(self, name: str) -> None:
        """Raises an error for the use of a device parameter if the run is over.

        Raises:
            RuntimeError: the run is over.
        """
        if self._closed:
            raise RuntimeError(
                f"{name!r} was taken within a step of a run that is over, and is used now: it has no memory any more. Take "
                f"it from its module: dict(module.named_parameters())[{name!r}]."
            )

    @contextmanager
    def operation_on(self, parameters: Sequence[DeviceParameter], *, casts: bool = False) -> Iterator[None]:
        """A context for one operation on device parameters, in which their layers are attached.

        Args:
            parameters: the parameters.
            casts: True if the parameters are masters, and the operation uses their casts.

        Raises:
            RuntimeError: the run is over, or the running backward has updated a layer already.
            LateError: this thread was a helper of a forward that has ended.
        """
        self.refuse_over(parameters[0]._of.spans[parameters[0]._index].name)
        wanted: set[StreamedLayer] = {parameter._of.layer for parameter in parameters}
        residents = self.residents.layer in wanted
        layers = sorted(wanted - {self.residents.layer}, key=lambda layer: layer.index)
        if casts:  # the casts are in the slots of the masters' owners
            layers = [masters.owner for masters in layers]
        with held(self.lock):
            self.threads.refuse_late()
            for layer in layers:
                layer.refuse_updated()
                layer.rows.need(None)  # all rows
            self.residency.begin_call(layers, backward=bool(self.backward.tasks))
        try:
            if residents:
                with held(self.lock):
                    self.residents.refresh()
                    self.residents.group.notice_uses(False)  # they are on the device, so the operation may use them
            for layer in layers if torch.is_grad_enabled() else ():
                layer.rows.read_whole()
            if self.backward.tasks:
                self.backward.make_room(layers)
            yield
        finally:
            with held(self.lock):
                if not self.threads.late:  # otherwise the end of the step releases the layers
                    self._end_operation(layers, residents=residents)

    def _end_operation(self, layers: Sequence[StreamedLayer], *, residents: bool) -> None:
        """Ends :meth:`operation_on`: copies written residents to the host, and prefetches.

        If the next operation has to be noticed, layers without a running call are released. Otherwise they stay locked for it.

        Args:
            layers: the layers of the operation.
            residents: True if the operation also used residents.
        """
        self.residency.end_call(layers, release=False)
        if residents and not self.swap.on_device:
            self.residents.take_back_writes()
            self.residents.group.notice_uses(True)
        if self.saves_raw() or not self.swap.on_device:
            # Afterwards the parameters are stand-ins, so the next operation is noticed. This is necessary if autograd would save
            # the weights' memory itself, or if modules hold host parameters, which user code may write.
            self.residency.release_unpinned()
        self.residency.fetch_ahead()

    @contextmanager
    def reading_rows(self, layer: StreamedLayer) -> Iterator[Staged | None]:
        """A context in which a table's weight on the host is current and is not written.

        Yields the weight's bytes, from which rows are gathered. If the whole weight is on the device, yields None, because user
        code may have written the weight on the device.

        Raises:
            RuntimeError: the running backward has already updated the table.
        """
        with held(self.lock):
            layer.refuse_updated()
            layer.parameters.sync_requires_grad()
            staged = None
            if layer.slot is None:
                self.residency.release_exchanged(layer)
                staged = self.source.stage(layer)
            yield staged

    # ------------------------------------------------------------------ weights are written through .data

    def take_back_writes(self, layer: StreamedLayer) -> None:
        """Waits for a layer's update, and copies weights to the host that were written on the device, or may have been."""
        with held(self.lock):
            self.updates.wait(layer, Wait.READ_AFTER_UPDATE)
            self.writes.take_back(layer)

    def host_is_used(self, layer: StreamedLayer) -> None:
        """Prepares for user code that reads or writes host weights of a layer.

        Copies weights that were written on the device to the host, and waits for transfers that read the host weights.
        """
        with held(self.lock):
            if self.swap.on_device and layer.parameters.written():
                self.step.take_back_writes()
            # Residents are always attached, so their next use would not be noticed otherwise.
            if layer is self.residents.layer:
                self.residents.group.notice_uses(True)
            self.device.synchronize(layer.transfer, Wait.UPDATE_AFTER_FETCH)

    def host_was_used(self, layer: StreamedLayer, *, viewed: bool) -> None:
        """Uploads host weights that user code has written, if the layer is in use on the device, or its slot is viewed.

        Args:
            layer: the layer.
            viewed: True if user code has made a view of a host weight, through which it may write the weight later.
        """
        with held(self.lock):
            if layer is self.residents.layer:
                if self.swap.on_device or self.calls.depth:
                    self.residents.refresh()
                return
            if viewed and layer in self.residency.used:
                self._show_used(layer)
            for member in layer.owner.family:
                if not member.outdated:
                    continue
                if member in self.residency.used:
                    self.residency.renew(member)
                # If a host parameter was given other memory, views of the slot keep the old values, so they are not renewed.
                elif member.guard is not None and member.guard.views and not member.block.displaced:
                    member.invalidate()
                    self.residency.renew_views()

    def host_is_shown(self, layer: StreamedLayer) -> None:
        """Prepares for user code that gets the host's memory of a weight. No version shows its writes to that memory.

        If a call of the layer is running, the call continues with the copy on the device; see :meth:`_show_used`. Otherwise the
        copy is marked as out of date.
        """
        self.host_is_used(layer)
        with held(self.lock):
            if layer is self.residents.layer:
                self.residents.distrust()
            elif layer in self.residency.used and layer.running_calls:
                self._show_used(layer)
            else:
                self.residency.release_unpinned()
                self.source.invalidate([member for member in layer.owner.family if member not in self.residency.used])

    def _show_used(self, layer: StreamedLayer) -> None:
        """Records that user code gets the host's memory of a layer in use, if modules hold host parameters.

        The layer is uploaded again before its release (:meth:`Step.renew_shown`).

        Raises:
            RuntimeError: a tensor views the layer's slot.
        """
        # If modules hold device parameters, another thread gets the memory, and only reads it.
        if not self.swap.on_device:
            self.bound_weights.refuse_viewed(layer)
            self.step.shown.add(layer)

    def device_is_used(self, layer: StreamedLayer) -> None:
        """Uploads a layer in use again if modules hold host parameters, and user code has written them, or may have."""
        with held(self.lock):
            written = layer.outdated or layer in self.step.shown
            if written and layer in self.residency.used and not self.swap.on_device:
                self.residency.renew(layer)

    def replacing(self, layer: StreamedLayer, index: int, value: Tensor) -> None:
        """Prepares ``param.data = value``: graphs that saved views of the weight keep its old values.

        Raises:
            RuntimeError: the value is in the memory of another parameter, or has other strides.
        """
        with held(self.lock):
            self._refuse_tying(layer, index, value)
            self.writes.replace(layer, index, value, self.activations.first_run())

    def _refuse_tying(self, layer: StreamedLayer, index: int, value: Tensor) -> None:
        """Raises a RuntimeError if a value that a weight is about to get is in the device memory of another weight."""
        other = self.layer_at(value.untyped_storage().data_ptr())
        if other is not None:
            at = other.parameters.at(int(value.storage_offset()) * value.element_size())
            if at is not None and (other, at) != (layer, index):
                raise RuntimeError(tied(layer.planned.spans[index].name, other.planned.spans[at].name))

    def layer_at(self, address: int) -> StreamedLayer | None:
        """Returns the layer whose weights are in the device storage at an address; None if no layer has this storage."""
        slot = self.residency.slots.by_address.get(address)
        if slot is not None:
            return slot.layer
        return self.residents.layer if address == self.residents.address else None

    # ------------------------------------------------------------------ threads, hooks, refusals

    def close(self) -> None:
        """Ends access at the end of the run. Later uses of device parameters raise an error."""
        self._closed = True

    def at_host(self) -> bool:
        """Returns True if this thread gets host parameters: no step, call or backward runs, or the thread is outside the run.

        False after the run, so that a use of a device parameter raises an error (:meth:`refuse_over`).
        """
        return self.backward.at_host() or not (self._closed or self.threads.own)

    @contextmanager
    def helping(self) -> Iterator[bool]:
        """A context for one operation of a thread outside the run that computes with weights for a graph, or writes them.

        Yields True if the thread takes part in the running forward. Otherwise yields False, and the operation gets host
        parameters.

        Raises:
            LateError: the thread was admitted as a helper, and the forward has ended before the operation.
            RuntimeError: see :meth:`_share`.
        """
        helps = False
        # If several runs take turns, this run may hold its lock while it waits for its turn. So a thread of the other
        # run (``elsewhere``), whose turn it is, must not wait for the lock.
        if not elsewhere(self._scope):
            with held(self.lock):
                helps = self._may_help()
                if helps:
                    self._share()
                    self.threads.begin()
        if not helps:
            yield False
            return
        try:
            yield True
            self.threads.refuse_late()
        finally:
            self.threads.end()

    def _share(self) -> None:
        """Notices every use of a weight until the step ends, because a second thread uses weights.

        Raises:
            RuntimeError: a module of torch in evaluation would leave its fast path, because uses of its weights are noticed.
        """
        if not self.step.shared:
            if any(not module.training for module in self.fast_paths):
                raise RuntimeError(LEAVES_FAST_PATH)
            # Uses of attached layers were not noticed so far. Another thread may still use such a layer. So the layers in use
            # are locked until the step ends.
            for layer in self.residency.used:
                layer.running_calls += 1
            self.step.share(True)

    def copied(self, layer: StreamedLayer, index: int) -> Tensor | None:
        """Copies a weight that may have been written on the device, for a thread that only reads it.

        Returns:
            The copy, an inference tensor, so that writing it raises an error; None if the host's weight has the present values.
        """
        group = layer.parameters
        if not group.written():
            return None
        with held(self.lock):
            if not layer.state.attached:
                return None
            value = layer.rows.completed(index, group.value(index), self.residency.slots.by_address)
            self.device.access(value, Stream.COMPUTE, write=False)
            with torch.inference_mode():
                return value.clone()

    def _refuse_transforms_and_traces(self, visits: Visits) -> None:
        """Raises a RuntimeError if the call is traced (``torch.jit``) or differentiated by ``torch.func``."""
        if torch.jit.is_tracing():
            raise RuntimeError(
                "torch.jit.trace was called during a run: a trace would hold memory through which other layers pass. Trace the "
                "module before or after the run; in loggers, TensorBoardLogger(log_graph=False)."
            )
        stack = interpreter_stack()
        if stack and self._first is not None and any(level.key() in DIFFERENTIATING for level in stack):
            name = (visits[0] if visits else self._first).name
            raise RuntimeError(
                f"torch.func.grad (or vjp, jacrev, jvp) reached the streamed layer {name!r}: these transforms keep weights "
                f"where they cannot be streamed. Use torch.autograd.grad(..., create_graph=True), or keep the layer on "
                f"the device: SuperpipelineStrategy(keep_on_gpu=[{name!r}])."
            )
