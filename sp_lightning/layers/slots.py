"""Slots: the device memory that layers pass through, and the transfers that fill it.

A slot's life::

    FREE ──fetch──▶ FILLED ──use──▶ LENT ──release──▶ FILLED or, while it is still viewed, HELD ──▶ FREE

A slot's memory is lent under a storage of its own. Once no tensor holds that storage, no new kernel can be issued that reads it,
and an event recorded then covers the kernels that still run. Until then the slot is never overwritten: another slot is
used, or an extra one is made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.device.layout import part
from sp_lightning.device.lease import Lease
from sp_lightning.layers.layer import AllRows, Slot, StreamedLayer
from sp_lightning.layers.uploads import Uploads
from sp_lightning.plan.plan import Plan
from sp_lightning.torch_compat.modes import no_dispatch_modes, no_inference_mode

Staged = tuple[Tensor, Any]
"""A layer's bytes on the host, flat ``uint8``, and the event after which they may be read; None for at once."""


class BlockSource:
    """Brings layers' bytes to host memory that a transfer can read.

    "Ready" means updated *and* staged. A source that reads a disk, or that gathers the shares of several processes, is
    ready once that is done. The engine calls these methods from the thread that runs the model, and holds its lock.
    """

    def ready(self, layer: StreamedLayer) -> bool:
        """Whether :meth:`stage` would return without waiting."""
        return True

    def wait(self, layer: StreamedLayer) -> None:
        """Waits until the layer is ready.

        Raises:
            BaseException: what an update raised in the background.
        """

    def stage(self, layer: StreamedLayer) -> Staged:
        """Returns the layer's bytes, up to date, and the event after which they may be read (None: at once).

        They stay as they are until the transfer that reads them is over (:attr:`StreamedLayer.transfer`, which is set once it
        was issued); rows of a table are read before the next call.
        """
        raise NotImplementedError

    def synchronize(self) -> None:
        """Waits until no transfer reads the host's weights any more: whatever comes next may write them."""

    def invalidate(self, layers: Sequence[StreamedLayer]) -> None:
        """The host's weights of these layers may have been written unseen: their copies on the device are out of date."""


class Slots:
    """All slots of a plan.

    Args:
        plan: says how many slots each ring has, and of what size.
        layers: all layers that may be in a slot, in any order.
        device: allocates the slots and copies into them.
        uploads: copies layers into them; None: each is copied whole.
    """

    poisons = False
    """Whether a slot is filled with NaN once no call uses it and no tensor views it; see :func:`poisoned`."""

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
        """Bytes of all slots that exist, extra ones included."""
        self.all: list[Slot] = []
        self._latest: Any = None  # the event of the last transfer
        self.by_address: dict[int, Slot] = {}
        """Every slot that has memory, by its address."""
        self._make_planned()
        self.fetched_bytes = 0
        self.transfers = 0
        self.extra_slots = 0
        self.idle_since: Any = None
        """The mark in the timeline since which compute has used no layer; None at the beginning of a batch."""

    def _make_planned(self) -> None:
        """Allocates what the plan says."""
        rings = enumerate(self._plan.rings)
        self.planned = [[self._make(index) for _ in range(ring.slots)] for index, ring in rings]
        """By ring, the slots that layers may be fetched into ahead of time. Extra ones, which go after a batch, are left out."""
        free = [list(slots) for slots in self.planned]
        for layer in self._layers:
            layer.own_slot = free[layer.planned.ring].pop() if layer.index in self._plan.stay else None
        settled = self._plan.settled
        self.settled = {layer for layer in self._layers if layer.index in settled}
        """The layers of which none has to make room for another."""
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
        """Returns the slot to overwrite for a layer that is needed at once.

        This is a free slot, or else the one whose layer is used again last, or else an extra one.
        """
        ring, own = layer.planned.ring, layer.own_slot
        if own is not None and own.overwritable:
            return own
        # Each planned slot of the ring of a layer that stays is another such layer's, which may have nothing else.
        candidates = [s for s in self.all if s.ring == ring and s.overwritable and (own is None or s.extra)]
        if candidates:
            return max(
                candidates, key=lambda slot: (slot.layer is None, slot.layer is not None and next_use(slot.layer))
            )
        self.extra_slots += 1
        return self._make(ring, extra=True)

    def fetch(self, transfer: Sequence[tuple[StreamedLayer, Slot, Staged]]) -> None:
        """Overwrites slots with layers, in one transfer.

        The caller has chosen slots that may be overwritten. The upload stream waits for the last kernels that used them,
        and until each layer's bytes are staged. If an error comes in between, none of the layers is there.
        """
        try:
            self._send(transfer)
        except BaseException:
            for layer, slot, _ in transfer:
                layer.rows.lost()
                if layer.slot is slot and not slot.lent:
                    layer.invalidate()
            raise
        finally:  # some of it may have been issued before an error
            filled = self._latest = self._device.record(Stream.UPLOAD)
            for layer, slot, _ in transfer:
                slot.filled = layer.transfer = layer.stepped if _is_there(layer, slot) else filled
        self.transfers += 1

    def _send(self, transfer: Sequence[tuple[StreamedLayer, Slot, Staged]]) -> None:
        for layer, slot, (source, staged) in transfer:
            made, layer.made = layer.made, ()
            if slot.coming is not None:
                self._arrive(slot)
            if slot.alive:
                self._wait_for_readers(slot)
            if slot.layer is not None and slot.layer.slot is slot:
                slot.layer.slot = None
            # A slot that was held after its release has no event of its own, because its last view may be dropped at any
            # moment. An event that is recorded now comes after that.
            if not _is_there(layer, slot):
                idle = slot.idle if slot.idle is not None else self._device.record(Stream.COMPUTE)
                self._device.wait(Stream.UPLOAD, idle, Wait.FETCH_AFTER_USE)
            if made and type(layer.rows) is AllRows:  # copied on the device, so the download is not waited for
                staged = layer.owner.stepped
            if layer.kept:  # compute waits for the step of what is there, and not behind other layers' uploads
                staged = None if _is_there(layer, slot) else layer.stepped
            if staged is not None:
                self._device.wait(Stream.UPLOAD, staged, Wait.FETCH_AFTER_UPDATE)
            begun = self._device.mark(Stream.UPLOAD)
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
            if slot.escaped:
                self.forget_dropped(slot)
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
        """Lends a fetched layer's memory to compute, which waits for the transfer."""
        slot = layer.slot
        assert slot is not None
        self.uploads.go_on(layer)
        self.join(slot)
        slot.lent = True
        slot.idle = None
        slot.begun = self._device.mark(Stream.COMPUTE)
        slot.backward = backward
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
        """Ends the interval between layers, if one is noted: compute has come to a layer, and may have to wait for it."""
        self._device.note("between", None, self.idle_since, Stream.COMPUTE)
        self.idle_since = None

    def release(self, slot: Slot) -> None:
        """Ends the use of a slot. Device parameters have dropped the memory; others may still hold views of it."""
        self._device.access(slot.memory, Stream.COMPUTE, write=False)
        if self._device.timelines:
            layer = None if slot.layer is None else slot.layer.index
            self._device.note("backward" if slot.backward else "forward", layer, slot.begun, Stream.COMPUTE)
            self.idle_since = self._device.mark(Stream.COMPUTE)
        slot.lent = False
        self.forget_dropped(slot)
        if not slot.escaped:
            if self.poisons and not (slot.layer is not None and slot.layer.kept):
                self._poison(slot)
            slot.idle = self._device.record(Stream.COMPUTE)

    def _poison(self, slot: Slot) -> None:
        if slot.layer is not None:
            slot.layer.invalidate()
        self._device.access(slot.memory, Stream.COMPUTE, write=True)
        with no_inference_mode(), no_dispatch_modes():
            slot.memory.fill_(0xFF)  # all ones are NaN in every float type

    def forget_dropped(self, slot: Slot) -> None:
        """Notes that the views of a slot are dropped, if they are. What was written through them was taken back."""
        slot.escaped = slot.lease.in_use
        if not slot.escaped:
            slot.digests = None

    def give_back_extra(self) -> None:
        """Frees the extra slots that no tensor views. Compute, which may get their memory, waits for transfers into them.

        A layer was fetched into one because a tensor viewed it, and that may have been dropped before anything waited.
        """
        for slot in [slot for slot in self.all if slot.extra]:
            if slot.overwritable:
                self._device.wait(Stream.COMPUTE, slot.filled, Wait.USE_AFTER_FETCH)
                if slot.alive:
                    self._wait_for_readers(slot)
                if slot.layer is not None and slot.layer.slot is slot:
                    slot.layer.slot = None
                self._device.access(slot.memory, Stream.COMPUTE, write=True)
                self.all.remove(slot)
                self.device_bytes -= slot.memory.nbytes
                self.by_address.pop(slot.memory.data_ptr(), None)

    def synchronize(self, why: Wait, layer: StreamedLayer | None = None) -> None:
        """Lets the host wait until no transfer reads its weights any more, those of all layers or of one.

        Transfers finish in the order in which they were issued, so it waits for the last one.
        """
        if layer is None:
            self.end_round()
        else:
            self._arrive(layer.slot)
        self._device.synchronize(self._latest if layer is None else layer.transfer, why)

    def resize(self, plan: Plan) -> None:
        """Gives the same layers the slots of another plan, between two batches.

        A slot that is still viewed stays as an extra one until it is not.
        """
        held = [(slot, slot.layer) for slot in self.all if not slot.overwritable]
        self._free()
        self._plan = plan
        for layer in self._layers:
            layer.planned = plan.moving[layer.index]  # its parameters lie as before, but it may use another ring
        for slot, holds in held:
            slot.extra = True
            self._keep(slot)
            if holds is not None:
                holds.slot = slot
        self._make_planned()

    def close(self) -> None:
        """Frees all slots. Nothing comes to them any more."""
        self._free()
        self.uploads.close()

    def _free(self) -> None:
        self.synchronize(Wait.CLOSE_AFTER_FETCH)
        for slot in self.all:
            self._device.access(slot.memory, Stream.COMPUTE, write=True)
        for layer in self._layers:
            layer.slot = None
            if not layer.whole:
                layer.rows.free()
        self.by_address.clear()
        self.planned.clear()
        self.all.clear()
        self.device_bytes = 0


def _is_there(layer: StreamedLayer, slot: Slot) -> bool:
    """Whether a slot has a layer that stays, so that nothing has to be copied."""
    return layer.kept and slot is layer.own_slot


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, a slot that no call uses and no tensor views is filled with NaN, so that a read shows. Each use fetches anew."""
    before, Slots.poisons = Slots.poisons, True
    try:
        yield
    finally:
        Slots.poisons = before
