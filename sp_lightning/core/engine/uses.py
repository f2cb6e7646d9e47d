"""Uses: a layer is needed. All requests for a layer's weights come here:

- a module is called (:class:`ModuleCall`, :class:`Calls`): its layers are locked and attached before, and released after;
- an operation computes with a stand-in (:meth:`Uses.operation_on`, called by the stand-in's class);
- a batch looks up rows of a table (:meth:`Uses.reading_rows`);
- user code reads or writes weights on the host, or gives them other memory.

A wrong guess of the prefetch costs a fetch and never a result.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sp_lightning.core.device.device import Stream, Wait
from sp_lightning.core.device.own_threads import ONLY_READS
from sp_lightning.core.engine.host_source import tied
from sp_lightning.core.engine.saved_tensors import packs
from sp_lightning.core.messages import WRITTEN_IN_CALL
from sp_lightning.core.torch_compat.around_calls import release, surround
from sp_lightning.core.torch_compat.modes import held, never_compiled
from sp_lightning.core.torch_compat.private import (
    DIFFERENTIATING,
    interpreter_stack,
    top_saved_tensors_hooks,
    trace_only_inlined,
    tree_leaves,
)
from sp_lightning.core.weights.device_parameter import DeviceParameter, hides_stand_ins
from sp_lightning.core.weights.layer import Kind, StreamedLayer
from sp_lightning.core.weights.ring import Staged

if TYPE_CHECKING:
    from sp_lightning.core.engine.engine import Engine

Visits = Sequence[StreamedLayer]
Run = Callable[[str, Any, Any, nn.Module, Any, Any], Any]
"""Runs the call of a unit; see :attr:`~sp_lightning.core.engine.activations.Activations.run`."""


class Calls:
    """Begins and ends the calls of modules that use layers."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        moving = [layer for layer in engine.layers if layer.kind is not Kind.RESIDENTS]
        self._streams = bool(moving)  # False if the module has only residents, which need no packing
        self._casts = any(layer.masters is not None for layer in moving)
        self._first = next((layer for layer in moving if layer.kind is Kind.BLOCK), None)
        self._running = engine.uses.calls

    def enter(self, visits: Visits, inputs: Any) -> Visits:
        """Locks and attaches the layers of a module before its call, and activates the saved-tensor hooks.

        Outside a step the call is a short step of its own: :meth:`leave` ends it.

        Args:
            visits: the layers that the module uses.
            inputs: the arguments of the call.

        Returns:
            The layers for :meth:`leave`: none for a table whose rows are looked up; also the masters if other code may read them.

        Raises:
            RuntimeError: the call is traced or transformed, or the step computes on another stream.
        """
        engine = self.engine
        if visits and visits[0].kind is Kind.TABLE and not hides_stand_ins(inputs):
            visits = ()  # the look-up itself fetches the rows that it needs
        if torch.jit.is_tracing() or interpreter_stack():
            self._refuse_transforms_and_traces(visits)
        # If torch asks other code before the stand-ins, that code may read a master, which has memory only while it is attached.
        if self._casts and hides_stand_ins(inputs):
            visits = (*visits, *(layer.masters for layer in visits if layer.masters is not None))
        step = engine.step
        if visits and (make_room := engine.activations.make_room) is not None:
            make_room(visits, inputs)
        with held(engine.lock):
            outside = self._outside()
            try:
                if outside:
                    step.begin_outside()
                if visits:
                    step.refuse_other_stream(visits[0].name)
                self._activate()
                engine.residents.group.sync_requires_grad()
                engine.residency.begin_call(visits, backward=bool(engine.backward.tasks))
            except BaseException:  # user code may catch the error, so undo everything: no call has begun
                if outside:
                    step.end(writes_follow=True)
                raise
            packs_any = self._streams or engine.activations.packs
            self._running.begin(engine.saved_tensors.hooks if packs_any else None)
            for layer in visits:
                if layer.running_calls == 1:  # this call is the outermost one that uses the layer
                    layer.parameters.count_references()
        return visits

    def _activate(self) -> None:
        """Calls :meth:`Step.activate` if modules hold host parameters or the residents may be out of date, which is seldom."""
        engine = self.engine
        residents = engine.residents
        layer = residents.layer
        if not (engine.swap.on_device and residents.current and layer.update is None) or layer.stale:
            engine.step.activate(in_backward=bool(engine.backward.tasks))

    def _outside(self) -> bool:
        """Returns True if no step, backward or module call runs."""
        return not (self.engine.step.running or self.engine.backward.tasks or self._running.depth)

    def leave(self, visits: Visits, output: Any) -> None:
        """Releases the layers of a module whose call has returned or raised, and prefetches other layers.

        Also adds hooks to the outputs that notice the backward of the call. Ends the short step of a call outside a step.
        """
        engine = self.engine
        with held(engine.lock):
            try:
                if torch.is_grad_enabled() and visits:
                    self._watch(visits, output)
                # The frames of an exception hold the weights as long as the exception is handled. So the layers are
                # released later. This is common: checkpoints end their recompute by an exception.
                engine.residency.end_call(visits, release=sys.exception() is None)  # (4)
            finally:  # releasing a layer copies writes back, which may raise
                self._running.end()
                outside = self._outside()
                if outside:
                    engine.step.end(writes_follow=True)
            if visits and not outside:
                engine.residency.fetch_ahead()

    def _watch(self, visits: Visits, output: Any) -> None:
        """Adds a hook to the outputs of a module call. Autograd calls the hook when the backward of the call begins."""
        pre_backward = self.engine.backward.awaited(self._pre_backward, tuple(visits))
        for tensor in (output,) if isinstance(output, Tensor) else tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(pre_backward)

    def _pre_backward(self, visits: Visits, gradient: Tensor) -> None:
        """Releases layers whose backward is over, and issues the transfer of their gradients.

        Hook on the outputs of a module call: the backward of the module's layers, ``visits``, begins. So the backward of later
        layers is over.
        """
        engine = self.engine
        with held(engine.lock):
            engine.backward.join()
            self._activate()
            engine.residency.pre_backward(visits)
        engine.backward.make_room(visits)

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """A context for the user code of a step. Saved tensors are packed in it, so that the graph holds no slot.

        Afterwards no call of this thread counts as running.
        """
        with self.engine.saved_tensors.hooks() if self._streams else nullcontext():
            try:
                yield
            finally:
                self._running.reset()  # Ctrl-C may have interrupted the end of a call

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


class ModuleCall:
    """Begins and ends each call of one module: before its pre-hooks and after its hooks.

    Args:
        calls: carries out what a call needs.
        module: the module.
        visits: the layers that the module uses.
        in_evaluation: the layers that the module uses in evaluation; None if they are ``visits``.
        unit: the name of the module as a unit of activations; None if it is not a unit.
        run: runs the calls of units; None if units are called like other modules.
    """

    def __init__(
        self,
        calls: Calls,
        module: nn.Module,
        visits: Visits,
        in_evaluation: Visits | None = None,
        unit: str | None = None,
        run: Run | None = None,
    ) -> None:
        self._calls = calls
        self._module = module
        self._visits = visits
        self._in_evaluation = in_evaluation
        self._unit = unit
        self._run = run
        self._rows = next((layer.rows for layer in visits if layer.rows.watches_calls), None)
        surround(module, self)

    def remove(self) -> None:
        """Leaves the module's calls alone from now on."""
        release(self._module, self)

    @trace_only_inlined
    def __call__(self, call: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        visits = self._begin(args, kwargs)
        output = None
        try:
            if self._unit is None or self._run is None:
                output = call(module, *args, **kwargs)
            else:
                output = self._run(self._unit, call, self.again, module, args, kwargs)
            return output
        finally:  # also after Ctrl-C
            self._end(visits, output)

    def again(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the module's forward again in backward, as a call of the module without its hooks."""
        self._calls.engine.backward.join()
        visits = self._begin(args, kwargs)
        output = None
        try:
            output = forward(*args, **kwargs)
            return output
        finally:
            self._end(visits, output)

    @never_compiled  # transfers cannot be part of a compiled graph
    def _begin(self, args: Any, kwargs: Any) -> Visits:
        """Calls :meth:`Calls.enter`. Layers that choose rows by the call's arguments (experts) get the arguments first.

        Raises:
            RuntimeError: a thread outside the run makes the call; or see :meth:`Calls.enter`.
        """
        threads = self._calls.engine.threads
        if threading.get_ident() != threads.main and not threads.own:
            name = repr(self._visits[0].name) if self._visits else type(self._module).__name__
            raise RuntimeError(ONLY_READS.format(what=f"{name} was called"))
        if self._in_evaluation is not None and not self._module.training:
            return self._calls.enter(self._in_evaluation, args)
        if self._rows is None:
            return self._calls.enter(self._visits, args)
        self._rows.begin_call(self._module, args, kwargs)
        try:
            return self._calls.enter(self._visits, (args, kwargs))
        except BaseException:
            self._rows.end_call()
            raise

    @never_compiled
    def _end(self, visits: Visits, output: Any) -> None:
        if self._rows is not None:
            self._rows.end_call()
        self._calls.leave(visits, output)


def listen(
    calls: Calls,
    visits: Mapping[nn.Module, tuple[StreamedLayer, ...]],
    units: Mapping[str, nn.Module] | None = None,
    run: Run | None = None,
) -> list[ModuleCall]:
    """Begins and ends the calls of modules, until the returned objects are removed.

    Args:
        calls: carries out what a call needs.
        visits: by module, the layers that the module uses.
        units: by name, the modules whose calls ``run`` runs.
        run: runs the calls of units; None if units are called like other modules.
    """
    unit_of = {module: name for name, module in (units or {}).items()}
    return [
        ModuleCall(calls, module, used, _in_evaluation(module, visits), unit_of.get(module), run)
        for module, used in visits.items()
    ]


def _in_evaluation(module: nn.Module, visits: Mapping[nn.Module, tuple[StreamedLayer, ...]]) -> Visits | None:
    """Returns the layers that a module uses in evaluation; None if they are the same as in training.

    In evaluation torch's encoders read weights without calling their modules. ``nn.TransformerEncoderLayer`` reads the weights
    of all its submodules if the weights have no ``__torch_function__``. ``nn.TransformerEncoder`` reads the weights of its first
    layer to choose its path.
    """
    read: nn.Module
    if isinstance(module, nn.TransformerEncoder) and len(module.layers):
        read = module.layers[0]
    elif isinstance(module, nn.TransformerEncoderLayer):
        read = module
    else:
        return None
    used = {layer for child in (module, *read.modules()) for layer in visits.get(child, ())}
    return None if used == set(visits[module]) else tuple(sorted(used, key=lambda layer: layer.index))


class RunningCalls:
    """Counts running module calls, and activates the saved-tensor hooks in them.

    Attributes:
        depth: the number of running calls.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._here = _CallsOfThread()

    def begin(self, make_hooks: Callable[[], AbstractContextManager[None]] | None) -> None:
        """Counts a call. If it builds a graph and its thread has no active saved-tensor hooks, activates hooks until it ends.

        In the main thread of a step, :meth:`Calls.user_code` has activated the hooks already. Calls outside a step, in other
        threads, and in forwards that run again in backward build graphs as well.

        Args:
            make_hooks: makes the context of the hooks; None if saved tensors need no packing.
        """
        here = self._here
        self.depth += 1
        here.depth += 1
        if make_hooks is None or here.hooks is not None:
            return
        if torch.is_grad_enabled() and top_saved_tensors_hooks() is None:
            hooks = make_hooks()
            hooks.__enter__()
            here.hooks, here.pushed = hooks, here.depth

    def end(self, number: int = 1) -> None:
        """Counts the end of ``number`` calls of this thread. Removes the hooks if the call that has activated them has ended."""
        here = self._here
        self.depth = max(self.depth - number, 0)
        here.depth = max(here.depth - number, 0)
        if here.hooks is not None and here.depth < here.pushed:
            hooks, here.hooks = here.hooks, None
            if packs():  # otherwise a nested backward that failed has removed them already
                hooks.__exit__(None, None, None)

    def reset(self) -> bool:
        """Counts the end of all calls of this thread. Returns True if the end of a call had not been counted."""
        ended = self._here.depth
        self.end(ended)
        return ended > 0

    def refuse_interrupted(self) -> None:
        """Checks, before a batch, that Ctrl-C has not interrupted the beginning or the end of a call between two steps.

        If a call still counts as running, Ctrl-C has interrupted it. Afterwards no call of this thread counts as running.

        Raises:
            RuntimeError: Ctrl-C has interrupted a call, and user code has caught the KeyboardInterrupt. Modules have held device
                parameters since then, so writes of host weights may be lost.
        """
        if self.reset():
            raise RuntimeError(
                "Ctrl-C came while a call of a module between two steps began or ended, and was caught: what was written to "
                "weights since may be lost. Let the KeyboardInterrupt end the run, and go on from a checkpoint."
            )


class _CallsOfThread(threading.local):
    """The running calls of a thread.

    Attributes:
        depth: the number of these calls.
        hooks: the hooks that one of the calls has activated; None if no call has.
        pushed: the value of ``depth`` in the call that has activated the hooks.
    """

    depth = 0
    hooks: AbstractContextManager[None] | None = None
    pushed = 0


class Uses:
    """Fetches and attaches layers on request. Device parameters call it as ``ParameterGroup.engine``.

    Attributes:
        device: the device.
        hooks: makes the context of the engine's saved-tensor hooks.
        gradient_arrived, gradients_complete: called for each gradient; see :class:`~sp_lightning.core.engine.backward.Backward`.
        calls: the calls of modules that are running.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.device = engine.device
        self.hooks = engine.saved_tensors.hooks
        self.gradient_arrived = engine.backward.gradient_arrived
        self.gradients_complete = engine.backward.complete
        self.calls = RunningCalls()

    # ------------------------------------------------------------------ weights are used outside module calls

    def saves_raw(self) -> bool:
        """Returns True if autograd would now save tensors as they are: the engine's saved-tensor hooks are not active."""
        return torch.is_grad_enabled() and not packs()

    def refuse_over(self, name: str) -> None:
        """Raises an error for the use of a device parameter if the run is over.

        Raises:
            RuntimeError: the run is over.
        """
        if self.engine.closed:
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
            RuntimeError: the run is over; the step computes on another stream; or the running backward has updated a layer
                already.
        """
        engine = self.engine
        name = parameters[0]._of.spans[parameters[0]._index].name
        self.refuse_over(name)
        wanted: set[StreamedLayer] = {parameter._of.layer for parameter in parameters}
        residents = engine.residents.layer in wanted
        layers = sorted(wanted - {engine.residents.layer}, key=lambda layer: layer.index)
        if casts:  # the casts are in the slots of the masters' owners
            layers = [masters.owner for masters in layers]
        with held(engine.lock):
            engine.step.refuse_other_stream(name)
            for layer in layers:
                layer.refuse_updated()
                layer.rows.need(None)  # all rows
            engine.residency.begin_call(layers, backward=bool(engine.backward.tasks))
        try:
            if residents:
                with held(engine.lock):
                    engine.residents.refresh()
                    engine.residents.group.notice_uses(False)  # they are on the device, so the operation may use them
            for layer in layers if torch.is_grad_enabled() else ():
                layer.rows.read_whole()
            if engine.backward.tasks:
                engine.backward.make_room(layers)
            yield
        finally:
            with held(engine.lock):
                self._end_operation(layers, residents=residents)

    def _end_operation(self, layers: Sequence[StreamedLayer], *, residents: bool) -> None:
        """Ends :meth:`operation_on`: copies written residents to the host, and prefetches.

        If the next operation has to be noticed, layers without a running call are released. Otherwise they stay locked for it.

        Args:
            layers: the layers of the operation.
            residents: True if the operation also used residents.
        """
        engine = self.engine
        engine.residency.end_call(layers, release=False)
        if residents and not engine.swap.on_device:
            engine.residents.write_back(noticed=True)
            engine.residents.group.notice_uses(True)
        if self.saves_raw() or not engine.swap.on_device:
            # Afterwards the parameters are stand-ins, so the next operation is noticed. This is necessary if autograd would save
            # the weights' memory itself, or if modules hold host parameters, which user code may write.
            engine.residency.release_unpinned()
        engine.residency.fetch_ahead()

    @contextmanager
    def reading_rows(self, layer: StreamedLayer) -> Iterator[Staged | None]:
        """A context in which a table's weight on the host is current and is not written.

        Yields the weight's bytes, from which rows are gathered. If the whole weight is on the device, yields None, because user
        code may have written the weight on the device.

        Raises:
            RuntimeError: the step computes on another stream, or the running backward has already updated the table.
        """
        engine = self.engine
        with held(engine.lock):
            engine.step.refuse_other_stream(layer.name)
            layer.refuse_updated()
            layer.parameters.sync_requires_grad()
            staged = None
            if layer.slot is None:
                engine.residency.release_exchanged(layer)
                staged = engine.source.stage(layer)
            yield staged

    # ------------------------------------------------------------------ weights are written through .data

    def write_back(self, layer: StreamedLayer) -> None:
        """Waits for a layer's update, and copies weights to the host that were written on the device, or may have been."""
        engine = self.engine
        with held(engine.lock):
            engine.updates.wait(layer, Wait.READ_AFTER_UPDATE)
            engine.writes.write_back(layer)

    def host_is_used(self, layer: StreamedLayer) -> None:
        """Prepares for user code that reads or writes host weights of a layer.

        Copies weights that were written on the device to the host, and waits for transfers that read the host weights.
        """
        engine = self.engine
        with held(engine.lock):
            if engine.swap.on_device and layer.parameters.written():
                engine.step.write_back()
            # Residents are always attached, so their next use would not be noticed otherwise.
            if layer is engine.residents.layer:
                engine.residents.group.notice_uses(True)
            self.device.synchronize(layer.transfer, Wait.UPDATE_AFTER_FETCH)

    def host_was_used(self, layer: StreamedLayer, *, viewed: bool) -> None:
        """Uploads host weights that user code has written, if tensors view the layer's slot.

        Args:
            layer: the layer.
            viewed: True if user code has made a view of a host weight, through which it may write the weight later.

        Raises:
            RuntimeError: a call of the layer runs, and would miss the write.
        """
        engine = self.engine
        with held(engine.lock):
            if layer is engine.residents.layer:
                if viewed:
                    engine.residents.current = False
                elif engine.swap.on_device or self.calls.depth:
                    engine.residents.refresh()
                return
            if viewed and layer in engine.residency.used:
                self._refuse_shown(layer)
            for member in layer.owner.with_masters:
                if not member.stale:
                    continue
                if member in engine.residency.used:
                    engine.residency.renew(member)
                # If a host parameter was given other memory, views of the slot keep the old values, so they are not renewed.
                elif member.views and not member.block.displaced:
                    member.invalidate()
                    engine.residency.renew_views()

    def host_is_shown(self, layer: StreamedLayer) -> None:
        """Prepares for user code that gets the host's memory of a weight. No version shows its writes to that memory.

        The copy on the device is marked as out of date.

        Raises:
            RuntimeError: see :meth:`_refuse_shown`.
        """
        engine = self.engine
        self.host_is_used(layer)
        with held(engine.lock):
            if layer is engine.residents.layer:
                engine.residents.current = False
            elif layer in engine.residency.used and layer.running_calls:
                self._refuse_shown(layer)
            else:
                engine.residency.release_unpinned()
                engine.source.invalidate(
                    [member for member in layer.owner.with_masters if member not in engine.residency.used]
                )

    def _refuse_shown(self, layer: StreamedLayer) -> None:
        """Refuses to give out the host's memory of a layer in use, because the call would miss a write to that memory.

        Raises:
            RuntimeError: modules hold host parameters: user code has called backward in the layer's call.
        """
        # If modules hold device parameters, another thread gets the memory, and only reads it.
        if not self.engine.swap.on_device:
            what = f"A weight of {layer.name!r} was read through .data, .detach() or a view, which may be written,"
            raise RuntimeError(WRITTEN_IN_CALL.format(what=what, layer=layer.name))

    def device_is_used(self, layer: StreamedLayer) -> None:
        """Releases a layer in use if modules hold host parameters, and user code has written them.

        Raises:
            RuntimeError: a call of the layer runs, and would continue with the old weights.
        """
        engine = self.engine
        with held(engine.lock):
            if layer.stale and layer in engine.residency.used and not engine.swap.on_device:
                engine.residency.renew(layer)

    def give(self, layer: StreamedLayer, index: int, value: Tensor) -> None:
        """Carries out ``param.data = value`` for a weight of an attached layer. See :meth:`WriteBack.give`.

        Raises:
            RuntimeError: the value is in the memory of another parameter; or see :meth:`WriteBack.give`.
        """
        with held(self.engine.lock):
            self._refuse_tying(layer, index, value)
            self.engine.writes.give(layer, index, value, again=bool(self.engine.backward.tasks))

    def _refuse_tying(self, layer: StreamedLayer, index: int, value: Tensor) -> None:
        """Raises a RuntimeError if a value that a weight is about to get is in the device memory of another weight."""
        other = self.layer_at(value.untyped_storage().data_ptr())
        if other is not None:
            at = other.parameters.at(int(value.storage_offset()) * value.element_size())
            if at is not None and (other, at) != (layer, index):
                raise RuntimeError(tied(layer.planned.spans[index].name, other.planned.spans[at].name))

    def layer_at(self, address: int) -> StreamedLayer | None:
        """Returns the layer whose weights are in the device storage at an address; None if no layer has this storage."""
        engine = self.engine
        slot = engine.residency.slots.by_address.get(address)
        if slot is not None:
            return slot.layer
        return engine.residents.layer if address == engine.residents.address else None

    # ------------------------------------------------------------------ gradients are used in backward

    @never_compiled  # backward may run, and gradients arrive
    def gradient_is_used(self, layer: StreamedLayer) -> None:
        """Prepares for user code that reads or sets ``param.grad`` of a layer.

        In a hook of backward, makes ``param.grad`` complete as far as backward has come: gradients may be in flight.

        Raises:
            RuntimeError: the running backward has updated the layer already; or there are several devices.
        """
        if self.engine.backward.tasks:
            self.engine.backward.settle()  # may complete the layer's gradients, so that the layer is updated
            layer.refuse_updated("a hook used p.grad of one of its weights")

    # ------------------------------------------------------------------ threads, hooks, refusals

    def at_host(self) -> bool:
        """Returns True if this thread gets host parameters: no step, call or backward runs, or the thread is outside the run.

        False after the run, so that a use of a device parameter raises an error (:meth:`refuse_over`).
        """
        engine = self.engine
        return engine.backward.at_host() or not (engine.closed or engine.threads.own)

    def copied(self, layer: StreamedLayer, index: int) -> Tensor | None:
        """Copies a weight that may have been written on the device, for a thread that only reads it.

        Returns:
            The copy, an inference tensor, so that writing it raises an error; None if the host's weight has the present values.
        """
        group = layer.parameters
        if not group.written():
            return None
        with held(self.engine.lock):
            if not layer.state.attached:
                return None
            value = layer.rows.completed(index, group.value(index), self.engine.residency.slots.by_address)
            self.device.access(value, Stream.COMPUTE, write=False)
            with torch.inference_mode():
                return value.clone()
