"""Lent weights: gives modules the weights of the layers in use, and takes back to the host what they wrote there."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sp_lightning.layers.device_parameter import same_place
from sp_lightning.layers.layer import Slot, StreamedLayer
from sp_lightning.layers.slots import Slots
from sp_lightning.layers.states import RESTING
from sp_lightning.layers.write_back import WriteBack
from sp_lightning.layers.write_guard import drop_if_empty, guard_of
from sp_lightning.torch_compat.modes import no_inference_mode


class SlotUsers:
    """The users of a layer's memory while the layer is in use: here there are none, as in a simulation.

    Args:
        slots: the slots, whose memory is lent.

    Attributes:
        held: released layers of which something still holds device parameters.
        replaced: released layers with weights in other memory, which user code holds.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.held: set[StreamedLayer] = set()
        self.replaced: set[StreamedLayer] = set()

    def before_use(self, layer: StreamedLayer) -> None:
        """Called before a layer is used, if some are ``replaced``: its weights on the host have to be up to date then."""

    def take_back_late(self, slots: Iterable[Slot]) -> None:
        """Called before slots are overwritten: what was written there is lost afterwards."""

    def fetched(self, layer: StreamedLayer) -> None:
        """Called when the transfer of a layer to the device was issued."""

    def move_in(self, layer: StreamedLayer, slot: Slot) -> None:
        """Called when a call uses a layer: gives the modules its weights on the device."""

    def release(self, layer: StreamedLayer, slot: Slot) -> None:
        """Called when no call uses a layer any more: takes its memory from the modules, and releases the slot."""
        self._slots.release(layer, slot)

    def before_renewal(self, layer: StreamedLayer) -> None:
        """Called before the host's present weights are copied to a layer in use, over those that its calls have used so far."""

    def renewed(self, layer: StreamedLayer, slot: Slot) -> None:
        """Called when they have arrived."""

    def rest(self, layer: StreamedLayer) -> None:
        """Called instead of :meth:`release` where no call uses a layer any more and it keeps its slot."""

    def written(self, layer: StreamedLayer) -> bool:
        """Whether a layer that rests may have been written on the device, so that something is to be taken back."""
        return False

    def free_dropped(self) -> bool:
        """Takes the memory from device parameters that user code has dropped. Returns whether any of a layer were held."""
        return False


class BoundWeights(SlotUsers):
    """The tenants of a real model's slots: its device parameters. The caller holds the engine's lock.

    Args:
        slots: the slots, whose memory the device parameters are given.
        writes: copies to the host what was written on the device.
        watched: whether ``debug_writes`` looks for writes.
    """

    def __init__(self, slots: Slots, writes: WriteBack, *, watched: bool) -> None:
        super().__init__(slots)
        self._writes = writes
        self._watched = watched
        self.replaced = writes.replaced

    # ------------------------------------------------------------------ a use begins

    def before_use(self, layer: StreamedLayer) -> None:
        """Takes back what was written outside the layer's slot, before the layer is fetched or used."""
        for member in layer.family:
            self._writes.take_back_replaced(member)

    def take_back_late(self, slots: Iterable[Slot]) -> None:
        """Takes back what was written through views of these slots, which are about to be overwritten."""
        self._writes.take_back_late(slots)

    def fetched(self, layer: StreamedLayer) -> None:
        """Notes that the device's copy is that of the host's present parameters."""
        layer.parameters.fetched()
        if layer.guard is not None and layer.guard.digests is not None and layer.slot is not None:
            self._slots.join(layer.slot)  # user code that holds the slot may read it at any time
            self._writes.take_digests(layer.slot)

    def move_in(self, layer: StreamedLayer, slot: Slot) -> None:
        """Makes the layer's device parameters views of its slot."""
        group = layer.parameters
        views = slot.lease.views(layer.layout, layer.spans)
        if not layer.state.attached:
            group.attach(views[: len(group.all)])  # (3)
            if self._watched:  # with debug_writes, every weight on the device may have been written there
                group.expose()
        elif layer.state is RESTING:
            group.ask(before_use=False)
        if layer.owner.updated_early:  # what user code does with weights that backward has updated is refused
            group.ask(before_use=True)
        group.sync_requires_grad()
        if not layer.whole:
            layer.casts.offer(views[len(group.all) :])

    def before_renewal(self, layer: StreamedLayer) -> None:
        """Takes back what was written on the device, and refuses weights that were given other memory on the host.

        Raises:
            RuntimeError: one was, or one was written on the host and on the device.
        """
        if layer.parameters.changed:
            self._writes.take_back(layer)
        for member in layer.family:
            for index in member.block.displaced:
                raise RuntimeError(
                    f"Parameter {member.planned.spans[index].name!r} was given other memory (param.data = other) while a call "
                    f"of its layer {layer.name!r} was running. The call continues with the old memory. Write it in place: "
                    "param.data.copy_(other)."
                )

    def refuse_viewed(self, layer: StreamedLayer) -> None:
        """Refuses writes on the host that no version shows while user code views the memory of a layer in use.

        Raises:
            RuntimeError: it does.
        """
        group = layer.parameters
        if layer.slot is not None and layer.slot.lease.in_use_beside(len(group.all) if layer.state.attached else 0):
            raise RuntimeError(
                f"A weight of {layer.name!r} was read through .data, .detach() or a view while an older view is kept, after a "
                "backward inside a call of this layer. The older view would miss a write. Drop such views before the backward "
                "(del view), and take new ones after the write."
            )

    def renewed(self, layer: StreamedLayer, slot: Slot) -> None:
        """Copies the new values to weights that were given other memory in this use, and offers the new casts."""
        group, guard = layer.parameters, layer.guard
        places = self._slots.views(layer, slot)
        with no_inference_mode(), torch.no_grad(), torch.DisableTorchFunctionSubclass():
            for index in range(len(group.all)):
                value = group.value(index)
                if guard is not None and index in guard.retyped:
                    value.copy_(group.hosts[index])
                elif not same_place(value, places[index]):
                    value.copy_(places[index])
        self.move_in(layer, slot)

    # ------------------------------------------------------------------ a use ends

    def rest(self, layer: StreamedLayer) -> None:
        """Has every use of the layer's weights noticed, as while it is away."""
        layer.parameters.ask(before_use=True)
        layer.casts.withdraw()

    def written(self, layer: StreamedLayer) -> bool:
        """Whether something of a resting layer may be left to take back."""
        return layer.parameters.written()

    def release(self, layer: StreamedLayer, slot: Slot) -> None:
        """Takes back what was written on the device, makes the device parameters stand-ins, and releases the slot.

        Raises:
            RuntimeError: a weight was written in a way that is refused. The slot is released all the same.
        """
        guard = layer.guard
        try:
            if layer.state.attached:
                self._detach(layer, slot)
            elif (
                guard is not None and guard.views
            ):  # only autograd has used the layer, but older views may have been written
                self._writes.take_back_views(layer, slot)
        finally:
            viewed = self._slots.release(layer, slot)  # (5)
            if not layer.whole:
                layer.casts.withdraw()
                layer.rows.end_use()
            if layer.guard is not None and not viewed:
                layer.guard.drop_views()
                drop_if_empty(layer)
            if layer.on_demand and viewed:  # the weights may be written through a view at any time
                layer.parameters.casts = None
            elif layer.on_demand:
                layer.invalidate()

    def _detach(self, layer: StreamedLayer, slot: Slot) -> None:
        """Takes back what was written, and makes the device parameters stand-ins, which drop the slot's memory."""
        group, writes = layer.parameters, self._writes
        replaced: dict[int, Tensor] = {}
        try:
            if layer.guard is not None or writes.left.noted or writes.exchanged.noted or group.changed:
                _, replaced = writes.take_back_slot(slot, held_is_compared_later=True)
        finally:  # also after a write that is refused
            if not group.detach():
                self.held.add(layer)
            if writes.exchanged.noted:
                writes.exchanged.forget_dropped()
        if replaced:  # param.data = other
            if not replaced.keys().isdisjoint(guard_of(layer).viewed):  # the slot does not have these values
                writes.leave_views(slot, replaced)
                layer.leave_slot()
            writes.set_replaced(layer, replaced)

    def free_dropped(self) -> bool:
        """Takes the memory from device parameters that user code has dropped. Returns whether any of a layer were held."""
        freed = {layer for layer in self.held if layer.parameters.free_dropped()}
        self.held -= freed
        return bool(freed)
