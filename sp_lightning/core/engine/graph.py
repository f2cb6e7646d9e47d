"""The graph: autograd's graph tasks, the gradients that arrive in them, and the tensors that autograd saves for them.

A *graph task* is one call of autograd's engine. A backward inside a hook or a recomputed forward is a nested graph task.

On an accelerator autograd runs hooks in its own thread, and hooks of CPU tensors in the caller's thread at the same time. If a
hook in one thread raises, user code may catch the error and continue, while the other thread is still in a hook of the failed
backward.

**Saved tensors.** A tensor in a slot is packed as its place in the slot, not as its memory.

So a graph holds no slot, and the slot can be overwritten. Unpacking fetches the layer again if necessary. If saved-tensor hooks
are active, autograd does not check the versions of saved tensors, so the hooks of this file check them, for weights and for all
others.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from sp_lightning.core.device.lease import SavedView, SavedViews
from sp_lightning.core.engine.saved_objects import like_plain
from sp_lightning.core.engine.step import StepKind
from sp_lightning.core.layers.casts import SavedValues
from sp_lightning.core.layers.device_parameter import DeviceParameter, Untouched, tensor_grad
from sp_lightning.core.layers.freed_gradient import refuse_addition
from sp_lightning.core.layers.gradients import Wanted
from sp_lightning.core.layers.layer import Kind, Rows, StreamedLayer
from sp_lightning.core.model.wrapped import builder, parts
from sp_lightning.core.torch_compat.cast_gradient import CastGradient
from sp_lightning.core.torch_compat.modes import held, never_compiled
from sp_lightning.core.torch_compat.patched import WatchesEngine
from sp_lightning.core.torch_compat.private import (
    base_of,
    current_graph_task,
    has_accumulation_hooks,
    is_traceable_wrapper_subclass,
    queue_callback,
    top_saved_tensors_hooks,
)

if TYPE_CHECKING:
    from sp_lightning.core.engine.engine import Engine


class PendingCall:
    """A module call whose backward has not begun. It is a hook on the call's outputs, so their graph keeps it alive.

    Args:
        begins: called with the layers and the gradient whenever backward reaches an output.
        visits: the module's layers.

    Attributes:
        begun: True if backward has reached an output.
    """

    def __init__(
        self, begins: Callable[[Sequence[StreamedLayer], Tensor], None], visits: Sequence[StreamedLayer]
    ) -> None:
        self._begins = begins
        self._visits = visits
        self.begun = False

    def __call__(self, gradient: Tensor) -> None:
        self.begun = True
        self._begins(self._visits, gradient)


class Backward(WatchesEngine):
    """The running graph tasks.

    Attributes:
        tasks: the identifiers of the running graph tasks, outermost first.
        layer_done: called in the announced backward for each layer whose gradients are all in ``param.grad``.
        may_update: returns True if a step waits for a layer, to update it in the announced backward; None if no step waits.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tasks: list[int] = []
        self.layer_done: Callable[[StreamedLayer], None] | None = None
        self.may_update: Wanted | None = None
        # Guards the gradient sink, which several of autograd's threads may use at once. It is taken before the engine's lock,
        # because ranks may wait for each other in the sink, and must not hold the engine's lock then. It is released
        # before hooks of the user run.
        self._arrivals = threading.RLock()
        self._failed: set[int] = set()  # graph tasks that have failed
        self._nested = False  # True if a graph task has run inside another one
        self._announced = False  # True if the running backward is the one of the loss
        self._accumulates = False  # True if gradients are accumulated; torch.autograd.grad only returns them
        # For each gradient of a nested or manual backward: the depth of its graph task, and the name of its weight.
        self._given: list[tuple[int, str]] = []
        # For a step that updates layers in backward: by layer, the calls in forward whose graphs are alive.
        self._awaited: defaultdict[StreamedLayer, WeakSet[PendingCall]] = defaultdict(WeakSet)

    def at_host(self) -> bool:
        """Returns True if no step, call or backward runs, so that modules hold host parameters. False after the run."""
        engine = self.engine
        return not (engine.step.running or engine.swap.on_device or self.tasks or engine.closed)

    # ------------------------------------------------------------------ it begins

    def announce(self, loss: Tensor, *, quiet: bool) -> None:
        """Announces the ``backward`` of a loss, at whose end all gradients have to be on the host.

        If modules hold host parameters in the step, they get device parameters again.

        Args:
            loss: the tensor that ``backward`` is called on.
            quiet: True if no code can write weights between forward and backward.
        """
        with self.engine.lock:
            self.engine.step.resume()
        if loss.requires_grad:
            loss.register_hook(partial(self._begins, quiet))

    def _begins(self, quiet: bool, gradient: Tensor) -> None:
        """Hook of the loss: the announced backward begins. Drops copies of layers that may be out of date.

        User code has run since the forward, for example hooks before backward. ``quiet``: see :meth:`announce`.
        """
        engine = self.engine
        self.join()
        self._announced = True
        self._accumulates = True
        engine.gradients.expect(None if self.may_update is None else self._updates_now)
        with engine.lock:
            residency = engine.residency
            for layer in [layer for layer in residency.used if not layer.running_calls and layer.stale]:
                residency.release(layer)  # the host's weights were written or given other memory
            if not quiet:
                engine.step.invalidate_unused()

    def nests(self) -> None:
        """Called when a graph task is about to run inside the present one: in reentrant checkpoints, for example.

        The present one may not have entered the engine yet. The backward, and with it the step, would then end with the inner
        graph task, and the outer one would find host parameters.
        """
        if self.engine.step.running:
            self.join()

    def in_graph(self, edge: GradientEdge) -> GradientEdge:
        """Returns the edge that a graph of the step has in place of an edge that user code has taken before the step."""
        return self.engine.swap.in_graph(edge)

    def join(self) -> None:
        """Registers the present graph task, if it is new. Autograd will call :meth:`_ends` when the task ends.

        Called at each entry from autograd into the engine, because the first one may be a hook, a gradient or a saved tensor.

        Raises:
            RuntimeError: the run is over, or the graph task has failed already.
        """
        engine = self.engine
        task = current_graph_task()
        if task == -1 or task in self.tasks:
            return
        with engine.lock:
            if task in self.tasks:  # another of autograd's threads was faster
                return
            if engine.closed:
                raise RuntimeError(
                    "backward was called on a graph of a run that is over: its weights are not on the GPU any more. "
                    "Call it before trainer.fit (validate, test, predict) returns, or before the stream ends."
                )
            if task in self._failed:
                # Usually user code does not get this error, because autograd raises only the first error of a graph task.
                raise RuntimeError(
                    "A backward that ran at the same time in another thread has failed, and this one was given up with it: its "
                    "gradients would be incomplete. Call backward in one thread at a time."
                )
            if not self.tasks:
                engine.step.compute_on_host(True)
                engine.note_memory(staying=True)
            self.tasks.append(task)
            self._nested = self._nested or len(self.tasks) > 1
        queue_callback(partial(self._ends, task))

    # ------------------------------------------------------------------ gradients arrive

    def gradient_arrived(self, layer: StreamedLayer, index: int, parameter: Tensor) -> None:
        """Takes a gradient from a device parameter, and passes it to the gradient sink, which copies it to the host.

        Hook of each device parameter, after autograd has set its ``.grad``.

        Raises:
            RuntimeError: the running backward has updated the layer already, or the gradient has a graph of its own.
        """
        engine = self.engine
        with Untouched():  # reads the attribute of the device parameter itself, where autograd has put the gradient
            gradient = tensor_grad.__get__(parameter)
            tensor_grad.__set__(parameter, None)
        group = layer.parameters
        host = group.hosts[index]
        # The user may have frozen the host parameter since the forward. Its gradient is dropped, as autograd does on plain
        # Lightning. A parameter that is frozen after this moment keeps the gradient.
        if gradient is None or not host.requires_grad:
            return
        of_cast = type(gradient) is CastGradient
        if not of_cast and gradient.requires_grad:
            raise RuntimeError(
                f"The gradient of {group.spans[index].name!r} has a graph of its own (backward(create_graph=True)); it would be "
                "lost on the way to the CPU. Use torch.autograd.grad(loss, parameters, create_graph=True), which keeps it."
            )
        if gradient.dtype is not host.dtype:
            # User code has given the weight another dtype (param.data = other). The host parameter must get it before
            # the gradient.
            with held(engine.lock):
                engine.writes.write_back(layer)
        if of_cast:
            gradient = gradient.inner_tensor
        with self._arrivals:
            if current_graph_task() not in self.tasks:
                self.join()
            self._accumulates = True
            if layer.owner.updated_early:  # tested here, so that the common case has no call
                layer.refuse_updated("another gradient arrived for it")
            if len(self.tasks) > 1 or not self._announced:
                refuse_addition(layer.block.parameters[index], group.spans[index].name)
                # See given_by_nested().
                self._given.append((self.tasks.index(current_graph_task()), group.spans[index].name))
            complete = engine.gradients.arrived(layer, index, gradient)  # (7)
            engine.note_memory()
            if complete:
                engine.gradients.drain(layer)
        # Outside of the lock, because this runs the user's hooks.
        if has_accumulation_hooks(host):
            self.settle()  # a hook of an accumulated gradient runs before backward goes on, and finds no later gradients
        elif complete:
            engine.gradients.apply()

    def make_room(self, layers: Sequence[StreamedLayer]) -> None:
        """Issues the transfer of other layers' gradients, because the backward of ``layers`` begins.

        So a layer's gradients are transferred even if some of its parameters get no gradient in this backward.
        """
        engine = self.engine
        if engine.gradients.arriving:
            with self._arrivals:
                engine.gradients.make_room(layers)
            engine.gradients.apply()

    def settle(self) -> None:
        """Makes ``param.grad`` complete as far as backward has come, because a hook of it uses ``param.grad``."""
        self.engine.gradients.settle(self._arrivals)

    def given_by_nested(self) -> Callable[[], str | None]:
        """Records backwards that begin from now on inside the running forward, or inside the forward that runs again.

        The capability ``activations`` uses this to find forwards that must not run twice: the gradients would be added twice.

        Returns:
            A function that returns the name of a weight for which one of these backwards has computed a gradient; None if they
            have computed no gradient.
        """
        depth, before = len(self.tasks), len(self._given)
        return lambda: next((name for at, name in self._given[before:] if at >= depth), None)

    def complete(self, layer: StreamedLayer) -> None:
        """Called when all gradients of a layer are in ``param.grad``. Calls ``layer_done`` if these are the last gradients."""
        # Nested backwards (of reentrant checkpoints) may each give the same layer gradients, so the last ones are not known.
        if self.layer_done is not None and self._announced and not self._nested and not self._incomplete(layer):
            self.layer_done(layer)

    def _updates_now(self, layer: StreamedLayer) -> bool:
        """Returns True if :meth:`complete` would begin a layer's update now."""
        return (
            self.may_update is not None and not self._nested and not self._incomplete(layer) and self.may_update(layer)
        )

    def awaited(
        self, begins: Callable[[Any, Tensor], None], visits: Sequence[StreamedLayer]
    ) -> Callable[[Tensor], None]:
        """Returns a hook for the outputs of a module call, which calls ``begins`` with the module's layers and a gradient.

        Called after each module call that builds a graph.

        If a step updates layers in backward, the hook is a :class:`PendingCall`: no layer is updated before the backward of all
        its calls has begun. Complete gradients do not suffice. For example, a layer may have frozen weights with two adapters,
        each of which is used by one of two forwards.
        """
        if self.may_update is None or self.tasks:
            return partial(begins, visits)
        call = PendingCall(begins, visits)
        for layer in visits:
            self._awaited[layer.owner].add(call)
        return call

    def _incomplete(self, layer: StreamedLayer) -> bool:
        """Returns True if the backward of a call of a layer has not begun."""
        return any(not call.begun for call in self._awaited.get(layer.owner, ()))

    # ------------------------------------------------------------------ it ends

    def abandon(self) -> None:
        """Drops a backward that failed, with its gradients in flight. Called after an error, and when a step begins."""
        self.tasks.clear()
        self._given.clear()
        self._awaited.clear()
        self._nested = self._announced = self._accumulates = False
        self.engine.updates.end_early()
        self.engine.gradients.drop()

    def failed(self, before: Sequence[int]) -> None:
        """Called after a call of autograd's engine has raised, in the thread of that call.

        Ends the graph tasks that the failed call has begun. Gradients that had arrived before are in ``param.grad`` afterwards,
        as after any backward that fails.

        Args:
            before: the graph tasks that ran before the call.
        """
        with self._arrivals:
            given_up = [task for task in self.tasks if task not in before and task != current_graph_task()]
            self._failed.update(given_up)
        for task in given_up[:1]:  # the other tasks are nested in it, and end with it
            self._ends(task, well=False)

    def _ends(self, task: int, *, well: bool = True) -> None:
        """Called when a graph task ends. Applies all gradients. If the task is the outermost one, ends the backward.

        Args:
            task: the graph task.
            well: False if the backward has failed.
        """
        engine = self.engine
        with self._arrivals, engine.lock:
            if engine.closed or task not in self.tasks:
                return
            self.tasks = self.tasks[: self.tasks.index(task)]
            engine.residency.release_unpinned()
        try:
            with self._arrivals:
                if not self.tasks:
                    engine.note_memory(staying=True)  # before the last transfers free the gradients in flight
                engine.gradients.end(last=not self.tasks)
            if well and (check := engine.activations.check) is not None:  # otherwise an error is being raised already
                check(everything=True)
            engine.gradients.apply(everything=True)
        except BaseException:
            with self._arrivals:
                # A user's hook has raised. Plain autograd would not have computed the other gradients.
                engine.gradients.drop()
            raise
        finally:
            if not self.tasks:
                self._outermost_has_ended(well)

    def _outermost_has_ended(self, well: bool) -> None:
        """Ends the backward. There are three outcomes for the step:

        - It ends, and modules hold host parameters: after the backward of a loss in automatic optimization. A backward outside
          of any step ends in the same way.
        - It pauses: after a backward of manual optimization. Modules hold host parameters, because user code may read gradients
          and write weights. The next module call, or the end of an optimizer step, continues the step.
        - It goes on, with device parameters: after ``torch.autograd.grad`` within the step, which accumulates no gradients.

        Args:
            well: False if the backward has failed.
        """
        engine = self.engine
        step = engine.step
        with engine.lock:
            engine.source.synchronize()
            engine.activations.flush()
            accumulated, self._accumulates = self._accumulates, False
            self._nested = self._announced = False
            for layer in engine.layers:
                layer.rows.sparse_on_device = False  # in case an earlier backward has failed
            if not step.running or (accumulated and step.ends_with_backward):
                step.end(failed=not well)
            elif accumulated and step.kind is StepKind.MANUAL:
                step.pause()
            else:
                step.compute_on_host(False)


# ---------------------------------------------------------------------- saved tensors


class _Packed(tuple[StreamedLayer, int | None, int, SavedView | None, SavedValues | None, Rows]):
    """A saved tensor that is in a slot: its place there. Fields:

    - layer.
    - which: the index of the weight that the tensor is, or is a view of; None for a cast, and for a view of ``.data``.
    - version: the version of that weight when the tensor was saved; -1 for a cast.
    - place: its place in the slot; None for a weight itself.
    - values: for a view of a weight, or a cast, its :class:`SavedValues`. None for a weight itself. If a weight is given other
      memory (``param.data = other``), plain autograd unpacks the new values of a saved weight, and the old values of a saved
      view.
    - rows: the rows of the layer that the tensor needs; None for all rows.
    """

    __slots__ = ()


_Kept = tuple[Tensor, int, Any]
"""Any other saved tensor, its version, and the object that counts its storage as long as the graph holds it.

A leaf is kept as the same object, as autograd keeps it, so an assignment to its ``.data`` has an effect on the graph. Other
tensors are detached: a node that kept its own output would keep itself alive, and would never be freed.

This is a plain tuple, and :class:`_Packed` a tuple without a constructor of its own: there are many of them, and a constructor in
Python would be a call for each."""


class _Outer(NamedTuple):
    """A saved tensor that other hooks have packed, which were active before the hooks of this file."""

    packed: Any
    unpack: Callable[[Any], Tensor]


class _Wrapped(NamedTuple):
    """A saved tensor subclass whose plain tensors are in a slot, for example a quantised weight or a row of it."""

    parts: Sequence[Any]
    build: Callable[[Iterator[Tensor]], Tensor]


_our_packs: WeakSet[Callable[..., Any]] = WeakSet()


def packs() -> bool:
    """Returns True if the hooks of this file pack saved tensors now: no hooks of a user or a checkpoint are above them."""
    top = top_saved_tensors_hooks()
    return top is not None and top[0] in _our_packs


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


class SavedTensors:
    """Makes the saved-tensor hooks of the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._views: defaultdict[int, SavedViews] = defaultdict(SavedViews)  # by the layers' layout

    def hooks(self) -> AbstractContextManager[None]:
        """A context with the hooks. Tensors that are not in a slot are passed to the hooks that were active before, if any."""
        engine = self.engine
        outer = top_saved_tensors_hooks()
        slots, store = engine.residency.slots.by_address, engine.activations.store
        hold = None if engine.held is None else engine.held.hold

        def pack(tensor: Tensor) -> Any:
            kind = type(tensor)
            if kind is not Tensor:
                if issubclass(kind, DeviceParameter):
                    return self._pack_weight(tensor)
                if is_traceable_wrapper_subclass(tensor):
                    plain = [part for _, part in parts("", tensor)]
                    if any(self._in_slot(part) for part in plain):
                        return _Wrapped([pack(part) for part in plain], builder(tensor))
            try:
                address = tensor.untyped_storage().data_ptr()
            except (RuntimeError, NotImplementedError):  # sparse, fake and transformed tensors have no memory
                address = 0
            slot = slots.get(address)
            # A place in a slot does not record the conjugate and negative bits, so a view with such a bit is not packed as one.
            if slot is not None and slot.layer is not None and not (tensor.is_conj() or tensor.is_neg()):
                return self._pack(slot.layer, tensor)
            if outer is not None:
                return _Outer(outer[0](tensor), outer[1])
            if store is not None and address and (saved := store(tensor)) is not None:
                return saved
            held = None if hold is None else hold(tensor)
            return (
                tensor if tensor.is_leaf and not _is_of_frozen_weight(tensor) else tensor.detach(),
                tensor._version,
                held,
            )

        _our_packs.add(pack)
        if outer is None:
            like_plain.add(pack)
        return saved_tensors_hooks(pack, self._unpack)

    def _in_slot(self, tensor: Tensor) -> bool:
        """Returns True if the memory of a plain tensor is in a slot."""
        try:
            return tensor.untyped_storage().data_ptr() in self.engine.residency.slots.by_address
        except (RuntimeError, NotImplementedError):
            return False

    @never_compiled  # dynamo would read versions only once, when it traces the graph (torch 2.10)
    def _pack(self, layer: StreamedLayer, tensor: Tensor) -> _Packed:
        """Packs a tensor whose memory is in a layer's slot: a view of a weight, or a cast."""
        offset = int(tensor.storage_offset()) * tensor.element_size()
        group = layer.parameters
        index = which = group.at(offset)
        if which is None:  # a cast
            version, values = -1, layer.casts.saved_values(offset)
        else:
            version, values = group.counters[which]._version, group.present_values[which]
            if tensor._version != version:  # a view of .data, for example, whose writes autograd does not check
                which = None
        rows = None if layer.whole else layer.rows.saved_rows(index, tensor, offset)
        return _Packed((layer, which, version, self._views[layer.layout].find(tensor, offset), values, rows))

    @never_compiled
    def _pack_weight(self, weight: Any) -> _Packed | _Kept:
        """Packs a device parameter itself, without reading its memory, because reading a stand-in would fetch the layer."""
        group, index = weight._of, weight._index
        if group.layer.kind is Kind.RESIDENTS:  # residents are always on the device
            return weight, weight._version, None
        version = group.version_once_fetched(index)
        # After param.data = other with another dtype, for which the slot has no place.
        if weight.dtype is not group.spans[index].dtype:
            return weight.detach(), weight._version, None
        return _Packed((group.layer, index, version, None, None, group.layer.rows.saved_rows(index)))

    def _unpack(self, packed: Any) -> Tensor:
        """Returns the tensor that was saved, for backward. Checks that it was not modified in place since, as autograd does."""
        if type(packed) is tuple:  # most saved tensors are of this kind
            tensor, expected, _ = packed
            version = tensor._version
        elif type(packed) is _Packed:
            tensor, expected, version = self._unpack_from_slot(packed)
        elif type(packed) is _Outer:
            return packed.unpack(packed.packed)
        elif type(packed) is _Wrapped:
            return packed.build(iter([self._unpack(part) for part in packed.parts]))
        else:  # a SavedActivation
            tensor, expected, version = packed.load()
        if version != expected:
            raise RuntimeError(_modified(tensor, expected, version))
        return tensor

    def _unpack_from_slot(self, packed: _Packed) -> tuple[Tensor, int, int]:
        """Returns a tensor of a slot, its weight's version when the tensor was saved, and the weight's version now.

        If the slot does not have the saved values any more, the tensor is the copy that was kept of them.
        """
        engine = self.engine
        layer, which, expected, place, values, rows = packed
        group = layer.parameters
        guard = layer.guard
        if guard is not None and which is not None and (guard.exposed or guard.retyped):
            # The weight may have another dtype now. A frozen weight's backward can use the old values, if they are kept. A
            # trained weight's update would fail.
            has_old_values = values is not None and values.copy is not None
            if not has_old_values or layer.block.parameters[which].requires_grad:
                group.refuse_exchanged(which)
        tensor = self._bring(layer, which, place, rows)
        # Includes writes of the host's weight: a hook may have written the weight while the layer is in use.
        version = expected if which is None else group.version_once_fetched(which)
        # If the values in the slot are not the saved ones any more, the kept copy is used. Fetching the layer, above, may have
        # made this copy.
        if values is not None and values.copy is not None:
            assert place is not None
            with held(engine.lock):
                engine.writes.left.compare()
            tensor = values.recall(engine.device, place)
        return tensor, expected, version

    def _bring(self, layer: StreamedLayer, which: int | None, place: SavedView | None, rows: Rows) -> Tensor:
        """Returns a saved tensor of a layer on the device. Locks the layer, and fetches it first if necessary.

        If the layer was not locked, its backward begins: the transfer of other layers' gradients is issued.

        Args:
            layer: the layer.
            which: the index of the weight; needed if ``place`` is None.
            place: the place in the slot; None for the weight itself.
            rows: the rows that the tensor needs.
        """
        engine = self.engine
        backward, residency = engine.backward, engine.residency
        with held(engine.lock, leaves_inference_mode=True):
            if current_graph_task() not in backward.tasks:
                backward.join()
            if not layer.whole:
                layer.rows.need(rows)
            slot = residency.used.get(layer)
            was_unused = slot is None
            if slot is None or not layer.rows.complete:
                slot = residency.unpack(layer)
            if place is not None:
                saved = slot.lease.saved(place)  # (6)
            else:
                assert which is not None
                if layer.state.attached:  # the weight may have memory outside the slot
                    saved = layer.parameters.value(which)
                else:
                    saved = slot.lease.views(layer.layout, layer.spans)[which].detach()
        if was_unused:  # the backward of this layer begins
            backward.make_room((layer,))
        return saved


def _is_of_frozen_weight(leaf: Tensor) -> bool:
    """Returns True if a leaf is a view of a device parameter outside its slot. A graph with the leaf would hold the parameter."""
    return issubclass(type(base_of(leaf)), DeviceParameter)


def _modified(tensor: Tensor, expected: int, version: int) -> str:
    """Returns autograd's own message about a saved tensor that was modified in place."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {version}; expected version {expected} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
