"""Takes an optimizer's step apart: torch's own code runs it layer by layer, in the background.

With ``optimizer_overlap="forward"`` the updates begin once backward has succeeded and the norm is known. They run during the
next forward, in the order in which that needs the layers. With ``"backward"`` each layer is updated as soon as its
gradients are complete, which are then freed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.device.patched import state_of
from sp_lightning.device.torch_private import run_first_after_step, tree_map
from sp_lightning.device.waits import Stream
from sp_lightning.optim.background import Updatable
from sp_lightning.optim.clipping import Clipping
from sp_lightning.optim.fused import is_separable, lacks_buffers, shares_state
from sp_lightning.optim.pieces import InPieces
from sp_lightning.optim.state_on_disk import StateOnDisk
from sp_lightning.store.away import Away, give
from sp_lightning.weights.layer import StreamedLayer
from sp_lightning.weights.narrow_gradient import Change, as_it_came, change, drop, stored


class LayerwiseStep:
    """Runs the steps of one optimizer layer by layer: a fused one, or one that is separable.

    torch's fused kernels treat each tensor by itself and give the same bits on any number of threads, so it does not
    matter where and when a layer is updated. A step that cannot be taken apart (sparse gradients, a group that is not
    fused, parameters from outside the module) runs as torch runs it, all at once.

    Args:
        optimizer: the user's optimizer, which keeps its groups and its state.
        engine: the engine whose layers are updated.
        early: whether each layer is updated while backward goes on (``optimizer_overlap="backward"``).
        measure: whether norms of gradients are computed while backward goes on. This is right only if nobody writes
            gradients between backward and clipping.
        narrow: whether gradients keep the dtype in which they come. This saves memory only if nobody reads them.
        state: brings and takes away the optimizer's state; None if it stays on the host.
        waits: whether the step returns once all layers are updated. Then the optimizer need not be fused, because the
            background has as many threads as a whole step would have.

    Attributes:
        clipping: clips the gradients.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        engine: Updatable,
        *,
        early: bool,
        measure: bool,
        narrow: bool,
        state: StateOnDisk | None = None,
        waits: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._engine = engine
        self._updates = engine.updates
        self._state = state
        self._waits = waits
        self._early = early
        self._measure = measure
        self._separable = waits or is_separable(optimizer)
        self._narrow = narrow and not self._separable  # a step that is not fused reads whole gradients
        self.clipping = Clipping(optimizer, engine)
        self._armed: dict[StreamedLayer, list[dict[str, Any]]] | None = None
        self._begun: set[StreamedLayer] = set()  # layers whose updates began during backward
        self._class = type(optimizer)
        self._groups = self._none = list[dict[str, Any]]()  # the user's groups while the optimizer has none
        self._known: set[nn.Parameter] | None = None  # the parameters that had state before this step

    @property
    def begun(self) -> bool:
        """Whether updates of this step have begun during backward."""
        return bool(self._begun)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """A context in which ``optimizer.step`` submits the updates instead of running them."""
        step = self._optimizer.step

        def deferred(closure: Callable[[], Any] | None = None) -> Any:
            self._known = None

            def closed() -> Any:
                if self._early:
                    self._engine.call_when_complete(self._update_early, lambda layer: layer in self._early_groups())
                result = closure() if closure is not None else None
                self._take()  # from here to its end torch's step finds no groups, and so has nothing to do
                return result

            # This hook runs before the user's own hooks after the step, which are to find the groups.
            restore = self._optimizer.register_step_post_hook(lambda *_: self._give_back_groups())
            run_first_after_step(self._optimizer, restore)
            try:
                return step(closed)
            finally:
                restore.remove()
                self._give_back_groups()

        self._engine.call_when_complete(self.clipping.measure if self._measure and not self._early else None)
        self._engine.keep_narrow(self._narrow)
        try:
            with in_place_of(self._optimizer, {"step": deferred}), _zeroing_narrow(self._optimizer):
                yield
        finally:
            self._engine.call_when_complete(None)
            self._engine.keep_narrow(False)
            self._armed = None
            self.clipping.end()

    # ------------------------------------------------------------------ updates

    def _update_early(self, layer: StreamedLayer) -> None:
        """Submits the update of a layer whose gradients backward has completed."""
        groups = self._early_groups().pop(layer, None)
        if groups is not None:
            for parameter in [each for member in layer.family for each in member.block.parameters]:
                gradient = stored(parameter)
                if gradient is not None and gradient.layout is not torch.strided:
                    raise RuntimeError(_NOT_ALL.format(what="there are sparse gradients"))
            self._updates.partially_updated = (
                'a backward with optimizer_overlap="backward" failed after it had updated some layers'
            )
            self._begun.add(layer)
            self._engine.before_early(layer)
            self._submit(layer, groups)
            self._updates.bound(1)  # this bounds the memory of gradients that wait, too

    def _early_groups(self) -> dict[StreamedLayer, list[dict[str, Any]]]:
        """The groups of the layers that are updated as soon as their gradients are complete, and have not been yet."""
        if self._armed is None:
            try:
                self._armed = self._groups_by_layer()
            except _UndividedError:
                self._armed = {}
        return self._armed

    def _take(self) -> None:
        """Submits the layers that are not updated yet, after backward and clipping."""
        self._engine.call_when_complete(None)
        self._engine.before(deferred=bool(self._begun))  # a forward without a backward may have left transfers
        self._engine.gather(self._optimizer)
        try:
            by_layer = self._groups_by_layer()
        except _UndividedError as undivided:
            self._refuse(undivided)
            self.clipping.finish()  # torch's step updates all at once
        else:
            self._updates.partially_updated = "the optimizer's step was interrupted, and may have updated some layers"
            for layer in self._engine.order():
                if layer in by_layer:
                    self._submit(layer, by_layer[layer])
            self.clipping.pending = None
            self._groups, self._optimizer.param_groups = self._optimizer.param_groups, self._none
        self._begun.clear()
        self._engine.over()
        self._updates.partially_updated = None
        if self._waits:
            self._updates.finish()

    def _refuse(self, undivided: _UndividedError) -> None:
        """Raises an error where only layers can be updated."""
        what, instead = undivided.args
        if self._begun:
            raise RuntimeError(_NOT_ALL.format(what=f"{what}, and some layers are updated already")) from undivided
        if self._state is not None:
            raise RuntimeError(
                f"disk= updates layers one by one, but {what}. {instead}, {_WITHOUT_DISK}."
            ) from undivided
        if self._engine.several:
            raise RuntimeError(
                f"Several devices update layers one by one, but {what}. {instead}, {_AT_ONCE}."
            ) from undivided

    def _give_back_groups(self) -> None:
        if self._optimizer.param_groups is self._none:  # otherwise the user has replaced them
            self._optimizer.param_groups = self._groups

    def _groups_by_layer(self) -> dict[StreamedLayer, list[dict[str, Any]]]:
        """The groups, cut by layers.

        Settings are copied, because schedulers change them after the step, while updates may still run.

        Raises:
            _UndividedError: they cannot be cut.
        """
        by_layer, state = defaultdict(list), state_of(self._optimizer)
        if not self._begun and shares_state(self._optimizer.param_groups, state):
            raise _UndividedError("two parameters share a state", "Give each parameter a state of its own")
        for group in self._optimizer.param_groups:
            if not group.get("fused") and not self._separable:
                raise _UndividedError("a group of parameters is not fused", "Make the optimizer with fused=True")
            settings = tree_map(_snapshot, {key: value for key, value in group.items() if key != "params"})
            if (
                self._early
                and not self._begun
                and lacks_buffers(group, state, [p for p in group["params"] if p.requires_grad])
            ):
                what = "some parameters of a group have momentum and others have none yet"
                raise _UndividedError(what, "Pass optimizer_overlap='forward'")
            parts = defaultdict(list)
            for parameter in group["params"]:
                layer = self._engine.layer_of(parameter)
                if layer is None:
                    what = f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the module's"
                    raise _UndividedError(what, "Make it the module's")
                if layer not in self._begun:
                    gradient = stored(parameter)
                    if gradient is not None and gradient.layout is not torch.strided:
                        what = f"{layer.name!r} has sparse gradients"
                        raise _UndividedError(what, "Make embeddings with sparse=False")
                    parts[layer].append(parameter)
            for layer, parameters in parts.items():
                by_layer[layer].append({**settings, "params": parameters})
        return by_layer

    def _submit(self, layer: StreamedLayer, groups: list[dict[str, Any]]) -> None:
        parameters = [parameter for group in groups for parameter in group["params"]]
        has_state = state_of(self._optimizer)
        if self._known is None and not all(parameter in has_state for parameter in parameters):
            self._updates.finish()  # those of the step before: new state is put in order step by step
        if type(self._optimizer) is self._class:
            self._optimizer.__class__ = _waiting(self._class, self._updates.finish)
            if self._known is None:
                self._known = set(state_of(self._optimizer))
            order = [p for group in self._optimizer.param_groups for p in group["params"]]
            self._updates.afterwards(partial(self._updated, self._known, order))
        part = object.__new__(self._class)
        vars(part).update(vars(self._optimizer), param_groups=groups)
        clip, engine = self.clipping.pending, self._engine
        # Of the others the update clips none, even if another thread widens a gradient meanwhile: that one is clipped then.
        clips = {id(p): clip for p in parameters if clip is not None and not change(p, clip)}

        def update() -> None:
            if self._state is None:
                # What an earlier run with ``disk=`` has left away comes.
                found = (has_state.get(parameter, {}) for parameter in parameters)
                give([value for each in found for value in each.values() if type(value) is Away])
            else:
                self._state.bring(layer, part)
            trained = [parameter for parameter in parameters if parameter.grad is not None]
            for parameter in trained:
                engine.device.access(as_it_came(parameter.grad), Stream.UPDATE, write=id(parameter) in clips)
            self._step_layer(layer, part, trained, clips)
            if self._state is not None:
                self._state.put(layer, part)

        release = partial(engine.release_gradients, layer, parameters) if self._early else None
        self._updates.submit(layer, update, release)

    def _step_layer(
        self, layer: StreamedLayer, part: Optimizer, trained: Sequence[nn.Parameter], clips: Mapping[int, Change]
    ) -> None:
        """Runs the step of one layer, and casts its new weights."""
        step = partial(self._class.step.__wrapped__, part)  # type: ignore[attr-defined]  # without its hooks: they run once
        casts = layer.casts.places(Stream.UPDATE)
        if self._separable:
            for parameter in trained:
                if id(parameter) in clips and parameter.grad is not None:
                    clips[id(parameter)](parameter.grad)
            step()
            layer.casts.refresh(by=Stream.UPDATE)
        else:
            with InPieces(casts, clips):
                step()
            layer.casts.refresh(by=Stream.UPDATE, but=set(map(id, trained)))

    def _updated(self, known: set[nn.Parameter], order: Sequence[nn.Parameter]) -> None:
        """When all updates are done, puts state of parameters that had none (are not ``known``) in the groups' ``order``."""
        self._optimizer.__class__ = self._class
        state = self._optimizer.state
        if len(state) > len(known):
            for parameter in order:
                if parameter in state and parameter not in known:
                    state[parameter] = state.pop(parameter)


@contextmanager
def in_place_of(owner: Any, methods: Mapping[str, Any]) -> Iterator[None]:
    """While this is active an object has these in place of its class's methods. What it had of its own before comes back."""
    own = vars(owner)
    before = {name: own[name] for name in methods if name in own}
    own.update(methods)
    try:
        yield
    finally:
        for name in methods:
            own.pop(name, None)
        own.update(before)


def _zeroing_narrow(optimizer: Optimizer) -> AbstractContextManager[None]:
    """While this is active ``zero_grad`` drops narrow gradients. torch's asks for each first, which would widen it."""
    users = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        if set_to_none:
            for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
                drop(parameter)
        users(set_to_none=set_to_none)

    return in_place_of(optimizer, {"zero_grad": zero_grad})


_NOT_ALL = (
    'optimizer_overlap="backward" updates layers one by one with a fused optimizer, but {what}. '
    'Use SuperpipelineStrategy(optimizer_overlap="forward").'
)

_AT_ONCE = "or pass optimizer_overlap='off'"
_WITHOUT_DISK = "or leave disk= out and pass optimizer_overlap='off'"


class _UndividedError(Exception):
    """Groups cannot be cut by layers: why, and what to do about it."""


def _waiting(kind: type[Optimizer], finish: Callable[[], None]) -> type[Optimizer]:
    """The class that an optimizer has while its updates are under way: whoever reads its state waits first."""

    def state(self: Optimizer) -> Any:
        finish()
        # A LightningOptimizer that is made meanwhile derives from this class and has no state; it asks the wrapped one.
        if "state" not in vars(self):
            raise AttributeError("state")
        return vars(self)["state"]

    def set_state(self: Optimizer, value: Any) -> None:
        finish()
        vars(self)["state"] = value

    def reduce(self: Optimizer, protocol: Any) -> Any:
        finish()
        return self.__reduce_ex__(protocol)  # it has its own class again, and this is that class's method

    methods = {"state": property(state, set_state), "__reduce_ex__": reduce}
    return type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__})


def _snapshot(setting: Any) -> Any:
    return setting.clone() if isinstance(setting, Tensor) else setting
