"""Bound weights: binds the device parameters of a layer in use to its slot, by making them views of the slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sp_lightning.core.weights.layer import Slot, StreamedLayer
from sp_lightning.core.weights.ring import Slots
from sp_lightning.core.weights.states import RESTING
from sp_lightning.core.weights.writes import WriteBack


class BoundWeights:
    """Binds the device parameters of a model to slots. The caller holds the engine's lock.

    :class:`~sp_lightning.core.engine.schedule.Residency` calls it when a layer changes its state. The planner's simulator has a
    subclass, because its layers have no parameters.

    Args:
        slots: the slots, of which device parameters become views.
        writes: copies weights to the host that were written on the device.

    Attributes:
        held: released layers whose device parameters a graph still holds.
        write_back_viewed: called with viewed slots that are about to be overwritten, because writes through their views would be
            lost.
    """

    def __init__(self, slots: Slots, writes: WriteBack) -> None:
        self._slots = slots
        self._writes = writes
        self.held: set[StreamedLayer] = set()
        self.write_back_viewed: Callable[[Iterable[Slot]], None] = writes.write_back_viewed

    # ------------------------------------------------------------------ a use begins

    def fetched(self, layer: StreamedLayer) -> None:
        """Records, after a transfer was issued, that the device has the host's present values."""
        layer.parameters.fetched()
        if layer.views and layer.slot is not None:
            self._slots.wait_for_upload(layer.slot)  # user code that holds a view of the slot may read it at any time

    def attach(self, layer: StreamedLayer, slot: Slot) -> None:
        """Makes the layer's device parameters views of its slot, with the class that does not notice uses.

        Also called for an attached layer. In each case, copies ``requires_grad`` from the host parameters, and offers the casts.
        """
        group = layer.parameters
        views = slot.lease.views(layer.layout, layer.spans)
        if not layer.state.attached:
            group.attach(views[: len(group.all)])  # (3)
        elif layer.state is RESTING:
            group.notice_uses(False)
        if layer.owner.updated_early:  # backward has updated the layer, so each later use must be noticed
            group.notice_uses(True)
        group.sync_requires_grad()
        if not layer.whole:
            layer.casts.offer(views[len(group.all) :])

    # ------------------------------------------------------------------ a use ends

    def rest(self, layer: StreamedLayer) -> None:
        """Sets that each use of the layer's weights is noticed, as uses of stand-ins are, and withdraws the casts."""
        layer.parameters.notice_uses(True)
        layer.casts.withdraw()

    def written(self, layer: StreamedLayer) -> bool:
        """Returns True if a weight of a resting layer was written on the device, or may have been."""
        return layer.parameters.written()

    def release(self, layer: StreamedLayer, slot: Slot) -> None:
        """Copies written weights to the host, makes device parameters stand-ins, and releases the slot.

        Raises:
            RuntimeError: host and device have both written a weight. The slot is released nevertheless.
        """
        try:
            if layer.state.attached:
                self._detach(layer, slot)
            elif layer.views:
                # Only autograd has used the layer, so its device parameters are stand-ins. But user code may have written views
                # from an earlier use.
                self._writes.write_back_unattached(layer, slot)
        finally:
            viewed = self._slots.release(layer, slot)  # (5)
            if not layer.whole:
                layer.casts.withdraw()
                layer.rows.end_use()
            if not viewed:
                layer.views = False
                layer.parameters.forget_views()
            if layer.fetched_by_use and viewed:
                layer.parameters.casts = (
                    None  # user code may write the masters through a view, so casts may be out of date
                )
            elif layer.fetched_by_use:
                layer.invalidate()  # used seldom, so other layers should get the slot

    def _detach(self, layer: StreamedLayer, slot: Slot) -> None:
        """Copies written weights to the host, and makes the device parameters stand-ins, which do not view the slot."""
        group, writes = layer.parameters, self._writes
        try:
            if writes.given or group.written():
                writes.write_back_slot(slot)
        finally:  # after an error as well
            if not group.detach():
                self.held.add(layer)

    def free_dropped(self) -> bool:
        """Frees device parameters that graphs held and have dropped. Returns True if a layer is not held any more."""
        freed = {layer for layer in self.held if layer.parameters.free_dropped()}
        self.held -= freed
        return bool(freed)
