"""Updating: the engine as an optimizer's step sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.core.device.device import Wait
from sp_lightning.core.messages import WRITTEN_IN_CALL
from sp_lightning.core.torch_compat.modes import held
from sp_lightning.core.weights.device_parameter import Untouched
from sp_lightning.core.weights.gradient_roles import Norms, forget, free, has_gradient
from sp_lightning.core.weights.layer import Kind, StreamedLayer

if TYPE_CHECKING:
    from sp_lightning.core.engine.engine import Engine


class Updating:
    """The engine's side of updates, which :class:`~sp_lightning.core.updates.layerwise.LayerwiseStep` calls.

    Attributes:
        norms: computes norms of gradients on the host.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.norms = Norms()
        self._place_of = {
            id(p): (layer, index) for layer in engine.layers for index, p in enumerate(layer.block.parameters)
        }

    def layer_of(self, parameter: nn.Parameter) -> StreamedLayer | None:
        """Returns the layer that a host parameter is updated with; None if the module does not have the parameter."""
        place = self._place_of.get(id(parameter))
        return None if place is None else place[0].owner

    def name_of(self, parameter: Any) -> str | None:
        """Returns the name of a host parameter that is streamed; None for any other object."""
        place = self._place_of.get(id(parameter))
        return None if place is None else place[0].planned.spans[place[1]].name

    def owns(self, parameter: nn.Parameter) -> bool:
        """Returns True if this process steps a host parameter."""
        layer = self.layer_of(parameter)
        return layer is None or self.engine.owners.owns(layer)

    def order(self) -> Iterator[StreamedLayer]:
        """Returns all layers: residents and tables first, then the others in the order in which the next forward needs them."""
        engine = self.engine
        residents = [layer for layer in engine.layers if layer.kind is Kind.RESIDENTS]
        tables = [layer for layer in engine.layers if layer.kind is Kind.TABLE]
        return iter(dict.fromkeys((*residents, *tables, *engine.residency.prefetch.order("train"), *engine.layers)))

    def before(self, *, deferred: bool, parameters: Iterable[Tensor] = ()) -> None:
        """Prepares an optimizer's step: nothing reads the host's weights while the step writes them.

        Writes on the device are copied to the host. Outside of backward, modules hold host parameters afterwards.

        Args:
            deferred: True if updates may run meanwhile, because the step only submits updates, or has submitted some.
            parameters: the host parameters that the step writes. Their writes are counted here, because a fused step does not
                change versions.

        Raises:
            RuntimeError: a call of the layer of one of these parameters runs.
        """
        engine = self.engine
        if running := {layer for layer in engine.residency.used if layer.running_calls}:
            self._refuse_in_calls(running, parameters)
        if engine.backward.tasks:
            engine.backward.settle()
        if not deferred:
            engine.updates.wait_for_all()
        with engine.lock:
            engine.step.write_back()
            # In backward, where hooks may step each weight, modules keep device parameters.
            if not engine.backward.tasks:
                engine.step.hold_host()
            engine.source.synchronize()
            with Untouched():  # reading `grad` would wait for a running update of the parameter
                for parameter in parameters:
                    place = self._place_of.get(id(parameter))
                    if place is not None and has_gradient(parameter):
                        layer, index = place
                        layer.parameters.unversioned_writes[index] += 1

    def _refuse_in_calls(self, running: set[StreamedLayer], parameters: Iterable[Tensor]) -> None:
        """Raises a RuntimeError if a step would write a parameter of one of these layers, whose calls run."""
        for parameter in parameters:
            layer, index = self._place_of.get(id(parameter), (None, 0))
            if layer is not None and not running.isdisjoint(layer.owner.with_masters) and parameter.grad is not None:
                what = f"An optimizer would step {layer.spans[index].name!r}"
                raise RuntimeError(WRITTEN_IN_CALL.format(what=what, layer=layer.name))

    def resume(self) -> None:
        """Puts device parameters into the modules again, for a closure that an optimizer calls within its own step."""
        engine = self.engine
        engine.owners.refuse_closure()
        with engine.lock:
            engine.step.resume()

    def before_early_update(self, layer: StreamedLayer) -> None:
        """Prepares the update of a layer and its masters in the middle of backward.

        Weights that user code has written on the device are copied to the host. Later uses of the layer in this backward are
        errors.
        """
        engine = self.engine
        layer.updated_early = True
        self.notice_uses(layer)
        for member in layer.with_masters:
            # A prefetch of the layer may be in flight, although no call has used it.
            engine.residency.slots.synchronize(Wait.UPDATE_AFTER_FETCH, member)
            if member.parameters.exposed:  # a layer that user code still views is not updated early
                with held(engine.lock):
                    engine.writes.write_back(member)
                # Otherwise the layer's release would copy the device's values to the host, and overwrite the update.
                member.parameters.exposed.clear()
            if engine.writes.given:
                with held(engine.lock):
                    engine.writes.compare_given(member, forget=True)

    def notice_uses(self, layer: StreamedLayer) -> None:
        """Notices, from now on, each use of the weights of a layer, or its masters, by user code."""
        for member in layer.with_masters:
            if member.state.attached:
                member.parameters.notice_uses(True)

    def step_of(self, optimizer: Optimizer) -> str:
        """Returns the name of an optimizer's step, with its first parameter, which distinguishes optimizers."""
        first: Any = next((p for group in optimizer.param_groups for p in group["params"]), None)
        host = getattr(first, "host", first)  # a device parameter has this attribute
        place = self._place_of.get(id(host))
        name = "" if place is None else f" of {place[0].spans[place[1]].name!r} and others"
        return f"a step of {type(optimizer).__name__}{name}"

    def gather(self, optimizer: Optimizer) -> None:
        """Called before an optimizer updates its first layer. With several devices it waits for all of them."""
        self.engine.owners.gather(optimizer, partial(self.step_of, optimizer))

    def is_viewed(self, layer: StreamedLayer) -> bool:
        """Returns True if user code holds memory of a weight of the layer or its masters, on the host or the device."""
        return any(member.block.is_viewed or _is_viewed(member) for member in layer.with_masters)

    def release_gradients(self, layer: StreamedLayer, parameters: Sequence[nn.Parameter]) -> None:
        """Frees the gradients of these parameters of a layer after their update, and the memory of the layer's gradients."""
        for parameter in parameters:
            if parameter.grad is not None:
                free(parameter)
        self.engine.gradients.freed(layer)
        for member in layer.with_masters:
            member.block.gradients.release()

    def forget_freed(self) -> None:
        """Makes freed gradients None from now on, as after ``zero_grad``."""
        for layer in self.engine.layers:
            for parameter in layer.block.parameters:
                forget(parameter)


def _is_viewed(layer: StreamedLayer) -> bool:
    """Returns True if user code has taken a view of the layer's slot, in this step or before, and may keep it."""
    own = len(layer.parameters.all) - len(layer.parameters.retyped) if layer.state.attached else 0
    return layer.slot is not None and layer.slot.lease.in_use_beside(own)
