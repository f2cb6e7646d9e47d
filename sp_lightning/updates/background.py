"""Updates layers in the background, while the next forward or the rest of backward runs.

User code sees no difference. Until a layer's update is done, its parameters have a class that waits before anything
reads or writes them, and a fetch of the layer waits as well (see "Note: roles of parameters" in ``updates/__init__``).

After an update of a layer that stays on the GPU, the host's values are out of date. Its parameters then have a class that lands
the layer before anything reads or writes them: it downloads weights and state.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.device.own_threads import OwnThreads
from sp_lightning.layers.layer import StreamedLayer
from sp_lightning.layers.roles import ParameterRole, leave, take, writes_in_place
from sp_lightning.torch_compat.metadata import UNCHANGED_BY_UPDATES
from sp_lightning.torch_compat.private import tree_leaves
from sp_lightning.updates.layer_stepper import LayerStepper
from sp_lightning.updates.step_context import awaiting_steps


class BackgroundUpdates:
    """The updates that are under way.

    Args:
        layers: all layers.
        device: runs work in its background thread, and waits for it.

    Attributes:
        torn: the reason if only some layers have the weights of the last step; None if all have them.
        urgency: the order of updates, if it need not be the order in which they are submitted: the lower, the sooner.
        threads: the threads that belong to the run. Other threads wait for an update, and leave what follows it to the run.
        stepper: steps layers on the GPU, and lands those that stay there.
        landed_in_a_row: the number of steps in a row, up to now, in which user code has landed a layer that stays.
    """

    def __init__(self, layers: Sequence[StreamedLayer], device: Device) -> None:
        self._layers = layers
        self._layer_of = {id(p): layer.owner for layer in layers for p in layer.block.parameters}
        self._device = device
        # The layers whose updates are under way, in the order of the background, and what is called after each.
        self._under_way: dict[StreamedLayer, Callable[[], None] | None] = {}
        self._lock = threading.RLock()  # several threads may wait; the background never takes the lock
        self._failure: BaseException | None = None
        self._afterwards: list[Callable[[], None]] = []
        self._role = type("PendingUpdate", (_PendingUpdate,), {"_updates": self})
        self.stepper = LayerStepper()
        self.landed_in_a_row = 0
        self._has_landed = False  # since the present step began
        self.torn: str | None = None
        self.urgency: Mapping[StreamedLayer, int] = {}
        self._updated: list[str] = []  # the layers that the present step has updated, by name
        self.threads = OwnThreads()
        _all.add(self)

    @property
    def partially_updated(self) -> str | None:
        """The reason if only some layers have the weights of the last step, and their names; None if all have them."""
        if self.torn is None:
            return None
        names, others = ", ".join(map(repr, self._updated[:_NAMES])), len(self._updated) - _NAMES
        return f"{self.torn}. Updated: {names or 'no layer'}{f' and {others} others' if others > 0 else ''}"

    def begin(self) -> None:
        """Called when a step begins, before its first update."""
        self._updated = []
        self.landed_in_a_row = self.landed_in_a_row + 1 if self._has_landed else 0
        self._has_landed = False

    def submit(self, layer: StreamedLayer, work: Callable[[], None], then: Callable[[], None] | None = None) -> None:
        """Gives the update of a layer to the background thread.

        Args:
            layer: the layer. Its parameters have a waiting class until the update is done.
            work: the update. It must not set ``param.grad``, because torch reads that in another thread without holding
                a reference to it.
            then: called after the work, in the thread that has waited for it.
        """
        blocks, updated = [member.block for member in layer.family], self._updated

        def update() -> None:
            try:
                if self._failure is None:
                    layer.use_gradients()
                    for block in blocks:
                        block.memory.use()
                        self._device.access(block.weights, Stream.UPDATE, write=True)
                    begun = self._device.mark(Stream.UPDATE)
                    _here.updates = True
                    with torch.DisableTorchFunctionSubclass(), torch.no_grad():
                        work()
                    updated.append(layer.name)
                    self._device.note("update", layer.index, begun, Stream.UPDATE, blocks[0].planned.gradient_bytes)
            except BaseException as error:
                error.add_note(
                    f"This was raised in the background, by the optimizer's update of layer {blocks[0].planned.name!r}."
                )
                self._failure = error
            finally:
                _here.updates = False

        with self._lock:
            self._finish(layer, Wait.READ_AFTER_UPDATE)  # the last step's update, if it was not waited for
            self._wait_in(layer)
            # First, because an interrupt may come between the two lines, and only layers noted here are waited for.
            self._under_way[layer] = then
            layer.update = self._device.later(update, self.urgency.get(layer))

    def afterwards(self, then: Callable[[], None]) -> None:
        """Calls ``then`` after a wait for all updates, whether they have succeeded or not."""
        self._afterwards.append(then)

    def bound(self, most: int) -> None:
        """Waits until at most ``most`` updates that have a ``then`` are under way. The others' ``then`` is called.

        Their parameters keep the waiting class. So a layer that no user code touches is fetched as its update left it.
        """
        with self._lock:
            for layer in [layer for layer, then in self._under_way.items() if then is not None][:-most]:
                self._follow(layer, Wait.READ_AFTER_UPDATE)

    def complete(self, layer: StreamedLayer) -> None:
        """Waits for the update of a layer, so that no other code runs beside it.

        As with :meth:`bound`, its parameters keep the waiting class.

        Raises:
            BaseException: the error of an update, with its traceback.
        """
        with self._lock:
            self._follow(layer, Wait.READ_AFTER_UPDATE)
        if self._failure is not None:
            self._raise()

    def wait(self, layer: StreamedLayer, why: Wait) -> None:
        """Waits for the update of one layer, and lands the layer unless the wait is for its fetch.

        Args:
            layer: a layer, or the masters of one, which are updated with it.
            why: the reason, which the device notes and a test may leave out.

        Raises:
            BaseException: the error of any update, with its traceback.
        """
        if layer.owner.update is not None:
            with self._lock:
                self._finish(layer.owner, why)
        if layer.owner.kept and (why is not Wait.FETCH_AFTER_UPDATE or layer is not layer.owner):
            self.land(layer.owner)
        if self._failure is not None:
            self._raise()

    def wait_until_issued(self, layer: StreamedLayer) -> Any:
        """Waits, for a fetch, until the background has issued the update of a layer. Its download may still be in flight.

        As with :meth:`bound`, the layer's parameters then keep the waiting class.

        Returns:
            The event after which the host has the layer; None if the host has it, because this did what :meth:`wait` does.
        """
        owner = layer.owner
        if owner.update is None or self._under_way.get(owner) is not None:  # ``then`` is called after the download
            self.wait(layer, Wait.FETCH_AFTER_UPDATE)
            return None
        with self._lock:
            if owner.update is not None:
                with awaiting_steps():
                    self._device.finish(owner.update, Wait.FETCH_AFTER_UPDATE)
                if owner.landed is not None and self._failure is None and not self._device.has_happened(owner.landed):
                    return owner.landed
        self.wait(layer, Wait.FETCH_AFTER_UPDATE)
        return None

    def await_work(self, values: Iterable[Any] | None = None) -> None:
        """Waits for updates in a thread that is not the run's, and leaves what follows them to the run.

        Args:
            values: waits for the updates of the parameters among these; None for all.
        """
        for layer in self._of(values):
            if (update := layer.update) is not None:
                futures.wait([update])
            self._device.synchronize(layer.landed, Wait.READ_AFTER_TAKE)
        used = None if values is None else {self._layer_of.get(id(value)) for value in values}
        with self._lock:
            for layer in self._layers:
                if layer.kept and (used is None or layer in used):
                    if (update := layer.update) is not None:  # submitted meanwhile
                        futures.wait([update])
                    self.stepper.land(layer)  # its parameters keep their class, which only the run changes

    def land(self, layer: StreamedLayer) -> None:
        """Lands a layer that stays on the GPU. The host's values count from now on, because user code may write them."""
        with self._lock:
            if layer in self._under_way:
                self._finish(layer, Wait.READ_AFTER_UPDATE)
            if layer.kept:
                self._has_landed = True
                self.stepper.land(layer)
                self.stepper.leave(layer)

    def land_those(self, values: Iterable[Any]) -> None:
        """Lands the layers that stay on the GPU and have a parameter among these values."""
        for layer in dict.fromkeys(self._layer_of.get(id(value)) for value in values):
            if layer is not None and layer.kept:
                self.land(layer)

    def wait_for_all(self) -> None:
        """Waits for all updates. Does not land layers.

        Raises:
            BaseException: the error of an update, with its traceback.
        """
        with self._lock:
            for layer in list(self._under_way):
                self._finish(layer, Wait.READ_AFTER_UPDATE)
            self._call_afterwards()
        self._raise()

    def finish(self) -> None:
        """Waits for all updates, and lands all layers. In a thread that is not the run's, it does what :meth:`await_work` does.

        Raises:
            BaseException: the error of an update, with its traceback.
        """
        if not self.threads.own:
            self.await_work()
        else:
            self.complete_pending()

    def complete_pending(self, values: Iterable[Any] | None = None) -> None:
        """Waits for updates and calls what follows them, in any thread.

        Args:
            values: waits for the updates of the parameters among these; None for all.

        Raises:
            BaseException: the error of any update, with its traceback.
        """
        if values is None:
            self.join()
        else:
            with self._lock:
                for layer in self._of(values):
                    self._finish(layer, Wait.READ_AFTER_UPDATE)
        self._raise()

    def _of(self, values: Iterable[Any] | None) -> list[StreamedLayer]:
        """Returns the layers whose updates are under way and that have a parameter among these values; None for all values."""
        if values is None:
            return list(self._under_way)
        found = (self._layer_of.get(id(value)) for value in values)
        return list(dict.fromkeys(layer for layer in found if layer in self._under_way))

    @contextmanager
    def still(self) -> Iterator[None]:
        """A context in which no update is under way: it calls :meth:`finish`, and other threads cannot submit updates."""
        with self._lock:
            self.finish()
            yield

    def join(self) -> None:
        """Waits for all updates without raising their errors, for callers that must not fail, or fail already."""
        with self._lock:
            for layer in list(self._under_way):
                self._finish(layer, Wait.READ_AFTER_UPDATE)
            for layer in [layer for layer in self._layers if layer.kept]:
                self.land(layer)
            self._call_afterwards()

    def _call_afterwards(self) -> None:
        """Calls what follows all updates, unless some of their results are on the GPU alone."""
        while self._afterwards and not any(layer.kept for layer in self._layers):
            self._afterwards.pop()()

    def refuse_updated(self, values: Iterable[Any]) -> None:
        """Raises a RuntimeError if the running backward has updated a parameter among these values."""
        used = {id(value) for value in values}
        for layer in [each for each in self._layers if each.owner.updated_early]:
            if used & set(map(id, layer.block.parameters)):
                layer.refuse_updated()

    def do_without(self, layer: StreamedLayer, needed: Callable[[str], None]) -> None:
        """Tests whether a layer could be updated now: uses that an update would make an error are noted instead.

        Args:
            layer: the layer, whose gradients are complete.
            needed: called with each later use of its weights or gradients in this backward, in words.
        """

        def note(what: str) -> None:
            layer.updated_early, layer.needed = False, None
            _restore_classes(layer.family)
            needed(what)

        with self._lock:
            self._wait_in(layer)
            layer.updated_early, layer.needed = True, note

    def _wait_in(self, layer: StreamedLayer) -> None:
        """Gives the layer's parameters the class that waits."""
        for parameter in [each for member in layer.family for each in member.block.parameters]:
            if type(parameter) is not Tensor:  # parts of wrapped parameters are plain tensors, and are not updated
                take(parameter, self._role)

    def recover(self) -> None:
        """Calls :meth:`join` after an error that may have occurred while an update was being submitted."""
        self.join()
        _restore_classes(self._layers)

    def end_early(self) -> None:
        """Allows uses of the layers that backward has updated. Called when the step is over."""
        with self._lock:
            for layer in [each for each in self._layers if each.updated_early]:
                layer.updated_early, layer.needed = False, None
                if layer not in self._under_way:
                    _restore_classes(layer.family)

    def close(self) -> None:
        """Drops an error that was raised: its traceback holds activations, whose graph holds this object."""
        self._failure = None

    def _finish(self, layer: StreamedLayer, why: Wait) -> None:
        if layer in self._under_way:
            self._follow(layer, why)
            del self._under_way[layer]
            layer.update = layer.landed = None
            if why is not Wait.FETCH_AFTER_UPDATE:
                layer.step_results = ()  # the code that waits may write the host's weights
            if layer.kept:
                self.stepper.hide(layer)
            if not layer.updated_early:
                _restore_classes(layer.family)

    def _follow(self, layer: StreamedLayer, why: Wait) -> None:
        """Waits for an update, and calls what follows it, once."""
        if layer.update is not None:  # else an interrupt has come before it was submitted
            # A KeyboardInterrupt may come here; the update is still known then.
            with awaiting_steps():
                self._device.finish(layer.update, why)
            self._device.synchronize(layer.landed, Wait.READ_AFTER_TAKE)
            layer.landed = None  # the host has the layer
        then, self._under_way[layer] = self._under_way[layer], None
        if then is not None:
            with torch.DisableTorchFunctionSubclass():  # the layer's parameters may be refused to user code still
                then()

    def _raise(self) -> None:
        if self._failure is not None:
            self.torn = f"the optimizer's update failed in the background: {self._failure!r}"
            raise self._failure


def _restore_classes(layers: Iterable[StreamedLayer]) -> None:
    for layer in layers:
        for parameter in layer.block.parameters:
            leave(parameter, _PendingUpdate)


_NAMES = 8
"""How many layers a message names."""
_all: WeakSet[BackgroundUpdates] = WeakSet()
_here = threading.local()


def updates_here() -> bool:
    """Returns True if this thread updates a layer now. A step inside a layer's step is then not a step of user code."""
    return getattr(_here, "updates", False)


def _before_fork() -> None:
    """Waits for all updates: a forked child has no background thread, and would wait forever."""
    for updates in list(_all):
        if updates.threads.own:
            updates.join()
        else:
            updates.await_work()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


class _PendingUpdate(ParameterRole):
    """A host parameter whose update is under way. Code that computes with it, or reads its gradient, waits first.

    If the running backward has begun the update, such code gets an error: it has to run before the update.
    """

    rank = 0
    _updates: BackgroundUpdates

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in UNCHANGED_BY_UPDATES or func is Tensor.stride:
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if cls.is_foreign() and not writes_in_place(func, kwargs or {}):
            cls._updates.await_work(tree_leaves((args, kwargs)))
            return super().__torch_function__(func, types, args, kwargs or {})
        values = tree_leaves((args, kwargs))
        for kind in types:
            if issubclass(kind, _PendingUpdate):
                kind._updates.complete_pending(values)  # after this the arguments have their ordinary classes again
                kind._updates.refuse_updated(values)
        return func(*args, **(kwargs or {}))

    @classmethod
    def is_foreign(cls) -> bool:
        return not cls._updates.threads.own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        updates = self._updates  # its ordinary class has none
        if self.is_foreign():
            return ParameterRole.__deepcopy__(
                self, memo
            )  # not super(): the run may take the role from it at this moment
        updates.finish()
        updates.refuse_updated([self])
        return copy.deepcopy(self, memo)  # it has its own class again, and this method is that class's
