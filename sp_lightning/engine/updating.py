"""Updating: the engine as an optimizer's step sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from sp_lightning.device.device import Device
from sp_lightning.device.modes import no_dispatch_modes
from sp_lightning.device.waits import Stream, Wait
from sp_lightning.engine.backward import Backward
from sp_lightning.engine.host_source import HostSource
from sp_lightning.engine.lent_weights import LentWeights
from sp_lightning.engine.residency import Residency
from sp_lightning.engine.step import Step
from sp_lightning.optim.background import Updates
from sp_lightning.weights.device_parameter import DeviceParameter, Untouched
from sp_lightning.weights.gradients import Gradients
from sp_lightning.weights.layer import Kind, StreamedLayer


class Updating:
    """What may be done to which layer when: :class:`~sp_lightning.optim.layerwise.Updatable`.

    Args:
        lock: the engine's.
        layers: all of them.
        residency, lent, source, step, backward, gradients, updates: the engine's parts.
        device: the seam.
    """

    def __init__(
        self,
        lock: threading.RLock,
        layers: Sequence[StreamedLayer],
        residency: Residency,
        lent: LentWeights,
        source: HostSource,
        step: Step,
        backward: Backward,
        gradients: Gradients,
        updates: Updates,
        device: Device,
    ) -> None:
        self._lock = lock
        self._layers = layers
        self._residency = residency
        self._lent = lent
        self._source = source
        self._step = step
        self._backward = backward
        self._gradients = gradients
        self.updates = updates
        self.device = device
        self._layer_of = {id(p): layer for layer in layers for p in layer.block.parameters}

    @property
    def in_flight(self) -> int:
        """How many layers' updates may be under way in backward, with the gradients that wait for them."""
        return self._gradients.drains.in_flight

    @property
    def on_complete(self) -> Callable[[StreamedLayer], None] | None:
        """Called in the backward that was announced, with each layer whose gradients are all in ``param.grad``."""
        return self._backward.on_complete

    @on_complete.setter
    def on_complete(self, call: Callable[[StreamedLayer], None] | None) -> None:
        self._backward.on_complete = call

    def layer_of(self, parameter: nn.Parameter) -> StreamedLayer | None:
        """The layer that a host parameter is updated with; None if it is none of the module's."""
        layer = self._layer_of.get(id(parameter))
        return None if layer is None else layer.owner

    def order(self) -> Iterator[StreamedLayer]:
        """What is needed first: residents, tables, then the layers as the next forward needs them."""
        residents = [layer for layer in self._layers if layer.kind is Kind.RESIDENTS]
        tables = [layer for layer in self._layers if layer.kind is Kind.TABLE]
        return iter(dict.fromkeys((*residents, *tables, *self._residency.prefetch.order("train"), *self._layers)))

    def before(self, *, deferred: bool, parameters: Iterable[Tensor] = ()) -> None:
        """An optimizer's step begins; nothing may read host weights while it writes them.

        Args:
            deferred: whether updates may go on meanwhile: the step only submits some, or has submitted some already.
            parameters: that it steps; if some are the device's, they are written where no version shows it (fused).
        """
        if not deferred:
            self.updates.finish()
        with self._lock:
            self._step.take_back_writes()
            self._step.compare_writes()
            self._source.synchronize()
            for parameter in parameters:
                self._note_step(parameter)

    def _note_step(self, parameter: Any) -> None:
        host = parameter
        if issubclass(type(parameter), DeviceParameter):
            parameter._of.exposed.add(parameter._index)
            host = parameter.host
        with Untouched():  # its update may be under way, and goes on
            layer = self._layer_of.get(id(host))
            if layer is not None and host.grad is not None:
                layer.parameters.steps += 1

    def before_early(self, layer: StreamedLayer) -> None:
        """A layer is about to be updated in the middle of backward; a fetch of it that nobody used may be under way."""
        layer.updated_early = True
        for member in layer.family:
            self._residency.slots.synchronize(Wait.UPDATE_AFTER_FETCH, member)
            if member.parameters.exposed:
                with self._lock, no_dispatch_modes():
                    self._lent.settle(member)
                member.parameters.exposed.clear()  # what the device has is not to be written over the update

    def after(self, layer: StreamedLayer) -> None:
        """In the background: a layer's weights are updated; its casts are made anew before anybody waits for them."""
        if layer.casts is not None:
            layer.casts.doubt()
            layer.casts.refresh(by=Stream.UPDATE)

    def over(self) -> None:
        """The step has submitted everything."""
        self._backward.forget_early_updates()

    def release_gradients(self, layer: StreamedLayer, parameters: Sequence[nn.Parameter]) -> None:
        """These parameters of a layer are updated and nobody needs their gradients any more."""
        for parameter in parameters:
            parameter.grad = None
        for member in layer.family:
            member.block.release_gradients()
