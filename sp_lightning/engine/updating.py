"""Updating: the engine as an optimizer's step sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.device.device import Wait
from sp_lightning.engine.backward import Backward
from sp_lightning.engine.step import Part, Step
from sp_lightning.engine.turns import Turns
from sp_lightning.layers.device_parameter import Untouched
from sp_lightning.layers.freed_gradient import forget, free
from sp_lightning.layers.layer import Kind, Slot, StreamedLayer
from sp_lightning.torch_compat.modes import held
from sp_lightning.updates.layer_stepper import LayerStepper


class Updating(Part):
    """The engine's side of updates: what :class:`~sp_lightning.engine.layerwise.LayerwiseStep` calls.

    Args:
        turns: which process may change the weights, and when.

    Attributes:
        backward: its ``on_complete`` is called in the backward that was announced, for each layer whose gradients are all in
            ``param.grad``. Its ``wanted`` says whether that would begin a layer's update: several devices agree on it before.
        several: whether there are several devices.
        step_seconds: seconds that optimizers' steps took on the host while the device had nothing to do.
    """

    def __init__(self, below: Part, step: Step, backward: Backward, turns: Turns) -> None:
        super().__init__(**vars(below))
        self._step = step
        self.backward = backward
        self.step_seconds = 0.0
        self._turns = turns
        self.several = turns.several
        self._place_of = {
            id(p): (layer, index) for layer in self.layers for index, p in enumerate(layer.block.parameters)
        }

    @property
    def stepper(self) -> LayerStepper:
        """Steps layers on the GPU."""
        return self.updates.stepper

    def step_on_host(self) -> None:
        """Lets the CPU step all layers except those that stay on the GPU. Called before the first step."""
        self.stepper.steps_all = self.gradients.stay = False

    def staying(self, layer: StreamedLayer) -> bool:
        """Whether the next step of a layer may write its slot on the device, where it stays; if so, nothing else uses the slot.

        If not, because user code holds a view of the slot, say, the host has the layer from now on.
        """
        if layer.own_slot is None:
            return False
        with held(self.lock):
            if not layer.can_stay or self.is_viewed(layer):
                self.updates.land(layer)
                return False
            layer.invalidate()
        return True

    def layer_of(self, parameter: nn.Parameter) -> StreamedLayer | None:
        """The layer that a host parameter is updated with; None if the parameter is not one of the module's."""
        place = self._place_of.get(id(parameter))
        return None if place is None else place[0].owner

    def order(self) -> Iterator[StreamedLayer]:
        """All layers: first residents and tables, then the others in the order in which the next forward needs them."""
        residents = [layer for layer in self.layers if layer.kind is Kind.RESIDENTS]
        tables = [layer for layer in self.layers if layer.kind is Kind.TABLE]
        return iter(dict.fromkeys((*residents, *tables, *self.residency.prefetch.order("train"), *self.layers)))

    def before(self, *, deferred: bool, parameters: Iterable[Tensor] = ()) -> None:
        """Prepares an optimizer's step: afterwards nothing reads the host's weights while the step writes them.

        Args:
            deferred: whether updates may go on meanwhile, because the step only submits some or has submitted some.
            parameters: the host parameters that it steps. A fused step writes them without a change of their versions.
        """
        if not deferred:
            self.updates.settle()
        with self.lock:
            self._step.take_back_writes()
            self._step.compare_writes()
            if not self.backward.tasks:  # in backward each weight may have a step of its own, and all are exchanged
                self._step.hold_host()
            self.source.synchronize()
            with Untouched():  # a parameter's update may be under way; nothing here has to wait for it
                for parameter in parameters:
                    place = self._place_of.get(id(parameter))
                    if place is not None and parameter.grad is not None:
                        layer, index = place
                        layer.parameters.unversioned_writes[index] += 1

    def resume(self) -> None:
        """Goes on with a manual step in a closure that an optimizer calls within its own step."""
        with self.lock:
            self._step.resume()

    def before_early_update(self, layer: StreamedLayer) -> None:
        """Prepares the update of a layer and its masters in the middle of backward.

        What user code may have written on the device is taken back, and has its last effect: later uses are refused.
        """
        layer.updated_early = True
        self.notice_uses(layer)
        for member in layer.family:
            # A fetch of the layer that was not used may be under way.
            self.residency.slots.synchronize(Wait.UPDATE_AFTER_FETCH, member)
            group, viewed = member.parameters, _viewed(member)
            if group.exposed or viewed is not None:
                with held(self.lock):
                    self.lent.take_back(member)
                    if viewed is not None:
                        self.lent.take_digests(viewed)  # a view that user code has may be written from now on, too
                # Otherwise what the device has, or other memory that a weight was given, would overwrite the update later.
                group.exposed.clear()
                group.replaced = {}

    def notice_uses(self, layer: StreamedLayer) -> None:
        """From now on each use of the weights of a layer, or its masters, by user code is noticed."""
        for group in [member.parameters for member in layer.family]:
            if group.attached:
                group.ask(before_use=True)

    def step_of(self, optimizer: Optimizer) -> str:
        """An optimizer's step, in words that tell it from other optimizers' by its first parameter."""
        first: Any = next((p for group in optimizer.param_groups for p in group["params"]), None)
        host = getattr(first, "host", first)
        place = self._place_of.get(id(host))
        name = "" if place is None else f" of {place[0].spans[place[1]].name!r} and others"
        return f"a step of {type(optimizer).__name__}{name}"

    def gather(self, optimizer: Optimizer) -> None:
        """Called before an optimizer updates its first layer. With several devices it waits for all of them."""
        self._turns.gather(partial(self.step_of, optimizer))

    def is_viewed(self, layer: StreamedLayer) -> bool:
        """Returns True if user code holds memory of a weight of the layer or its masters, on the host or the device."""
        return any(
            member.block.is_viewed or (member.slot is not None and member.slot.digests is not None) or _viewed(member)
            for member in layer.family
        )

    def release_gradients(self, layer: StreamedLayer, parameters: Sequence[nn.Parameter]) -> None:
        """Frees the gradients of these parameters of a layer, which are updated."""
        for parameter in parameters:
            if parameter.grad is not None:
                free(parameter)
        self.gradients.freed(layer)
        for member in layer.family:
            member.block.gradients.release()

    def forget_freed(self) -> None:
        """From now on gradients that were freed are None, as after ``zero_grad``."""
        for layer in self.layers:
            for parameter in layer.block.parameters:
                forget(parameter)


def _viewed(layer: StreamedLayer) -> Slot | None:
    """The layer's slot if a view of it was taken in this step that may be kept."""
    slot, group = layer.slot, layer.parameters
    own = len(group.all) if group.attached else 0
    return slot if slot is not None and slot.digests is None and slot.lease.in_use_beside(own) else None
