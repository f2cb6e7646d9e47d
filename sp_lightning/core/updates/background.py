"""Updates layers in the background, while the next forward or the rest of backward runs.

User code sees no difference. Until a layer's update is done, its parameters have a class that waits before code reads or writes
them, and a fetch of the layer waits as well (see "Note: roles of parameters" in ``updates/__init__``).
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor

from sp_lightning.core.device.device import Stream, Wait
from sp_lightning.core.torch_compat.metadata import UNCHANGED_BY_UPDATES
from sp_lightning.core.torch_compat.private import tree_leaves
from sp_lightning.core.updates.step_context import awaiting_steps
from sp_lightning.core.weights.layer import StreamedLayer
from sp_lightning.core.weights.roles import ParameterRole, leave, take, writes_in_place

if TYPE_CHECKING:
    from sp_lightning.core.engine.engine import Engine

TORN_IN_BACKWARD = 'a backward with optimizer_overlap="backward" failed after it had updated some layers'
"""A value of :attr:`BackgroundUpdates.torn`."""


class BackgroundUpdates:
    """The updates that are under way: submitted to the background thread, and not yet waited for.

    Several methods wait. They differ in whether they raise the error of a failed update, and whether the layers' parameters get
    their ordinary classes back:

    =====================  ===========  ======  ========  ======================================================
    method                 waits for    raises  ordinary  called
    =====================  ===========  ======  ========  ======================================================
    ``complete``           one layer    yes     no        by an optimizer's step that may not continue before the update
    ``limit_pending``      the oldest   no      no        by a step in backward, after each update: frees gradients
    ``wait_until_issued``  one layer    yes     no        before a fetch of the layer, whose download may be in flight
    ``wait``               one layer    yes     yes       before a fetch that reads the results on the host, and before weights
                                                          are written or copied back
    ``wait_for_all``       all          yes     yes       by the next optimizer step; by a step that ends with its updates
    ``finish``             all          yes     yes       before code reads weights or an optimizer's state: checkpoints, the end
                                                          of training
    ``complete_pending``   all or some  yes     yes       before code uses parameters whose updates are under way
    ``join``               all          no      yes       before slots are freed; before a fork
    ``recover``            all          no      yes       after an error, and at the end of the run
    ``await_work``         all or some  no      no        by threads that are not the run's
    =====================  ===========  ======  ========  ======================================================

    Args:
        engine: the engine. Its device runs work in a background thread, and waits for it.

    Attributes:
        failure: the error of the update that has failed; None if all have succeeded.
        torn: the reason if only some layers have the weights of the last step; None if all have them.
        urgency: a number for each layer: updates with lower numbers run first. Empty if updates run in the order of submission.
        threads: the threads that belong to the run. Other threads only wait: an update's ``then`` is called by the run.
    """

    def __init__(self, engine: Engine) -> None:
        self.threads = engine.threads
        self._layers = engine.layers
        self._layer_of = {id(p): layer.owner for layer in engine.layers for p in layer.block.parameters}
        self._device = engine.device
        # The layers whose updates are under way, in the order of submission, and the function to call after each.
        self._under_way: dict[StreamedLayer, Callable[[], None] | None] = {}
        self._lock = threading.RLock()  # several threads may wait; the background never takes the lock
        self.failure: BaseException | None = None
        self._afterwards: list[Callable[[], None]] = []
        # Each object has its own subclass, because a parameter finds the updates that it waits for by its class.
        self._waiting_role = type("PendingUpdate", (_PendingUpdate,), {"_updates": self})
        self.torn: str | None = None
        self.urgency: Mapping[StreamedLayer, int] = {}
        self._updated: list[str] = []  # the layers that the present step has updated, by name
        _instances.add(self)  # before a fork, all updates are waited for (_before_fork)

    @property
    def partially_updated(self) -> str | None:
        """The reason if only some layers have the weights of the last step, and the updated layers' names; otherwise None."""
        if self.torn is None:
            return None
        updated = ", ".join(map(repr, self._updated[:_MOST_NAMES])) or "no layer"
        others = len(self._updated) - _MOST_NAMES
        if others > 0:
            updated += f" and {others} others"
        return f"{self.torn}. Updated: {updated}"

    def begin(self) -> None:
        """Called when a step begins, before its first update."""
        self._updated = []

    def submit(self, layer: StreamedLayer, work: Callable[[], None], then: Callable[[], None] | None = None) -> None:
        """Gives the update of a layer to the background thread. If an earlier update has failed, this one is skipped.

        The caller has prepared the host's weights with ``Updating.before`` (a step) or ``Updating.before_early_update`` (an
        update in backward): no transfer reads them any more (``UPDATE_AFTER_FETCH``), and they have the values that user code has
        written on the device. Fetches that begin later wait for ``layer.update``.

        Args:
            layer: the layer. Its parameters have a waiting class until the update is done.
            work: the update. It must not set ``param.grad``: another thread may be reading the old tensor, which torch would
                then free.
            then: called once after the work, in the thread that waits for the update, for example to free gradients.
        """
        blocks = [member.block for member in layer.with_masters]  # the layer's, and its master weights'
        updated = self._updated  # of this step: a later step has another list

        def update() -> None:
            try:
                if self.failure is None:
                    layer.use_gradients()
                    for block in blocks:
                        block.memory.use()
                        self._device.access(block.weights, Stream.UPDATE, write=True)
                    timed = self._device.timed("update", layer.index, Stream.UPDATE, blocks[0].planned.gradient_bytes)
                    _this_thread.updates = True
                    with timed, torch.DisableTorchFunctionSubclass(), torch.no_grad():
                        work()
                    updated.append(layer.name)
            except BaseException as error:
                error.add_note(
                    f"This was raised in the background, by the optimizer's update of layer {blocks[0].planned.name!r}."
                )
                self.failure = error
            finally:
                _this_thread.updates = False

        with self._lock:
            self._finish(layer, Wait.READ_AFTER_UPDATE)  # the last step's update, if it was not waited for
            self._set_waiting_class(layer)
            # Before the update is submitted: an interrupt may come in between, and only updates in ``_under_way`` are waited for.
            self._under_way[layer] = then
            layer.update = self._device.later(update, self.urgency.get(layer))

    def afterwards(self, then: Callable[[], None]) -> None:
        """Registers a function to call when all updates have ended, successfully or not."""
        self._afterwards.append(then)

    def limit_pending(self, most: int) -> None:
        """Waits until at most ``most`` updates that have a ``then`` are under way, and calls the ``then`` of the others.

        Called after each update in backward, because ``then`` frees the layer's gradients: this limits host memory. The
        parameters keep the waiting class. So a layer that no user code touches is fetched as its update left it.
        """
        with self._lock:
            pending = [layer for layer, then in self._under_way.items() if then is not None]
            for layer in pending[:-most]:
                self._complete(layer, Wait.READ_AFTER_UPDATE)

    def complete(self, layer: StreamedLayer) -> None:
        """Waits for the update of a layer that was just submitted, because no other code may run at the same time.

        As with :meth:`limit_pending`, its parameters keep the waiting class.

        Raises:
            BaseException: the error of an update, with its traceback.
        """
        with self._lock:
            self._complete(layer, Wait.READ_AFTER_UPDATE)
        self._raise_failure()

    def wait(self, layer: StreamedLayer, why: Wait) -> None:
        """Waits for the update of one layer.

        Args:
            layer: a layer, or the masters of one, which are updated with it.
            why: the reason. It appears in timelines, and tests leave out the waits of one reason to show that they are needed.

        Raises:
            BaseException: the error of any update, with its traceback.
        """
        if layer.owner.update is not None:
            with self._lock:
                self._finish(layer.owner, why)
        self._raise_failure()

    def wait_until_issued(self, layer: StreamedLayer) -> Any:
        """Waits, before a fetch, until the background has issued the update of a layer. Its download may still be in flight.

        In this case the upload stream waits for the download, and the host does not. As with :meth:`limit_pending`, the layer's
        parameters then keep the waiting class. Called only if the layer has an update, or if an update has failed.

        Returns:
            The event after which the host has the layer; None if the host has it, because this did what :meth:`wait` does.
        """
        owner = layer.owner
        with self._lock:
            # A `then` has to be called after the download, as `wait` does.
            if owner.update is not None and self._under_way.get(owner) is None:
                with awaiting_steps():
                    self._device.finish(owner.update, Wait.FETCH_AFTER_UPDATE)
                is_in_flight = owner.downloaded is not None and not self._device.has_happened(owner.downloaded)
                if is_in_flight and self.failure is None:
                    return owner.downloaded
        self.wait(layer, Wait.FETCH_AFTER_UPDATE)
        return None

    def await_work(self, values: Iterable[Any] | None = None) -> None:
        """Waits for updates in a thread that is not the run's.

        The host's values are up to date afterwards. The run's own state does not change: ``then`` is not called, and parameters
        keep their classes. The run does both when it waits itself.

        Args:
            values: objects; the updates of the parameters among them are waited for. None: all updates.
        """
        for layer in self._updating(values):
            if (update := layer.update) is not None:  # read once: the run may end the update at any time
                update.exception()  # waits
            self._device.synchronize(layer.downloaded, Wait.READ_AFTER_TAKE)

    def wait_for_all(self) -> None:
        """Waits for all updates.

        Raises:
            BaseException: the error of an update, with its traceback.
        """
        with self._lock:
            for layer in list(self._under_way):
                self._finish(layer, Wait.READ_AFTER_UPDATE)
            self._call_afterwards()
        self._raise_failure()

    def finish(self) -> None:
        """Waits for all updates. In a thread that is not the run's, it calls :meth:`await_work` instead.

        Raises:
            BaseException: the error of an update, with its traceback.
        """
        if not self.threads.own:
            self.await_work()
        else:
            self.complete_pending()

    def complete_pending(self, values: Iterable[Any] | None = None) -> None:
        """Waits for updates as the run does: ``then`` is called, and parameters get their ordinary classes back.

        A thread that is not the run's also calls this if it writes a weight.

        Args:
            values: objects; the updates of the parameters among them are waited for. None: as :meth:`join`.

        Raises:
            BaseException: the error of any update, with its traceback.
        """
        if values is None:
            self.join()
        else:
            with self._lock:
                for layer in self._updating(values):
                    self._finish(layer, Wait.READ_AFTER_UPDATE)
        self._raise_failure()

    def _updating(self, values: Iterable[Any] | None) -> list[StreamedLayer]:
        """Returns the layers whose updates are under way and that have a parameter among ``values`` (None: any parameter)."""
        if values is None:
            return list(self._under_way)
        found = (self._layer_of.get(id(value)) for value in values)
        return list(dict.fromkeys(layer for layer in found if layer in self._under_way))

    def join(self) -> None:
        """Waits for all updates, without raising the updates' errors."""
        with self._lock:
            for layer in list(self._under_way):
                self._finish(layer, Wait.READ_AFTER_UPDATE)
            self._call_afterwards()

    def _call_afterwards(self) -> None:
        """Calls the functions of :meth:`afterwards`. Each is called once."""
        while self._afterwards:
            self._afterwards.pop()()

    def refuse_updated(self, values: Iterable[Any]) -> None:
        """Raises a RuntimeError if the running backward has updated a parameter among these values.

        Called when code uses host parameters within backward: on plain Lightning it would read the weights from before the step.
        """
        used = {id(value) for value in values}
        for layer in [each for each in self._layers if each.owner.updated_early]:
            if used & set(map(id, layer.block.parameters)):
                layer.refuse_updated()

    def note_late_uses(self, layer: StreamedLayer, needed: Callable[[str], None]) -> None:
        """Tests whether a layer could be updated now, in the middle of backward. Nothing is updated.

        The layer's parameters get the waiting class, as if an update was under way. If backward uses them again, which would be
        an error after a real update, this is only recorded, and the parameters get their ordinary classes back.

        Args:
            layer: the layer, whose gradients are complete.
            needed: called with a later use of its weights or gradients in this backward, in words.
        """

        def note(what: str) -> None:
            layer.updated_early, layer.needed = False, None
            _restore_classes(layer.with_masters)
            needed(what)

        with self._lock:
            self._set_waiting_class(layer)
            layer.updated_early, layer.needed = True, note

    def refuse_uses(self, layer: StreamedLayer) -> None:
        """Makes uses of a layer that another process may update in this backward errors, until :meth:`end_early`."""
        with self._lock:
            self._set_waiting_class(layer)
            layer.updated_early = True

    def _set_waiting_class(self, layer: StreamedLayer) -> None:
        """Makes code that uses the layer's parameters wait for its update; see "Note: roles of parameters"."""
        for parameter in [each for member in layer.with_masters for each in member.block.parameters]:
            if type(parameter) is not Tensor:  # parts of wrapped parameters are plain tensors, and are not updated
                take(parameter, self._waiting_role)

    def recover(self) -> None:
        """Calls :meth:`join` after an error that may have occurred while an update was being submitted.

        Then gives all parameters their ordinary classes back.
        """
        self.join()
        _restore_classes(self._layers)  # `submit` sets the waiting class before the layer is in `_under_way`

    def end_early(self) -> None:
        """Allows uses of the layers that backward has updated. Called when backward is over or has failed."""
        with self._lock:
            for layer in [each for each in self._layers if each.updated_early]:
                layer.updated_early, layer.needed = False, None
                if layer not in self._under_way:
                    _restore_classes(layer.with_masters)

    def close(self) -> None:
        """Called when a run is over. From now on a fork does not wait for the updates of the run, even if an update has failed.

        Drops the error of an update: the error's traceback holds activations, whose graph holds this object.
        """
        self.failure = None
        _instances.discard(self)

    def _finish(self, layer: StreamedLayer, why: Wait) -> None:
        """Waits for an update as :meth:`_complete` does, and gives the layer's parameters their ordinary classes back."""
        if layer in self._under_way:
            self._complete(layer, why)
            del self._under_way[layer]
            layer.update = layer.downloaded = None
            if why is not Wait.FETCH_AFTER_UPDATE:
                layer.step_results = ()  # the code that waits may write the host's weights
            if not layer.updated_early:
                _restore_classes(layer.with_masters)

    def _complete(self, layer: StreamedLayer, why: Wait) -> None:
        """Waits for an update, and calls its ``then``, once. The layer's parameters keep the waiting class."""
        if layer.update is not None:  # else an interrupt has come before the update was submitted
            # A KeyboardInterrupt may come here. The layer is still in ``_under_way`` then, and is waited for later.
            with awaiting_steps():
                self._device.finish(layer.update, why)
            self._device.synchronize(layer.downloaded, Wait.READ_AFTER_TAKE)
            layer.downloaded = None  # the host has the layer
        then, self._under_way[layer] = self._under_way[layer], None
        if then is not None:
            with torch.DisableTorchFunctionSubclass():  # user code may still get errors for the layer's parameters
                then()

    def _raise_failure(self) -> None:
        """Raises the error of an update, if one has failed. Every later wait raises it again: the weights stay torn."""
        if self.failure is not None:
            self.torn = f"the optimizer's update failed in the background: {self.failure!r}"
            raise self.failure


def _restore_classes(layers: Iterable[StreamedLayer]) -> None:
    for layer in layers:
        for parameter in layer.block.parameters:
            leave(parameter, _PendingUpdate)


_MOST_NAMES = 8
"""The number of layers that a message names at most."""
_instances: WeakSet[BackgroundUpdates] = WeakSet()
_this_thread = threading.local()


def updates_here() -> bool:
    """Returns True if this thread updates a layer now. Hooks on optimizers then do nothing: user code did not call the step."""
    return getattr(_this_thread, "updates", False)


def _before_fork() -> None:
    """Waits for all updates: a forked child has no background thread, and would wait forever."""
    for updates in list(_instances):
        if updates.threads.own:
            updates.join()
        else:
            updates.await_work()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


class _PendingUpdate(ParameterRole):
    """A host parameter whose update is under way. Code that computes with it, or reads its gradient, waits first.

    If the running backward has begun the update, such code gets an error, because it would have to run before the update.
    """

    rank = 0
    _updates: BackgroundUpdates

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # `stride` is not in the set, because an absent tensor, whose shape is that of an expanded element, has other strides.
        if func in UNCHANGED_BY_UPDATES or func is Tensor.stride:
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if cls.is_foreign() and not writes_in_place(func, kwargs or {}):
            cls._updates.await_work(tree_leaves((args, kwargs)))
            return super().__torch_function__(func, types, args, kwargs or {})
        values = tree_leaves((args, kwargs))
        for kind in types:
            if issubclass(kind, _PendingUpdate):
                kind._updates.complete_pending(
                    values
                )  # gives the arguments their ordinary classes, unless backward has updated them: refused next
                kind._updates.refuse_updated(values)
        return func(*args, **(kwargs or {}))

    @classmethod
    def is_foreign(cls) -> bool:
        return not cls._updates.threads.own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        updates = self._updates  # read now, because the ordinary class does not have it
        if self.is_foreign():
            # Not super(): the run may give the parameter its ordinary class at this moment.
            return ParameterRole.__deepcopy__(self, memo)
        updates.finish()
        updates.refuse_updated([self])
        return copy.deepcopy(self, memo)  # it has its ordinary class again, so this is not a recursion
