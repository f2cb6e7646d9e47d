"""An optimizer's step, taken apart: layer by layer in the background, by torch's own code.

``"forward"``: once backward has succeeded and the norm is known, under the next forward, in the order in which that
needs the layers. ``"backward"``: each layer as soon as its gradients are complete, which are then freed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from sp_lightning.device.device import Device
from sp_lightning.device.torch_private import accumulation_hooks, run_first_after_step, tree_map
from sp_lightning.device.waits import Stream
from sp_lightning.optim.background import Updates
from sp_lightning.weights.layer import StreamedLayer

Clip = Callable[[Sequence[nn.Parameter]], Any]
Norms = dict[nn.Parameter, tuple[Tensor, int, Tensor]]
"""Of which gradient, at which version, which norm."""


class Updatable(Protocol):
    """The engine, as a step that is taken apart sees it: which layers there are, and what may be done to one when."""

    device: Device
    updates: Updates
    on_complete: Callable[[StreamedLayer], None] | None
    """Called in the backward that was announced, with each layer whose gradients are all in ``param.grad``."""

    @property
    def in_flight(self) -> int:
        """How many layers' updates may be under way in backward, with the gradients that wait for them."""

    def layer_of(self, parameter: nn.Parameter) -> StreamedLayer | None:
        """The layer of a host parameter; None if it is none of the module's."""

    def order(self) -> Iterator[StreamedLayer]:
        """All layers, those first that the next forward needs first."""

    def before(self, *, deferred: bool) -> None:
        """The step begins: nothing may read host weights while it writes them."""

    def before_early(self, layer: StreamedLayer) -> None:
        """A layer is about to be updated in the middle of backward."""

    def after(self, layer: StreamedLayer) -> None:
        """In the background: a layer's weights are updated."""

    def over(self) -> None:
        """The step has submitted everything."""

    def release_gradients(self, layer: StreamedLayer, parameters: Sequence[nn.Parameter]) -> None:
        """Nobody needs the gradients of these parameters of a layer any more."""


class OptimizerState(Protocol):
    """Where the optimizer's state of a layer is while it is updated: today on the host, as torch makes it."""

    def bring(self, layer: StreamedLayer, optimizer: Optimizer) -> None:
        """In the background, before a layer's update: its state is in host memory."""

    def put(self, layer: StreamedLayer, optimizer: Optimizer) -> None:
        """In the background, after a layer's update: its state may leave."""


class OnHost:
    """State that stays on the host."""

    def bring(self, layer: StreamedLayer, optimizer: Optimizer) -> None:
        """It is there."""

    def put(self, layer: StreamedLayer, optimizer: Optimizer) -> None:
        """It stays there."""


class LayeredStep:
    """Runs the steps of one fused optimizer layer by layer.

    torch's fused kernels treat each tensor by itself and give the same bits on any number of threads, so it does not
    matter where and when a layer is updated. A step that cannot be taken apart (sparse gradients, a group that is not
    fused, parameters from outside the module) is torch's, at once.

    Args:
        optimizer: as it is; it keeps its groups and its state.
        engine: whose layers it updates.
        early: update each layer while backward goes on (``"backward"``).
        measure: compute norms while backward goes on; right only where nobody writes gradients between backward and
            clipping.
        state: where the optimizer's state is.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        engine: Updatable,
        *,
        early: bool,
        measure: bool,
        state: OptimizerState | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._engine = engine
        self._updates = engine.updates
        self._state = state or OnHost()
        self._early = early
        self._measure = measure
        self._clip: Clip | None = None
        self._norms: Norms = {}
        self._armed: dict[StreamedLayer, list[dict[str, Any]]] | None = None
        self._begun: set[StreamedLayer] = set()  # layers whose updates backward has begun
        self._class = type(optimizer)
        self._groups = self._none = list[dict[str, Any]]()
        self._known: set[nn.Parameter] | None = None  # which had state before this step

    def __reduce__(self) -> Any:
        raise TypeError(
            "The trainer was copied inside an optimizer's step, whose updates are under way in the background. Copy it "
            'between batches, in on_train_batch_end, say, or use SuperpipelineStrategy(optimizer_overlap="off").'
        )

    @property
    def begun(self) -> bool:
        """Whether this step has begun to update layers."""
        return bool(self._begun)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """While this is active ``optimizer.step`` submits the updates instead of doing them."""
        optimizer, step = self._optimizer, self._optimizer.step
        own = vars(optimizer).get("step")  # a scheduler's, which counts

        def deferred(closure: Callable[[], Any] | None = None) -> Any:
            self._known = None

            def closed() -> Any:
                if self._early:
                    self._engine.on_complete = self._update_early
                result = closure() if closure is not None else None
                self._take()  # from here to the end of torch's step there are no groups, and nothing to do for it
                return result

            # Before the user's own hooks after the step, which find the groups.
            restore = optimizer.register_step_post_hook(lambda *_: self._give_back_groups())
            run_first_after_step(optimizer, restore)
            try:
                return step(closed)
            finally:
                restore.remove()
                self._give_back_groups()

        optimizer.step = deferred  # type: ignore[method-assign]
        self._engine.on_complete = self._measure_layer if self._measure and not self._early else None
        try:
            yield
        finally:
            self._engine.on_complete = None
            self._norms = {}
            self._armed = None
            self._clip_at_once()
            if own is None:
                del optimizer.step
            else:
                optimizer.step = own  # type: ignore[method-assign]

    # ------------------------------------------------------------------ clipping

    def clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """As Lightning's precision plugins do it, but for the multiplication, which is left to the updates.

        Norms that the background has not come to are computed here.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms, self._norms = self._norms, {}
        if any(accumulation_hooks(p) for p in parameters):  # they may have written other gradients since
            norms = {}
        total = get_total_norm([_known_norm(norms, each) for each in parameters])  # the norm of a norm is the norm
        coefficient = torch.clamp(clip_val / (total + 1e-6), max=1.0)
        self._clip = partial(clip_grads_with_norm_, max_norm=clip_val, total_norm=total) if coefficient != 1 else None

    def clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """As Lightning's precision plugins do it, but in the updates."""
        self._clip = partial(clip_grad_value_, clip_value=clip_val)

    def _measure_layer(self, layer: StreamedLayer) -> None:
        """The norms of a layer's gradients, while backward goes on. fp16 is left out: its norm depends on the threads."""
        gradients = [(p, p.grad) for p in _parameters_of(layer) if p.grad is not None]
        if any(g.layout is not torch.strided or g.dtype not in (torch.float32, torch.bfloat16) for _, g in gradients):
            return

        norms, device = self._norms, self._engine.device

        def measure() -> None:
            for parameter, gradient in gradients:
                if norms is self._norms:  # else the step went on without waiting for this
                    device.access(gradient, Stream.UPDATE, write=False)
                    norms[parameter] = gradient, gradient._version, torch.linalg.vector_norm(gradient)

        device.later(measure)

    def _clip_at_once(self) -> None:
        """Where no update does it: the step was not taken apart, or the scaler skipped it."""
        clip, self._clip = self._clip, None
        if clip is not None:
            clip([p for group in self._optimizer.param_groups for p in group["params"]])

    # ------------------------------------------------------------------ updates

    def _update_early(self, layer: StreamedLayer) -> None:
        """Backward has completed a layer's gradients."""
        if self._armed is None:
            self._armed = self._groups_by_layer() or {}
        groups = self._armed.pop(layer, None)
        if groups is not None:
            for parameter in _parameters_of(layer):
                if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                    raise RuntimeError(_NOT_ALL.format(what="there are sparse gradients"))
            self._updates.torn = 'a backward with optimizer_overlap="backward" failed after it had updated some layers'
            self._begun.add(layer)
            self._engine.before_early(layer)
            self._submit(layer, groups)
            self._updates.bound(self._engine.in_flight)  # and with them the gradients that wait

    def _take(self) -> None:
        """Backward and clipping are over: submit what is not updated yet."""
        self._engine.on_complete = None
        self._engine.before(deferred=bool(self._begun))  # a forward without backward may have left transfers
        by_layer = self._groups_by_layer()
        if by_layer is None and self._begun:
            raise RuntimeError(_NOT_ALL.format(what="there are sparse gradients, or groups have changed in backward"))
        if by_layer is None:
            self._clip_at_once()
        else:
            self._updates.torn = "the optimizer's step was interrupted, and may have updated some layers"
            for layer in self._engine.order():
                if layer in by_layer:
                    self._submit(layer, by_layer[layer])
            self._clip = None
            self._groups, self._optimizer.param_groups = self._optimizer.param_groups, self._none
        self._begun.clear()
        self._engine.over()
        self._updates.torn = None

    def _give_back_groups(self) -> None:
        if self._optimizer.param_groups is self._none:  # else the user has exchanged them
            self._optimizer.param_groups = self._groups

    def _groups_by_layer(self) -> dict[StreamedLayer, list[dict[str, Any]]] | None:
        """The groups as they are now (schedulers change them after the step), cut by layers; None if they cannot be."""
        found = defaultdict(list)
        for group in self._optimizer.param_groups:
            if not group.get("fused"):
                return None
            settings = tree_map(_snapshot, {key: value for key, value in group.items() if key != "params"})
            if self._early and not self._begun and _lacks_buffers(group, vars(self._optimizer)["state"]):
                return None
            parts = defaultdict(list)
            for parameter in group["params"]:
                layer = self._engine.layer_of(parameter)
                if layer is None:
                    return None
                if layer not in self._begun:
                    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                        return None
                    parts[layer].append(parameter)
            for layer, parameters in parts.items():
                found[layer].append({**settings, "params": parameters})
        return found

    def _submit(self, layer: StreamedLayer, groups: list[dict[str, Any]]) -> None:
        parameters = [parameter for group in groups for parameter in group["params"]]
        if type(self._optimizer) is self._class:
            self._optimizer.__class__ = _waiting(self._class, self._updates.finish)
            if self._known is None:
                self._known = set(vars(self._optimizer)["state"])
            self._updates.afterwards(partial(self._updated, self._known))
        part = object.__new__(self._class)
        vars(part).update(vars(self._optimizer), param_groups=groups)
        clip, engine = self._clip, self._engine

        def update() -> None:
            self._state.bring(layer, part)
            trained = [parameter for parameter in parameters if parameter.grad is not None]
            for parameter in trained:
                engine.device.access(parameter.grad, Stream.UPDATE, write=True)
            if clip is not None and trained:  # torch cannot clip nothing by value
                clip(trained)
            self._class.step.__wrapped__(part)  # type: ignore[attr-defined]  # without its hooks, which run once per step
            self._state.put(layer, part)
            engine.after(layer)

        release = partial(engine.release_gradients, layer, parameters) if self._early else None
        self._updates.submit(layer, update, release)

    def _updated(self, known: set[nn.Parameter]) -> None:
        """All updates are done. New state stands in the order of the groups, as the step of the whole would leave it."""
        self._optimizer.__class__ = self._class
        state = self._optimizer.state
        if len(state) > len(known):
            for parameter in [p for group in self._optimizer.param_groups for p in group["params"] if p in state]:
                if parameter not in known:
                    state[parameter] = state.pop(parameter)


def _parameters_of(layer: StreamedLayer) -> list[nn.Parameter]:
    """The host parameters of a layer, those that travel as casts included."""
    return [parameter for each in layer.family for parameter in each.block.parameters]


def _known_norm(norms: Norms, parameter: nn.Parameter) -> Tensor:
    """The norm of a parameter's gradient if it was measured and nobody has written the gradient since, else the gradient."""
    assert parameter.grad is not None
    gradient, version, norm = norms.get(parameter, (None, None, parameter.grad))
    return norm if gradient is parameter.grad and version == parameter.grad._version else parameter.grad


_NOT_ALL = (
    'optimizer_overlap="backward" updates layers one by one with a fused optimizer, but {what}. '
    'Use SuperpipelineStrategy(optimizer_overlap="forward").'
)


def _snapshot(setting: Any) -> Any:
    return setting.clone() if isinstance(setting, Tensor) else setting


def _lacks_buffers(group: dict[str, Any], state: dict[Any, Any]) -> bool:
    """Whether torch's fused SGD will not do once all gradients are there: some have a momentum buffer, others not yet."""
    buffers = [state.get(p, {}).get("momentum_buffer") is not None for p in group["params"] if p.requires_grad]
    return bool(group.get("momentum")) and any(buffers) and not all(buffers)


def _waiting(kind: type[Optimizer], finish: Callable[[], None]) -> type[Optimizer]:
    """The class of an optimizer while its updates are under way: whoever reads its state waits first."""

    def state(self: Optimizer) -> Any:
        finish()
        if "state" not in vars(self):  # a LightningOptimizer made meanwhile; it asks the optimizer that it wraps
            raise AttributeError("state")
        return vars(self)["state"]

    def set_state(self: Optimizer, value: Any) -> None:
        finish()
        vars(self)["state"] = value

    def reduce(self: Optimizer, protocol: Any) -> Any:
        finish()
        return self.__reduce_ex__(protocol)  # of its own class again

    methods = {"state": property(state, set_state), "__reduce_ex__": reduce}
    return type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__})
