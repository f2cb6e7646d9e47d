"""Uses: all requests for a layer outside of module calls, at the moment when its weights are needed:

- an operation computes with a stand-in (:meth:`Uses.operation_on`, called by the stand-in's class),
- a batch looks up rows of a table (:meth:`Uses.reading_rows`),
- user code reads or writes weights on the host, or gives them other memory.

A wrong guess of the prefetch costs a fetch and never a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sp_lightning.core.device.device import Stream, Wait
from sp_lightning.core.engine.graph import RunningCalls, packs
from sp_lightning.core.engine.host_source import tied
from sp_lightning.core.engine.schedule import WRITTEN_IN_CALL
from sp_lightning.core.layers.device_parameter import DeviceParameter
from sp_lightning.core.layers.layer import StreamedLayer
from sp_lightning.core.layers.ring import Staged
from sp_lightning.core.torch_compat.modes import held, never_compiled

if TYPE_CHECKING:
    from sp_lightning.core.engine.engine import Engine


class Uses:
    """Fetches and attaches layers on request. Device parameters call it as ``ParameterGroup.engine``.

    Attributes:
        device: the device.
        hooks: makes the context of the engine's saved-tensor hooks.
        gradient_arrived, gradients_complete: called for each gradient; see :class:`~sp_lightning.core.engine.graph.Backward`.
        calls: the calls of modules that are running.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.device = engine.device
        self.hooks = engine.saved_tensors.hooks
        self.gradient_arrived = engine.backward.gradient_arrived
        self.gradients_complete = engine.backward.complete
        self.calls = RunningCalls()

    # ------------------------------------------------------------------ weights are used outside module calls

    def saves_raw(self) -> bool:
        """Returns True if autograd would now save tensors as they are: the engine's saved-tensor hooks are not active."""
        return torch.is_grad_enabled() and not packs()

    def refuse_over(self, name: str) -> None:
        """Raises an error for the use of a device parameter if the run is over.

        Raises:
            RuntimeError: the run is over.
        """
        if self.engine.closed:
            raise RuntimeError(
                f"{name!r} was taken within a step of a run that is over, and is used now: it has no memory any more. Take "
                f"it from its module: dict(module.named_parameters())[{name!r}]."
            )

    @contextmanager
    def operation_on(self, parameters: Sequence[DeviceParameter], *, casts: bool = False) -> Iterator[None]:
        """A context for one operation on device parameters, in which their layers are attached.

        Args:
            parameters: the parameters.
            casts: True if the parameters are masters, and the operation uses their casts.

        Raises:
            RuntimeError: the run is over; the step computes on another stream; or the running backward has updated a layer
                already.
        """
        engine = self.engine
        name = parameters[0]._of.spans[parameters[0]._index].name
        self.refuse_over(name)
        wanted: set[StreamedLayer] = {parameter._of.layer for parameter in parameters}
        residents = engine.residents.layer in wanted
        layers = sorted(wanted - {engine.residents.layer}, key=lambda layer: layer.index)
        if casts:  # the casts are in the slots of the masters' owners
            layers = [masters.owner for masters in layers]
        with held(engine.lock):
            engine.step.refuse_other_stream(name)
            for layer in layers:
                layer.refuse_updated()
                layer.rows.need(None)  # all rows
            engine.residency.begin_call(layers, backward=bool(engine.backward.tasks))
        try:
            if residents:
                with held(engine.lock):
                    engine.residents.refresh()
                    engine.residents.group.notice_uses(False)  # they are on the device, so the operation may use them
            for layer in layers if torch.is_grad_enabled() else ():
                layer.rows.read_whole()
            if engine.backward.tasks:
                engine.backward.make_room(layers)
            yield
        finally:
            with held(engine.lock):
                self._end_operation(layers, residents=residents)

    def _end_operation(self, layers: Sequence[StreamedLayer], *, residents: bool) -> None:
        """Ends :meth:`operation_on`: copies written residents to the host, and prefetches.

        If the next operation has to be noticed, layers without a running call are released. Otherwise they stay locked for it.

        Args:
            layers: the layers of the operation.
            residents: True if the operation also used residents.
        """
        engine = self.engine
        engine.residency.end_call(layers, release=False)
        if residents and not engine.swap.on_device:
            engine.residents.write_back()
            engine.residents.group.notice_uses(True)
        if self.saves_raw() or not engine.swap.on_device:
            # Afterwards the parameters are stand-ins, so the next operation is noticed. This is necessary if autograd would save
            # the weights' memory itself, or if modules hold host parameters, which user code may write.
            engine.residency.release_unpinned()
        engine.residency.fetch_ahead()

    @contextmanager
    def reading_rows(self, layer: StreamedLayer) -> Iterator[Staged | None]:
        """A context in which a table's weight on the host is current and is not written.

        Yields the weight's bytes, from which rows are gathered. If the whole weight is on the device, yields None, because user
        code may have written the weight on the device.

        Raises:
            RuntimeError: the step computes on another stream, or the running backward has already updated the table.
        """
        engine = self.engine
        with held(engine.lock):
            engine.step.refuse_other_stream(layer.name)
            layer.refuse_updated()
            layer.parameters.sync_requires_grad()
            staged = None
            if layer.slot is None:
                engine.residency.release_exchanged(layer)
                staged = engine.source.stage(layer)
            yield staged

    # ------------------------------------------------------------------ weights are written through .data

    def write_back(self, layer: StreamedLayer) -> None:
        """Waits for a layer's update, and copies weights to the host that were written on the device, or may have been."""
        engine = self.engine
        with held(engine.lock):
            engine.updates.wait(layer, Wait.READ_AFTER_UPDATE)
            engine.writes.write_back(layer)

    def host_is_used(self, layer: StreamedLayer) -> None:
        """Prepares for user code that reads or writes host weights of a layer.

        Copies weights that were written on the device to the host, and waits for transfers that read the host weights.
        """
        engine = self.engine
        with held(engine.lock):
            if engine.swap.on_device and layer.parameters.written():
                engine.step.write_back()
            # Residents are always attached, so their next use would not be noticed otherwise.
            if layer is engine.residents.layer:
                engine.residents.group.notice_uses(True)
            self.device.synchronize(layer.transfer, Wait.UPDATE_AFTER_FETCH)

    def host_was_used(self, layer: StreamedLayer, *, viewed: bool) -> None:
        """Uploads host weights that user code has written, if tensors view the layer's slot.

        Args:
            layer: the layer.
            viewed: True if user code has made a view of a host weight, through which it may write the weight later.

        Raises:
            RuntimeError: a call of the layer runs, and would miss the write.
        """
        engine = self.engine
        with held(engine.lock):
            if layer is engine.residents.layer:
                if viewed:
                    engine.residents.current = False
                elif engine.swap.on_device or self.calls.depth:
                    engine.residents.refresh()
                return
            if viewed and layer in engine.residency.used:
                self._refuse_shown(layer)
            for member in layer.owner.with_masters:
                if not member.stale:
                    continue
                if member in engine.residency.used:
                    engine.residency.renew(member)
                # If a host parameter was given other memory, views of the slot keep the old values, so they are not renewed.
                elif member.guard is not None and member.guard.views and not member.block.displaced:
                    member.invalidate()
                    engine.residency.renew_views()

    def host_is_shown(self, layer: StreamedLayer) -> None:
        """Prepares for user code that gets the host's memory of a weight. No version shows its writes to that memory.

        The copy on the device is marked as out of date.

        Raises:
            RuntimeError: see :meth:`_refuse_shown`.
        """
        engine = self.engine
        self.host_is_used(layer)
        with held(engine.lock):
            if layer is engine.residents.layer:
                engine.residents.current = False
            elif layer in engine.residency.used and layer.running_calls:
                self._refuse_shown(layer)
            else:
                engine.residency.release_unpinned()
                engine.source.invalidate(
                    [member for member in layer.owner.with_masters if member not in engine.residency.used]
                )

    def _refuse_shown(self, layer: StreamedLayer) -> None:
        """Refuses to give out the host's memory of a layer in use, because the call would miss a write to that memory.

        Raises:
            RuntimeError: modules hold host parameters: user code has called backward in the layer's call.
        """
        # If modules hold device parameters, another thread gets the memory, and only reads it.
        if not self.engine.swap.on_device:
            what = f"A weight of {layer.name!r} was read through .data, .detach() or a view, which may be written,"
            raise RuntimeError(WRITTEN_IN_CALL.format(what=what, layer=layer.name))

    def device_is_used(self, layer: StreamedLayer) -> None:
        """Releases a layer in use if modules hold host parameters, and user code has written them.

        Raises:
            RuntimeError: a call of the layer runs, and would continue with the old weights.
        """
        engine = self.engine
        with held(engine.lock):
            if layer.stale and layer in engine.residency.used and not engine.swap.on_device:
                engine.residency.renew(layer)

    def replacing(self, layer: StreamedLayer, index: int, value: Tensor) -> None:
        """Prepares ``param.data = value``: graphs that saved views of the weight keep its old values.

        Raises:
            RuntimeError: the value is in the memory of another parameter, or has other strides.
        """
        engine = self.engine
        with held(engine.lock):
            self._refuse_tying(layer, index, value)
            engine.writes.replace(layer, index, value, engine.activations.first_run())

    def _refuse_tying(self, layer: StreamedLayer, index: int, value: Tensor) -> None:
        """Raises a RuntimeError if a value that a weight is about to get is in the device memory of another weight."""
        other = self.layer_at(value.untyped_storage().data_ptr())
        if other is not None:
            at = other.parameters.at(int(value.storage_offset()) * value.element_size())
            if at is not None and (other, at) != (layer, index):
                raise RuntimeError(tied(layer.planned.spans[index].name, other.planned.spans[at].name))

    def layer_at(self, address: int) -> StreamedLayer | None:
        """Returns the layer whose weights are in the device storage at an address; None if no layer has this storage."""
        engine = self.engine
        slot = engine.residency.slots.by_address.get(address)
        if slot is not None:
            return slot.layer
        return engine.residents.layer if address == engine.residents.address else None

    # ------------------------------------------------------------------ gradients are used in backward

    @never_compiled  # backward may run, and gradients arrive
    def gradient_is_used(self, layer: StreamedLayer) -> None:
        """Prepares for user code that reads or sets ``param.grad`` of a layer.

        In a hook of backward, makes ``param.grad`` complete as far as backward has come: gradients may be in flight.

        Raises:
            RuntimeError: the running backward has updated the layer already; or there are several devices.
        """
        if self.engine.backward.tasks:
            self.engine.backward.settle()  # may complete the layer's gradients, so that the layer is updated
            layer.refuse_updated("a hook used p.grad of one of its weights")

    # ------------------------------------------------------------------ threads, hooks, refusals

    def at_host(self) -> bool:
        """Returns True if this thread gets host parameters: no step, call or backward runs, or the thread is outside the run.

        False after the run, so that a use of a device parameter raises an error (:meth:`refuse_over`).
        """
        engine = self.engine
        return engine.backward.at_host() or not (engine.closed or engine.threads.own)

    def copied(self, layer: StreamedLayer, index: int) -> Tensor | None:
        """Copies a weight that may have been written on the device, for a thread that only reads it.

        Returns:
            The copy, an inference tensor, so that writing it raises an error; None if the host's weight has the present values.
        """
        group = layer.parameters
        if not group.written():
            return None
        with held(self.engine.lock):
            if not layer.state.attached:
                return None
            value = layer.rows.completed(index, group.value(index), self.engine.residency.slots.by_address)
            self.device.access(value, Stream.COMPUTE, write=False)
            with torch.inference_mode():
                return value.clone()
