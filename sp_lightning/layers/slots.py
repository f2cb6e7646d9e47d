"""Slots: device memory for layers, and the transfers that fill it.

What may be in a slot, and when, is in :mod:`~sp_lightning.layers.states`. A slot's memory is lent as a separate storage. Once no
tensor holds that storage, no new kernel can read it, and an event recorded then covers the kernels that are still running. Until
then the slot is not overwritten: another slot is used, or an extra one is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from torch import Tensor

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.device.layout import part
from sp_lightning.device.lease import Lease
from sp_lightning.layers.layer import AllRows, Slot, StreamedLayer
from sp_lightning.layers.states import FETCHED, HELD, HOST, UNPACKED
from sp_lightning.layers.uploads import Uploads
from sp_lightning.layers.write_guard import guard_of
from sp_lightning.plan.plan import Plan
from sp_lightning.torch_compat.modes import no_dispatch_modes, no_inference_mode

Timed = Literal["forward", "backward"]
Staged = tuple[Tensor, Any]
"""A layer's bytes on the host, flat ``uint8``, and the event after which they may be read; None for at once."""


class BlockSource:
    """Provides layers' bytes in host memory, for transfers to read.

    A layer is ready when it is updated *and* staged. A source that reads a disk, or gathers parts of several processes, is
    ready when that is done. The engine calls these methods in the thread that runs the model, and holds its lock.
    """

    def ready(self, layer: StreamedLayer) -> bool:
        """Returns True if :meth:`stage` would return without waiting."""
        return True

    def wait(self, layer: StreamedLayer) -> None:
        """Waits until the layer is ready.

        Raises:
            BaseException: an update in the background raised it.
        """

    def stage(self, layer: StreamedLayer) -> Staged:
        """Returns the layer's current bytes, and the event after which they may be read (None: at once).

        The bytes do not change before the transfer that reads them is complete (:attr:`StreamedLayer.transfer`, set when the
        transfer is issued). Rows of a table are read before the next call of this method.
        """
        raise NotImplementedError

    def synchronize(self) -> None:
        """Waits until no transfer reads the host's weights, so that they may be written."""

    def invalidate(self, layers: Sequence[StreamedLayer]) -> None:
        """Marks the device's copies of these layers as out of date. Their host weights may have been written unnoticed."""


class Slots:
    """All slots of a plan.

    Args:
        plan: the number and size of the slots of each ring.
        layers: all layers that may be in a slot, in any order.
        device: allocates slots and copies into them.
        uploads: copies layers into slots; None: each layer is copied whole.
    """

    poisons = False
    """Whether a slot is filled with NaN when no call uses it and no tensor views it; see :func:`poisoned`."""

    def __init__(
        self, plan: Plan, layers: Sequence[StreamedLayer], device: Device, uploads: Uploads | None = None
    ) -> None:
        self._plan = plan
        self._layers = layers
        self._device = device
        self.uploads = uploads or Uploads(device)
        layouts: dict[Hashable, int] = {}
        for layer in layers:
            alike = tuple((span.offset, span.shape, span.stride, span.dtype) for span in layer.spans)
            layer.layout = layouts.setdefault(alike, len(layouts))
        self.device_bytes = 0
        """Bytes of all slots, extra ones included, and of the memory that rows have allocated."""
        self.all: list[Slot] = []
        self._latest: Any = None  # the event of the last transfer
        self.by_address: dict[int, Slot] = {}
        """Every slot that has memory, by its address."""
        self._make_planned()
        self.fetched_bytes = 0
        self.transfers = 0
        self.extra_slots = 0
        self.idle_since: Any = None
        """The mark in the timeline since which compute uses no layer; None at the beginning of a batch."""
        self._uses: dict[Slot, tuple[Timed, Any]] = {}  # for timelines: what each slot's last use is, and when it began

    def _make_planned(self) -> None:
        """Allocates the slots of the plan."""
        rings = enumerate(self._plan.rings)
        self.planned = [[self._make(index) for _ in range(ring.slots)] for index, ring in rings]
        """By ring, the slots for prefetches. Extra slots are not among them, because they are freed after a batch."""
        free = [list(slots) for slots in self.planned]
        for layer in self._layers:
            layer.own_slot = free[layer.planned.ring].pop() if layer.index in self._plan.stay else None
        settled = self._plan.settled
        self.settled = {layer for layer in self._layers if layer.index in settled}
        """The layers that are never evicted for another layer."""
        self.all_settled = len(settled) == len(self._plan.layers)
        self.uploads.ring = self._plan.main_ring
        self.device_bytes += sum(layer.rows.allocate(self._plan) for layer in self._layers if not layer.whole)

    def _make(self, ring: int, *, extra: bool = False) -> Slot:
        memory = self._device.empty(self._plan.rings[ring].nbytes)
        slot = Slot(ring, memory, Lease(memory), extra)
        self._keep(slot)
        return slot

    def _keep(self, slot: Slot) -> None:
        self.all.append(slot)
        self.device_bytes += slot.memory.nbytes
        if slot.memory.nbytes:
            self.by_address[slot.memory.data_ptr()] = slot

    def views(self, layer: StreamedLayer, slot: Slot) -> list[Tensor]:
        return slot.lease.views(layer.layout, layer.spans)

    def find(self, layer: StreamedLayer, next_use: Callable[[StreamedLayer], float]) -> Slot:
        """Returns the slot to overwrite for a layer that is needed now.

        It is a free slot; else the slot whose layer is used again last; else a new extra slot.
        """
        ring, own = layer.planned.ring, layer.own_slot
        if own is not None and own.overwritable:
            return own
        # In the ring of layers that stay, each planned slot belongs to one of them, and may be its only copy.
        candidates = [s for s in self.all if s.ring == ring and s.overwritable and (own is None or s.extra)]
        if candidates:
            return max(
                candidates, key=lambda slot: (slot.layer is None, slot.layer is not None and next_use(slot.layer))
            )
        self.extra_slots += 1
        return self._make(ring, extra=True)

    def fetch(self, transfer: Sequence[tuple[StreamedLayer, Slot, Staged]]) -> None:
        """Uploads layers into slots, in one transfer.

        The caller has chosen slots that may be overwritten. The upload stream waits for the last kernels that used them, and
        until each layer's bytes are staged. After an error, none of the layers is on the device.
        """
        try:
            self._send(transfer)
        except BaseException:
            for layer, slot, _ in transfer:
                layer.rows.lost()
                if layer.slot is slot and not slot.locked:
                    layer.invalidate()
            raise
        finally:  # copies may have been issued before an error
            filled = self._latest = self._device.record(Stream.UPLOAD)
            for layer, slot, _ in transfer:
                is_there = layer.kept and slot is layer.own_slot
                slot.filled = layer.transfer = layer.stepped if is_there else filled
        self.transfers += 1

    def _send(self, transfer: Sequence[tuple[StreamedLayer, Slot, Staged]]) -> None:
        for layer, slot, (source, staged) in transfer:
            made, layer.made = layer.made, ()
            if slot.coming is not None:
                self._arrive(slot)
            if slot.alive:
                self._wait_for_readers(slot)
            if slot.layer is not None and slot.layer is not layer and slot.layer.slot is slot:
                slot.layer.evict()
            # A slot that was held after its release has no event, because its last view may be dropped at any time. By now it
            # is dropped, so an event recorded now covers its kernels.
            is_there = layer.kept and slot is layer.own_slot  # of a layer that stays, so nothing has to be copied
            if not is_there:
                idle = slot.idle if slot.idle is not None else self._device.record(Stream.COMPUTE)
                self._device.wait(Stream.UPLOAD, idle, Wait.FETCH_AFTER_USE)
            if made and type(layer.rows) is AllRows:  # copied on the device, so the download is not waited for
                staged = layer.owner.stepped
            if layer.kept:  # compute waits for the step of what is there, and not behind other layers' uploads
                staged = None if is_there else layer.stepped
            if staged is not None:
                self._device.wait(Stream.UPLOAD, staged, Wait.FETCH_AFTER_UPDATE)
            begun = self._device.mark(Stream.UPLOAD) if self._device.timelines else None
            nbytes = None
            if layer.kept:
                nbytes = self._copy_kept(layer, slot)
            elif not layer.whole:
                nbytes = layer.rows.send(slot, source)
            if nbytes is None and made:
                nbytes, slot.alive = 0, [each for _, each in made]
                self._device.copy([part(slot.memory, span) for span, _ in made], slot.alive, Stream.UPLOAD)
            elif nbytes is None:
                nbytes = source.nbytes
                target = slot.memory if slot.memory.nbytes == nbytes else slot.memory[:nbytes]
                slot.coming = self.uploads.send(layer, target, source, partial(self._landed, layer, slot))
            if begun is not None:
                self._device.note("fetch", layer.index, begun, Stream.UPLOAD, nbytes)
            slot.layer, slot.stale, layer.slot = layer, False, slot
            if layer.guard is not None and layer.guard.views:
                self.forget_dropped(layer, slot)
            elif not layer.state.locked:  # otherwise a use goes on with the new values
                layer.state = FETCHED
            layer.fetches += 1
            self.fetched_bytes += nbytes

    def _copy_kept(self, layer: StreamedLayer, slot: Slot) -> int:
        """Brings a layer that stays to a slot, from its own unless that is this one. Returns the bytes that left the host: 0."""
        own = layer.own_slot
        if own is not None and own is not slot:  # a tensor still views its own slot as it is in use
            slot.alive = [own.memory]
            self._device.copy(
                [slot.memory[: layer.planned.nbytes]], [own.memory[: layer.planned.nbytes]], Stream.UPLOAD
            )
        return 0

    def _wait_for_readers(self, slot: Slot) -> None:
        """Releases the tensors that the transfer into a slot has read. Steps, which may reuse that memory, wait for the transfer.

        They wait for that to the host, too, which reads the same casts.
        """
        self._device.wait(Stream.STEP, slot.filled, Wait.STEP_AFTER_FETCH)
        if slot.layer is not None:
            self._device.wait(Stream.STEP, slot.layer.owner.landed, Wait.STEP_AFTER_FETCH)
        self._device.access(slot.alive, Stream.STEP, write=True)
        slot.alive = ()

    def _landed(self, layer: StreamedLayer, slot: Slot) -> None:
        """Notes that all of a pending upload was issued."""
        slot.coming = None
        slot.filled = layer.transfer = self._latest = self._device.record(Stream.UPLOAD)

    def _arrive(self, slot: Slot | None) -> None:
        """Issues the rest of a pending upload into a slot."""
        if slot is not None and slot.coming is not None:
            self.uploads.finish(slot.coming)

    def end_round(self, *, after_error: bool = False) -> None:
        """Issues all pending uploads, because the next ones may be of other weights.

        Args:
            after_error: an error is being raised already, so failures of other processes raise none.
        """
        self.uploads.end_round(after_error=after_error)

    def use(self, layer: StreamedLayer, *, backward: bool = False) -> Slot:
        """Lends the slot of a fetched layer to compute. The compute stream waits for the upload."""
        slot = layer.slot
        assert slot is not None
        self.uploads.go_on(layer)
        self.join(slot)
        layer.state = UNPACKED
        slot.locked = True
        slot.idle = None
        if self._device.timelines:
            self._uses[slot] = "backward" if backward else "forward", self._device.mark(Stream.COMPUTE)
        return slot

    def join(self, slot: Slot) -> None:
        """Lets compute wait for the fetch into a slot that is, or is to be, in use."""
        if slot.coming is not None:
            self._arrive(slot)
        self._device.wait(Stream.COMPUTE, slot.filled, Wait.USE_AFTER_FETCH)
        self._device.access(slot.memory, Stream.COMPUTE, write=False)
        if slot.alive:
            self._wait_for_readers(slot)
        if slot.layer is not None:
            if not slot.layer.whole:
                slot.layer.rows.arrived(slot.memory)
            if slot.layer.spent:  # compute has waited for the step that read them
                slot.layer.spent = ()

    def resume(self) -> None:
        """Ends the interval between two layers in the timeline: compute is about to use a layer, and may wait for it."""
        self._device.note("between", None, self.idle_since, Stream.COMPUTE)
        self.idle_since = None

    def release(self, layer: StreamedLayer, slot: Slot) -> bool:
        """Ends a layer's use of a slot. Device parameters have dropped the memory.

        Returns:
            Whether other tensors still view the slot.
        """
        self._device.access(slot.memory, Stream.COMPUTE, write=False)
        if self._device.timelines:
            kind, begun = self._uses.pop(slot, ("forward", None))
            self._device.note(kind, layer.index, begun, Stream.COMPUTE)
            self.idle_since = self._device.mark(Stream.COMPUTE)
        slot.locked = False
        viewed = slot.lease.in_use
        layer.state = HOST if layer.slot is None else HELD if viewed else FETCHED
        if viewed and layer.slot is not None:
            guard_of(layer).views = True
        if not viewed:
            if self.poisons and not (slot.layer is not None and slot.layer.kept):
                self._poison(slot)
            slot.idle = self._device.record(Stream.COMPUTE)
        return viewed

    def _poison(self, slot: Slot) -> None:
        if slot.layer is not None:
            slot.layer.invalidate()
        self._device.access(slot.memory, Stream.COMPUTE, write=True)
        with no_inference_mode(), no_dispatch_modes():
            slot.memory.fill_(0xFF)  # all ones are NaN in every float type

    def forget_dropped(self, layer: StreamedLayer, slot: Slot) -> bool:
        """Updates and returns whether tensors still view a layer's slot. Writes through dropped views were copied back before."""
        viewed = slot.lease.in_use
        if layer.guard is not None and not viewed:
            layer.guard.leave_slot()
        if not layer.state.locked:
            layer.state = HELD if viewed else FETCHED
        return viewed

    def give_back_extra(self) -> None:
        """Frees the extra slots that no tensor views. Compute waits for uploads into them, because it may get their memory.

        A layer may have been uploaded into an extra slot for a tensor that was dropped before compute waited for the upload.
        """
        for slot in [slot for slot in self.all if slot.extra]:
            if slot.overwritable:
                self._device.wait(Stream.COMPUTE, slot.filled, Wait.USE_AFTER_FETCH)
                if slot.alive:
                    self._wait_for_readers(slot)
                if slot.layer is not None and slot.layer.slot is slot:
                    slot.layer.evict()
                self._device.access(slot.memory, Stream.COMPUTE, write=True)
                self.all.remove(slot)
                self.device_bytes -= slot.memory.nbytes
                self.by_address.pop(slot.memory.data_ptr(), None)

    def synchronize(self, why: Wait, layer: StreamedLayer | None = None) -> None:
        """Lets the host wait until no transfer reads the weights of a layer, or of any layer.

        Transfers complete in the order in which they were issued, so it waits for the last one.
        """
        if layer is None:
            self.end_round()
        else:
            self._arrive(layer.slot)
        self._device.synchronize(self._latest if layer is None else layer.transfer, why)

    def resize(self, plan: Plan) -> None:
        """Replaces the slots by those of another plan for the same layers, between two batches.

        A slot that is still viewed stays as an extra slot until its views are dropped.
        """
        held = [slot for slot in self.all if not slot.overwritable]
        self._free(held)
        self._plan = plan
        for layer in self._layers:
            layer.planned = plan.moving[layer.index]  # the layout is the same, but the ring may differ
        for slot in held:
            slot.extra = True
            self._keep(slot)
        self._make_planned()

    def close(self) -> None:
        """Frees all slots for good."""
        self._free()
        self.uploads.close()

    def _free(self, held: Sequence[Slot] = ()) -> None:
        """Frees all slots, and evicts their layers except those in slots that are ``held``."""
        self.synchronize(Wait.CLOSE_AFTER_FETCH)
        for slot in self.all:
            self._device.access(slot.memory, Stream.COMPUTE, write=True)
        for layer in self._layers:
            if layer.slot is not None and layer.slot not in held:
                layer.evict()
            if not layer.whole:
                layer.rows.free()
        self._uses.clear()
        self.by_address.clear()
        self.planned.clear()
        self.all.clear()
        self.device_bytes = 0


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills slots that no call uses and no tensor views with NaN, so that a read of them shows. Each use uploads again."""
    before, Slots.poisons = Slots.poisons, True
    try:
        yield
    finally:
        Slots.poisons = before
