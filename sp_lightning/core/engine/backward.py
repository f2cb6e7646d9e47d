"""Backward: autograd's graph tasks, and the gradients that arrive in them.

A *graph task* is one call of autograd's engine. A backward inside a hook or a recomputed forward is a nested graph task.

On an accelerator autograd runs hooks in its own thread, and hooks of CPU tensors in the caller's thread at the same time. If a
hook in one thread raises, user code may catch the error and continue, while the other thread is still in a hook of the failed
backward.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import Tensor
from torch.autograd.graph import GradientEdge

from sp_lightning.core.engine.step import StepKind
from sp_lightning.core.torch_compat.cast_gradient import CastGradient
from sp_lightning.core.torch_compat.modes import held
from sp_lightning.core.torch_compat.patched import WatchesEngine
from sp_lightning.core.torch_compat.private import (
    current_graph_task,
    has_accumulation_hooks,
    queue_callback,
)
from sp_lightning.core.weights.device_parameter import Untouched, tensor_grad
from sp_lightning.core.weights.gradient_roles import refuse_freed
from sp_lightning.core.weights.gradients import Wanted
from sp_lightning.core.weights.layer import StreamedLayer

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
                what = f"A backward within training_step adds to param.grad of {group.spans[index].name!r}"
                refuse_freed(layer.block.parameters[index], what, "Call zero_grad() before this backward")
            if hooked := has_accumulation_hooks(host):
                # Transfers are applied in the order in which they are issued, and the hook finds all earlier gradients.
                engine.gradients.end(last=False)
            complete = engine.gradients.arrived(layer, index, gradient)  # (7)
            engine.note_memory()
            if complete:
                engine.gradients.drain(layer)
        # Outside of the lock, because this runs the user's hooks.
        if hooked:
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
