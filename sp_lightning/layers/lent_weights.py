"""Lent weights: gives modules the slots of the layers in use, by making their device parameters views of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sp_lightning.layers.device_parameter import same_place
from sp_lightning.layers.layer import Slot, StreamedLayer
from sp_lightning.layers.slots import Slots
from sp_lightning.layers.states import HELD, RESTING
from sp_lightning.layers.write_back import WriteBack
from sp_lightning.layers.write_guard import drop_if_empty, guard_of
from sp_lightning.torch_compat.modes import no_inference_mode


class SlotUsers:
    """What :class:`~sp_lightning.engine.residency.Residency` calls when a layer changes its state. A simulation has no modules.

    Args:
        slots: the slots of the layers.

    Attributes:
        held: released layers of which a graph still holds device parameters.
        replaced: released layers with weights in other memory, which user code holds.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.held: set[StreamedLayer] = set()
        self.replaced: set[StreamedLayer] = set()

    def before_use(self, layer: StreamedLayer) -> None:
        """Called before a layer is used, if any is ``replaced``: its weights on the host must be up to date."""

    def take_back_late(self, slots: Iterable[Slot]) -> None:
        """Called before slots are overwritten, which loses what was written there."""

    def fetched(self, layer: StreamedLayer) -> None:
        """Called after the transfer of a layer was issued."""

    def move_in(self, layer: StreamedLayer, slot: Slot) -> None:
        """Attaches a layer, because a module call uses it: gives modules its weights on the device."""

    def release(self, layer: StreamedLayer, slot: Slot) -> None:
        """Releases a layer that no call uses: takes its memory from the modules, and releases the slot."""
        self._slots.release(layer, slot)

    def before_renewal(self, layer: StreamedLayer) -> None:
        """Called before the host's present weights overwrite the slot of a layer in use."""

    def renewed(self, layer: StreamedLayer, slot: Slot) -> None:
        """Called after the host's present weights have overwritten the slot of a layer in use."""

    def rest(self, layer: StreamedLayer) -> None:
        """Called instead of :meth:`release` for a layer that rests: it keeps its slot."""

    def written(self, layer: StreamedLayer) -> bool:
        """Whether a resting layer may have been written on the device, so that its weights must be copied back."""
        return False

    def free_dropped(self) -> bool:
        """Frees device parameters that graphs held and have dropped. Returns whether any layer had such."""
        return False


class BoundWeights(SlotUsers):
    """Binds the device parameters of a model to slots. The caller holds the engine's lock.

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
        writes = self._writes
        if writes.left.noted or writes.exchanged.noted:
            writes.compare_left()
        for slot in slots:
            if slot.layer is not None and slot.layer.state is HELD:
                writes.take_back_views(slot.layer, slot)

    def fetched(self, layer: StreamedLayer) -> None:
        """Notes that the device's copy is that of the host's present parameters."""
        layer.parameters.fetched()
        if layer.guard is not None and layer.guard.digests is not None and layer.slot is not None:
            self._slots.join(layer.slot)  # user code that holds the slot may read it at any time
            self._writes.take_digests(layer.slot)

    def move_in(self, layer: StreamedLayer, slot: Slot) -> None:
        """Makes the layer's device parameters views of its slot, and lets modules use them without being noticed."""
        group = layer.parameters
        views = slot.lease.views(layer.layout, layer.spans)
        if not layer.state.attached:
            group.attach(views[: len(group.all)])  # (3)
            if self._watched:  # debug_writes assumes that every weight on the device is written
                group.expose()
        elif layer.state is RESTING:
            group.ask(before_use=False)
        if layer.owner.updated_early:  # a use of weights that backward has updated already is an error, so notice it
            group.ask(before_use=True)
        group.sync_requires_grad()
        if not layer.whole:
            layer.casts.offer(views[len(group.all) :])

    def before_renewal(self, layer: StreamedLayer) -> None:
        """Copies to the host what was written on the device.

        Raises:
            RuntimeError: a weight was given other memory on the host, or was written on the host and on the device.
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
        """Checks that no user code views the slot of a layer in use, whose host memory is handed out.

        Raises:
            RuntimeError: it does. A write on the host, which no version shows, would be missing in the view.
        """
        group = layer.parameters
        if layer.slot is not None and layer.slot.lease.in_use_beside(len(group.all) if layer.state.attached else 0):
            raise RuntimeError(
                f"A weight of {layer.name!r} was read through .data, .detach() or a view while an older view is kept, after a "
                "backward inside a call of this layer. The older view would miss a write. Drop such views before the backward "
                "(del view), and take new ones after the write."
            )

    def renewed(self, layer: StreamedLayer, slot: Slot) -> None:
        """Copies the new values to weights that were given other memory in this use, and gives functions the new casts."""
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
        """Lets every use of the layer's weights be noticed, as with stand-ins, and withdraws its casts."""
        layer.parameters.ask(before_use=True)
        layer.casts.withdraw()

    def written(self, layer: StreamedLayer) -> bool:
        """Whether a weight of a resting layer was written on the device, or may have been."""
        return layer.parameters.written()

    def release(self, layer: StreamedLayer, slot: Slot) -> None:
        """Copies to the host what was written on the device, makes device parameters stand-ins, and releases the slot.

        Raises:
            RuntimeError: host and device have both written a weight. The slot is released all the same.
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
            if (
                layer.on_demand and viewed
            ):  # user code may write the masters through a view, so casts may be out of date
                layer.parameters.casts = None
            elif layer.on_demand:
                layer.invalidate()

    def _detach(self, layer: StreamedLayer, slot: Slot) -> None:
        """Copies to the host what was written, and makes the device parameters stand-ins, which do not view the slot."""
        group, writes = layer.parameters, self._writes
        replaced: dict[int, Tensor] = {}
        try:
            if layer.guard is not None or writes.left.noted or writes.exchanged.noted or group.changed:
                _, replaced = writes.take_back_slot(slot, held_is_compared_later=True)
        finally:  # after an error as well
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
        """Frees device parameters that graphs held and have dropped. Returns whether any layer had such."""
        freed = {layer for layer in self.held if layer.parameters.free_dropped()}
        self.held -= freed
        return bool(freed)
