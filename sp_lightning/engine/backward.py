"""Backward: follows autograd's graph tasks, takes the gradients that arrive in them, and notices their end.

On an accelerator autograd runs hooks in a thread of its own, and those of CPU tensors in the caller's at the same time. One of
them may still be in a hook of a backward that has failed elsewhere, when user code has caught the error and gone on.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

from torch import Tensor

from sp_lightning.engine.step import Part, Step, StepKind
from sp_lightning.layers.device_parameter import Untouched, tensor_grad
from sp_lightning.layers.gradient_sink import Wanted
from sp_lightning.layers.layer import StreamedLayer
from sp_lightning.torch_compat.cast_gradient import CastGradient
from sp_lightning.torch_compat.private import current_graph_task, queue_callback


class PendingCall:
    """A call of a module in forward, whose backward is to come. It is a hook on its outputs, so that their graph holds it.

    Args:
        begins: called whenever backward comes to an output.
        visits: the module's layers.

    Attributes:
        begun: whether it has.
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


class Backward(Part):
    """The graph tasks that are under way.

    Attributes:
        tasks: the identifiers of the graph tasks under way, outermost first.
        on_complete: called in the backward that was announced, for each layer whose gradients are all in ``param.grad``.
        wanted: says whether a step waits for a layer, to update it in that backward; None if none does.
    """

    def __init__(self, below: Part, step: Step) -> None:
        super().__init__(**vars(below))
        self._step = step
        self.tasks: list[int] = []
        self.on_complete: Callable[[StreamedLayer], None] | None = None
        self.wanted: Wanted | None = None
        # Guards the sink, in which several of autograd's threads may be at once. It is taken before the engine's lock, which
        # is not held while ranks wait for each other in the sink, and left before hooks of the user's run.
        self._arrivals = threading.RLock()
        self._failed: set[int] = set()  # graph tasks that have failed
        self._nested = False  # whether a graph task has run inside another one
        self._announced = False  # whether the running backward is that of the loss
        self._accumulates = False  # whether gradients are accumulated; torch.autograd.grad only returns them
        # The weights that gradients have arrived for in nested and manual backwards, with the depths of their graph tasks.
        self._given: list[tuple[int, str]] = []
        self._closed = False
        # Of a step that updates layers in backward: the calls of each layer whose graphs are alive.
        self._awaited: defaultdict[StreamedLayer, WeakSet[PendingCall]] = defaultdict(WeakSet)

    def at_host(self) -> bool:
        """Whether no step, call or backward runs, so that modules hold the host's parameters. Not once the run is over."""
        return not (self._step.running or self._step.on_device or self.tasks or self._closed)

    # ------------------------------------------------------------------ it begins

    def announce(self, loss: Tensor, *, quiet: bool) -> None:
        """Announces the ``backward`` of a loss, at whose end all gradients have to be on the host.

        Args:
            loss: the tensor that ``backward`` is called on.
            quiet: whether nothing can write weights between forward and backward.
        """
        with self.lock:
            self._step.resume()
        if loss.requires_grad:
            loss.register_hook(partial(self._begins, quiet))

    def _begins(self, quiet: bool, gradient: Tensor) -> None:
        """Hook of the loss: the announced backward begins. Copies that may be out of date are given up."""
        self.join()
        self._announced = True
        self._accumulates = True
        self.gradients.expect(None if self.wanted is None else self._wants)
        with self.lock:
            residency = self.residency
            for layer in [layer for layer in residency.used if not layer.running_calls and layer.outdated]:
                residency.release(layer)  # the host's weights were written or given other memory
            self._step.compare_writes()
            if not quiet:
                self._step.invalidate_unused()

    def join(self) -> None:
        """Has autograd call :meth:`_ends` when the present graph task, which may be a nested one, ends.

        Raises:
            RuntimeError: the run is over, or the graph task has failed already.
        """
        task = current_graph_task()
        if task == -1 or task in self.tasks:
            return
        with self.lock:
            if task in self.tasks:
                return
            if self._closed:
                raise RuntimeError(
                    "backward was called on a graph of a run that is over: its weights are not on the device any more. "
                    "Call it before trainer.fit (validate, test, predict) returns."
                )
            if task in self._failed:
                # Usually this is not seen: of a graph task autograd tells the first error alone.
                raise RuntimeError(
                    "A backward that ran at the same time in another thread has failed, and this one was given up with it: its "
                    "gradients would be incomplete. Call backward in one thread at a time."
                )
            if not self.tasks:
                if not self.threads.helps:  # it computes gradients within its help
                    self.threads.end_forward()
                self._step.compute_on_host(True)
            self.tasks.append(task)
            self._nested = self._nested or len(self.tasks) > 1
        queue_callback(partial(self._ends, task))

    # ------------------------------------------------------------------ gradients arrive

    def gradient_arrived(self, layer: StreamedLayer, index: int, parameter: Tensor) -> None:
        """Takes a gradient that autograd has put on a device parameter, and sends it to the host.

        Raises:
            RuntimeError: the running backward has updated the layer already, or the gradient has a graph of its own.
        """
        with Untouched():  # autograd has put it on the device parameter itself
            gradient = tensor_grad.__get__(parameter)
            tensor_grad.__set__(parameter, None)
        group = layer.parameters
        host = group.hosts[index]
        # The user may have frozen the host's parameter since the forward. Once it has arrived, a gradient counts as one that
        # is in param.grad already, whether its parameter is frozen later or not.
        if gradient is None or not host.requires_grad:
            return
        of_cast = type(gradient) is CastGradient
        if not of_cast and gradient.requires_grad:
            raise RuntimeError(
                f"The gradient of {group.spans[index].name!r} has a graph of its own (backward(create_graph=True)); it would be "
                "lost on the way to the host. Use torch.autograd.grad(loss, parameters, create_graph=True), which keeps it."
            )
        if gradient.dtype is not host.dtype:
            # param.data = other: the host's parameter takes the other dtype before the gradient
            self.writes.take_back(layer)
        if of_cast:
            gradient = gradient.inner_tensor
        with self._arrivals:
            if current_graph_task() not in self.tasks:
                self.join()
            self._accumulates = True
            if layer.owner.updated_early:  # nearly never; this comes for each gradient
                layer.refuse_updated("another gradient arrived for it")
            if len(self.tasks) > 1 or not self._announced:
                self._given.append((self.tasks.index(current_graph_task()), group.spans[index].name))
            complete = self.gradients.arrived(layer, index, gradient)  # (7)
            self.noted()
            if complete:
                self.gradients.drain(layer)
        if complete:
            self.gradients.land()

    def make_room(self, layers: Sequence[StreamedLayer]) -> None:
        """Sends off what is left of other layers' gradients, because the backward of ``layers`` begins."""
        if self.gradients.arriving:
            with self._arrivals:
                self.gradients.make_room(layers)
            self.gradients.land()

    def given_by_nested(self) -> Callable[[], str | None]:
        """Looks at backwards that begin from now on inside of what runs now, a forward or a forward that runs again.

        Returns:
            A function that names a weight to which such a backward has given a gradient; None if there is none.
        """
        depth, before = len(self.tasks), len(self._given)
        return lambda: next((name for at, name in self._given[before:] if at >= depth), None)

    def complete(self, layer: StreamedLayer) -> None:
        """Tells an optimizer's step that all gradients of a layer are in ``param.grad``."""
        # Nested backwards (a reentrant checkpoint's) may each give the same layer gradients, so none is the last.
        if self.on_complete is not None and self._announced and not self._nested and not self._awaits(layer):
            self.on_complete(layer)

    def _wants(self, layer: StreamedLayer) -> bool:
        """Whether :meth:`complete` would begin a layer's update now."""
        return self.wanted is not None and not self._nested and not self._awaits(layer) and self.wanted(layer)

    def awaited(
        self, begins: Callable[[Any, Tensor], None], visits: Sequence[StreamedLayer]
    ) -> Callable[[Tensor], None]:
        """A hook for the outputs of a call of a module, which calls ``begins`` with the module's layers and a gradient.

        While a step updates layers in backward, no layer is updated before the backward of all its calls has begun. A layer's
        gradients may be complete before: two adapters of frozen weights, for example, may be used by a forward each.
        """
        if self.wanted is None or self.tasks:
            return partial(begins, visits)
        call = PendingCall(begins, visits)
        for layer in visits:
            self._awaited[layer.owner].add(call)
        return call

    def _awaits(self, layer: StreamedLayer) -> bool:
        """Whether the backward of a call of a layer has not begun."""
        return any(not call.begun for call in self._awaited.get(layer.owner, ()))

    # ------------------------------------------------------------------ it ends

    def abandon(self) -> None:
        """Drops a backward that failed, with the gradients that are on their way."""
        self.tasks.clear()
        self._given.clear()
        self._awaited.clear()
        self._nested = self._announced = self._accumulates = False
        self.updates.end_early()
        self.gradients.drop()

    def close(self) -> None:
        """The run is over."""
        self._closed = True

    def failed(self, before: Sequence[int]) -> None:
        """A call of autograd's engine has raised. That ends its graph tasks as well, in the thread that goes on now.

        Gradients that had arrived by then are in ``param.grad`` afterwards, as after any backward that fails.
        """
        with self._arrivals:
            given_up = [task for task in self.tasks if task not in before and task != current_graph_task()]
            self._failed.update(given_up)
        for task in given_up[:1]:  # the others are inside of it
            self._ends(task, well=False)

    def _ends(self, task: int, *, well: bool = True) -> None:
        """Brings all gradients to the host as a graph task ends, and ends the backward with the outermost one."""
        with self._arrivals, self.lock:
            if self._closed or task not in self.tasks:
                return
            self.tasks = self.tasks[: self.tasks.index(task)]
            self.residency.release_unpinned()
        try:
            with self._arrivals:
                self.gradients.end(last=not self.tasks)
            if well:  # otherwise there is an error already
                self.activations.check(everything=True)
            self.gradients.land(everything=True)
        except BaseException:
            with self._arrivals:
                self.gradients.drop()  # a user's hook has raised: plain autograd would not have computed the other gradients
            raise
        finally:
            if not self.tasks:
                self._outermost_has_ended(well)

    def _outermost_has_ended(self, well: bool) -> None:
        step = self._step
        with self.lock:
            self.source.synchronize()
            self.activations.flush()
            accumulated, self._accumulates = self._accumulates, False
            self._nested = self._announced = False
            for layer in self.layers:
                layer.rows.sparse_on_device = False  # in case an earlier backward has failed
            if not step.running or (accumulated and step.ends_with_backward):
                step.end(compare=well)  # otherwise there is an error already
            elif accumulated and step.kind is StepKind.MANUAL:
                step.pause()
            else:
                step.compute_on_host(False)
