"""Uses: all requests for a layer outside of module calls, at the moment when its weights are needed:

- an operation computes with a stand-in (:meth:`Uses.operation_on`, called by the stand-in's class),
- a batch looks up rows of a table (:meth:`Uses.reading_rows`),
- user code reads or writes weights on the host, or gives them other memory.

A wrong guess of the prefetch costs a fetch and never a result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.device.own_threads import OwnThreads
from sp_lightning.core.engine.activations import Activations
from sp_lightning.core.engine.graph import Backward, RunningCalls, packs
from sp_lightning.core.engine.host_source import HostSource, tied
from sp_lightning.core.engine.schedule import WRITTEN_IN_CALL, Residency
from sp_lightning.core.engine.step import Step
from sp_lightning.core.layers.device_parameter import DeviceParameter
from sp_lightning.core.layers.layer import StreamedLayer
from sp_lightning.core.layers.residents import Residents
from sp_lightning.core.layers.ring import Staged
from sp_lightning.core.layers.swap import ParameterSwap
from sp_lightning.core.layers.writes import WriteBack
from sp_lightning.core.torch_compat.modes import held, never_compiled
from sp_lightning.core.updates.background import BackgroundUpdates


@dataclass(eq=False, repr=False, kw_only=True)
class Uses:
    """Fetches and attaches layers on request. Device parameters call it as ``ParameterGroup.engine``.

    Attributes:
        lock: the engine's lock.
        threads: the threads that belong to the run.
        hooks: makes the context of the engine's saved-tensor hooks.
        calls: the calls of modules that are running.
    """

    lock: threading.RLock
    threads: OwnThreads
    device: Device
    residency: Residency
    residents: Residents
    source: HostSource
    swap: ParameterSwap
    writes: WriteBack
    activations: Activations
    updates: BackgroundUpdates
    step: Step
    backward: Backward
    hooks: Callable[[], AbstractContextManager[None]]

    def __post_init__(self) -> None:
        self.gradient_arrived = self.backward.gradient_arrived  # called for each gradient
        self.gradients_complete = self.backward.complete
        self.calls = RunningCalls()
        self._closed = False

    # ------------------------------------------------------------------ weights are used outside module calls

    def saves_raw(self) -> bool:
        """Returns True if autograd would now save tensors as they are: the engine's saved-tensor hooks are not active."""
        return torch.is_grad_enabled() and not packs()

    def refuse_over(self, name: str) -> None:
        """Raises an error for the use of a device parameter if the run is over.

        Raises:
            RuntimeError: the run is over.
        """
        if self._closed:
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
        name = parameters[0]._of.spans[parameters[0]._index].name
        self.refuse_over(name)
        wanted: set[StreamedLayer] = {parameter._of.layer for parameter in parameters}
        residents = self.residents.layer in wanted
        layers = sorted(wanted - {self.residents.layer}, key=lambda layer: layer.index)
        if casts:  # the casts are in the slots of the masters' owners
            layers = [masters.owner for masters in layers]
        with held(self.lock):
            self.step.refuse_other_stream(name)
            for layer in layers:
                layer.refuse_updated()
                layer.rows.need(None)  # all rows
            self.residency.begin_call(layers, backward=bool(self.backward.tasks))
        try:
            if residents:
                with held(self.lock):
                    self.residents.refresh()
                    self.residents.group.notice_uses(False)  # they are on the device, so the operation may use them
            for layer in layers if torch.is_grad_enabled() else ():
                layer.rows.read_whole()
            if self.backward.tasks:
                self.backward.make_room(layers)
            yield
        finally:
            with held(self.lock):
                self._end_operation(layers, residents=residents)

    def _end_operation(self, layers: Sequence[StreamedLayer], *, residents: bool) -> None:
        """Ends :meth:`operation_on`: copies written residents to the host, and prefetches.

        If the next operation has to be noticed, layers without a running call are released. Otherwise they stay locked for it.

        Args:
            layers: the layers of the operation.
            residents: True if the operation also used residents.
        """
        self.residency.end_call(layers, release=False)
        if residents and not self.swap.on_device:
            self.residents.write_back()
            self.residents.group.notice_uses(True)
        if self.saves_raw() or not self.swap.on_device:
            # Afterwards the parameters are stand-ins, so the next operation is noticed. This is necessary if autograd would save
            # the weights' memory itself, or if modules hold host parameters, which user code may write.
            self.residency.release_unpinned()
        self.residency.fetch_ahead()

    @contextmanager
    def reading_rows(self, layer: StreamedLayer) -> Iterator[Staged | None]:
        """A context in which a table's weight on the host is current and is not written.

        Yields the weight's bytes, from which rows are gathered. If the whole weight is on the device, yields None, because user
        code may have written the weight on the device.

        Raises:
            RuntimeError: the step computes on another stream, or the running backward has already updated the table.
        """
        with held(self.lock):
            self.step.refuse_other_stream(layer.name)
            layer.refuse_updated()
            layer.parameters.sync_requires_grad()
            staged = None
            if layer.slot is None:
                self.residency.release_exchanged(layer)
                staged = self.source.stage(layer)
            yield staged

    # ------------------------------------------------------------------ weights are written through .data

    def write_back(self, layer: StreamedLayer) -> None:
        """Waits for a layer's update, and copies weights to the host that were written on the device, or may have been."""
        with held(self.lock):
            self.updates.wait(layer, Wait.READ_AFTER_UPDATE)
            self.writes.write_back(layer)

    def host_is_used(self, layer: StreamedLayer) -> None:
        """Prepares for user code that reads or writes host weights of a layer.

        Copies weights that were written on the device to the host, and waits for transfers that read the host weights.
        """
        with held(self.lock):
            if self.swap.on_device and layer.parameters.written():
                self.step.write_back()
            # Residents are always attached, so their next use would not be noticed otherwise.
            if layer is self.residents.layer:
                self.residents.group.notice_uses(True)
            self.device.synchronize(layer.transfer, Wait.UPDATE_AFTER_FETCH)

    def host_was_used(self, layer: StreamedLayer, *, viewed: bool) -> None:
        """Uploads host weights that user code has written, if tensors view the layer's slot.

        Args:
            layer: the layer.
            viewed: True if user code has made a view of a host weight, through which it may write the weight later.

        Raises:
            RuntimeError: a call of the layer runs, and would miss the write.
        """
        with held(self.lock):
            if layer is self.residents.layer:
                if viewed:
                    self.residents.current = False
                elif self.swap.on_device or self.calls.depth:
                    self.residents.refresh()
                return
            if viewed and layer in self.residency.used:
                self._refuse_shown(layer)
            for member in layer.owner.with_masters:
                if not member.stale:
                    continue
                if member in self.residency.used:
                    self.residency.renew(member)
                # If a host parameter was given other memory, views of the slot keep the old values, so they are not renewed.
                elif member.guard is not None and member.guard.views and not member.block.displaced:
                    member.invalidate()
                    self.residency.renew_views()

    def host_is_shown(self, layer: StreamedLayer) -> None:
        """Prepares for user code that gets the host's memory of a weight. No version shows its writes to that memory.

        The copy on the device is marked as out of date.

        Raises:
            RuntimeError: see :meth:`_refuse_shown`.
        """
        self.host_is_used(layer)
        with held(self.lock):
            if layer is self.residents.layer:
                self.residents.current = False
            elif layer in self.residency.used and layer.running_calls:
                self._refuse_shown(layer)
            else:
                self.residency.release_unpinned()
                self.source.invalidate(
                    [member for member in layer.owner.with_masters if member not in self.residency.used]
                )

    def _refuse_shown(self, layer: StreamedLayer) -> None:
        """Refuses to give out the host's memory of a layer in use, because the call would miss a write to that memory.

        Raises:
            RuntimeError: modules hold host parameters: user code has called backward in the layer's call.
        """
        # If modules hold device parameters, another thread gets the memory, and only reads it.
        if not self.swap.on_device:
            what = f"A weight of {layer.name!r} was read through .data, .detach() or a view, which may be written,"
            raise RuntimeError(WRITTEN_IN_CALL.format(what=what, layer=layer.name))

    def device_is_used(self, layer: StreamedLayer) -> None:
        """Releases a layer in use if modules hold host parameters, and user code has written them.

        Raises:
            RuntimeError: a call of the layer runs, and would continue with the old weights.
        """
        with held(self.lock):
            if layer.stale and layer in self.residency.used and not self.swap.on_device:
                self.residency.renew(layer)

    def replacing(self, layer: StreamedLayer, index: int, value: Tensor) -> None:
        """Prepares ``param.data = value``: graphs that saved views of the weight keep its old values.

        Raises:
            RuntimeError: the value is in the memory of another parameter, or has other strides.
        """
        with held(self.lock):
            self._refuse_tying(layer, index, value)
            self.writes.replace(layer, index, value, self.activations.first_run())

    def _refuse_tying(self, layer: StreamedLayer, index: int, value: Tensor) -> None:
        """Raises a RuntimeError if a value that a weight is about to get is in the device memory of another weight."""
        other = self.layer_at(value.untyped_storage().data_ptr())
        if other is not None:
            at = other.parameters.at(int(value.storage_offset()) * value.element_size())
            if at is not None and (other, at) != (layer, index):
                raise RuntimeError(tied(layer.planned.spans[index].name, other.planned.spans[at].name))

    def layer_at(self, address: int) -> StreamedLayer | None:
        """Returns the layer whose weights are in the device storage at an address; None if no layer has this storage."""
        slot = self.residency.slots.by_address.get(address)
        if slot is not None:
            return slot.layer
        return self.residents.layer if address == self.residents.address else None

    # ------------------------------------------------------------------ gradients are used in backward

    @never_compiled  # backward may run, and gradients arrive
    def gradient_is_used(self, layer: StreamedLayer) -> None:
        """Prepares for user code that reads or sets ``param.grad`` of a layer.

        In a hook of backward, makes ``param.grad`` complete as far as backward has come: gradients may be in flight.

        Raises:
            RuntimeError: the running backward has updated the layer already; or there are several devices.
        """
        if self.backward.tasks:
            self.backward.settle()  # may complete the layer's gradients, so that the layer is updated
            layer.refuse_updated("a hook used p.grad of one of its weights")

    # ------------------------------------------------------------------ threads, hooks, refusals

    def close(self) -> None:
        """Called at the end of the run. Later uses of device parameters raise an error."""
        self._closed = True

    def at_host(self) -> bool:
        """Returns True if this thread gets host parameters: no step, call or backward runs, or the thread is outside the run.

        False after the run, so that a use of a device parameter raises an error (:meth:`refuse_over`).
        """
        return self.backward.at_host() or not (self._closed or self.threads.own)

    def copied(self, layer: StreamedLayer, index: int) -> Tensor | None:
        """Copies a weight that may have been written on the device, for a thread that only reads it.

        Returns:
            The copy, an inference tensor, so that writing it raises an error; None if the host's weight has the present values.
        """
        group = layer.parameters
        if not group.written():
            return None
        with held(self.lock):
            if not layer.state.attached:
                return None
            value = layer.rows.completed(index, group.value(index), self.residency.slots.by_address)
            self.device.access(value, Stream.COMPUTE, write=False)
            with torch.inference_mode():
                return value.clone()
