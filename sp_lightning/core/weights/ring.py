"""Ring: the slots for layers in device memory, and the transfers that fill them.

The slots of one size are a *ring*, which the plan gives to the layers of that size. :mod:`~sp_lightning.core.weights.states`
says which layer may be in a slot, and when.

Compute does not use a slot's memory itself, but a second storage over the same memory
(:class:`~sp_lightning.core.device.lease.Lease`). When no tensor holds that storage any more, no new kernel can read the slot.
An event recorded at that moment covers the kernels that still run. As long as a tensor holds the storage, no other layer
overwrites the slot: the other layer gets another slot, or an extra one is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

from torch import Tensor

from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.device.layout import Span, part
from sp_lightning.core.device.lease import Lease
from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.weights.layer import AllRows, Slot, StreamedLayer
from sp_lightning.core.weights.states import FETCHED, HOST, UNPACKED, VIEWED

Timed = Literal["forward", "backward"]
Staged = tuple[Tensor, Any]
"""A layer's bytes on the host, flat ``uint8``, and the event after which a transfer may read the bytes; None: at once."""


class BlockSource:
    """Provides layers' bytes in host memory, for transfers to read.

    A layer is ready when its update is done and, if its weights are in a file, the file has been read. The caller of each method
    holds the engine's lock.
    """

    def ready(self, layer: StreamedLayer) -> bool:
        """Returns True if :meth:`stage` would return without waiting."""
        return True

    def wait(self, layer: StreamedLayer) -> None:
        """Waits until the layer's update is done, or until an upload can be issued behind the update on the device.

        Raises:
            BaseException: the error of an update in the background.
        """

    def stage(self, layer: StreamedLayer) -> Staged:
        """Returns the layer's current bytes, and the event after which a transfer may read them (None: at once).

        Waits if the layer is not ready. The bytes do not change before the transfer that reads them is complete
        (:attr:`StreamedLayer.transfer`, set when the transfer is issued). Look-ups in a table issue no such transfer: the host
        gathers the rows before the next call of this method.
        """
        raise NotImplementedError


class Uploads:
    """Copies layers from host memory into slots. A subclass may copy them from elsewhere.

    Args:
        device: issues the copies.
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def send(self, layer: StreamedLayer, target: Tensor, source: Tensor) -> None:
        """Issues the upload of a layer. The upload stream already waits for the slot's last use, and for the layer's bytes.

        Args:
            layer: the layer.
            target: the memory of the layer's slot, flat ``uint8``.
            source: the layer's bytes in host memory, of the same size.
        """
        self.device.copy((target,), (source,), Stream.UPLOAD)

    def before_use(self, layer: StreamedLayer) -> None:
        """Called before compute uses a layer that was fetched."""


class Slots:
    """All slots of a plan.

    Args:
        plan: has the number and size of the slots of each ring.
        layers: all layers that may be in a slot, in any order.
        device: allocates slots and copies into them.
        uploads: copies layers into slots.
    """

    def __init__(self, plan: Plan, layers: Sequence[StreamedLayer], device: Device, uploads: Uploads) -> None:
        self._plan = plan
        self._layers = layers
        self._device = device
        self.stats = device.stats
        self.stats.fetched_bytes_by_layer = dict.fromkeys((layer.name for layer in layers), 0)
        self._uploads = uploads
        layouts: dict[Hashable, int] = {}
        for layer in layers:  # layers of one layout share their views of a slot
            alike = tuple((span.offset, span.shape, span.stride, span.dtype) for span in layer.spans)
            layer.layout = layouts.setdefault(alike, len(layouts))
        self.device_bytes = 0
        """Bytes of all slots, including extra ones."""
        self.all: list[Slot] = []
        self._latest: Any = None  # the event of the last transfer
        self.by_address: dict[int, Slot] = {}
        """Every slot that has memory, by its address."""
        self._make_planned()
        self.idle_since: Any = None
        """The mark of the last release in the timeline, until the next layer is locked; otherwise None."""
        # For timelines: the kind and the beginning of the present use of each locked slot.
        self._uses: dict[Slot, tuple[Timed, Any]] = {}

    def _make_planned(self) -> None:
        """Allocates the slots of the plan."""
        rings = enumerate(self._plan.rings)
        self.planned = [[self._make(index) for _ in range(ring.slots)] for index, ring in rings]
        """By ring, the slots for prefetches. Extra slots are not in these lists, because they are freed after a batch."""
        never_evicted = self._plan.never_evicted
        self.never_evicted = {layer for layer in self._layers if layer.index in never_evicted}
        """The layers that no other layer evicts, because their ring has a slot for each of its layers."""
        self.none_evicted = len(never_evicted) == len(self._plan.layers)

    def _make(self, ring: int, *, extra: bool = False) -> Slot:
        """Allocates a slot of a ring, and records it. ``extra``: True if the plan does not count the slot."""
        memory = self._device.empty(self._plan.rings[ring].nbytes)
        slot = Slot(ring, memory, Lease(memory), extra)
        self._add(slot)
        return slot

    def _add(self, slot: Slot) -> None:
        """Adds a slot to the records of all slots."""
        self.all.append(slot)
        self.device_bytes += slot.memory.nbytes
        if slot.memory.nbytes:  # empty memory has the address 0, as tensors without memory have
            self.by_address[slot.memory.data_ptr()] = slot

    def views(self, layer: StreamedLayer, slot: Slot) -> list[Tensor]:
        """Returns the layer's weights, then its casts, as views of a slot. Don't keep the views: they do not count as uses."""
        return slot.lease.views(layer.layout, layer.spans)

    def find(self, layer: StreamedLayer, next_use: Callable[[StreamedLayer], float]) -> Slot:
        """Returns the slot to overwrite for a layer that is needed now.

        The result is an empty slot; else the slot whose layer is used again last; else a new extra slot.

        Args:
            layer: the layer.
            next_use: returns the number of uses of other layers before the next use of a layer.
        """
        ring = layer.planned.ring
        candidates = [slot for slot in self.all if slot.ring == ring and slot.overwritable]
        if candidates:
            return max(
                candidates, key=lambda slot: (slot.layer is None, slot.layer is not None and next_use(slot.layer))
            )
        self.stats.extra_slots += 1
        return self._make(ring, extra=True)

    def fetch(self, transfer: Sequence[tuple[StreamedLayer, Slot, Staged]]) -> None:
        """Uploads layers into slots, in one transfer.

        The caller has chosen slots that may be overwritten, or that have an older copy of the same layer. Before each copy the
        upload stream waits for the last kernel that used the slot, and until the layer's bytes may be read. If the transfer
        raises an error, its layers are HOST again. Two kinds of layers keep their slot: layers in use, and layers whose slot is
        viewed, which becomes stale.
        """
        try:
            self._send(transfer)
        except BaseException:
            for layer, slot, _ in transfer:
                layer.rows.lost()
                if layer.slot is slot and not slot.locked:
                    layer.invalidate()
            raise
        finally:  # after an error as well, because copies may have been issued before the error
            filled = self._latest = self._device.record(Stream.UPLOAD)
            for layer, slot, _ in transfer:
                slot.filled = layer.transfer = filled
        self.stats.transfers += 1

    def _send(self, transfer: Sequence[tuple[StreamedLayer, Slot, Staged]]) -> None:
        """Issues the copies of one transfer, and records which layer is in each slot now."""
        for layer, slot, (source, staged) in transfer:
            step_results, layer.step_results = layer.step_results, ()
            self._empty_slot(slot, layer)
            self._wait_before_copy(layer, slot, staged, from_step=bool(step_results))
            with self._device.timed("fetch", layer.index, Stream.UPLOAD) as timed:
                timed.nbytes = nbytes = self._copy(layer, slot, source, step_results)
            slot.layer, slot.stale, layer.slot = layer, False, slot
            if layer.views:  # the layer stays VIEWED while views exist
                self.forget_dropped(layer, slot)
            elif not layer.state.locked:  # a locked layer is in use, and the use continues with the new values
                layer.state = FETCHED
            layer.fetches += 1
            self.stats.fetched_layers += 1
            self.stats.fetched_bytes += nbytes
            self.stats.fetched_bytes_by_layer[layer.name] += nbytes

    def _empty_slot(self, slot: Slot, layer: StreamedLayer) -> None:
        """Drops the sources of the last upload into a slot, and evicts the slot's layer. ``layer`` is copied to the slot next."""
        if slot.sources:
            self._release_sources(slot)
        if slot.layer is not None and slot.layer is not layer and slot.layer.slot is slot:
            slot.layer.evict()

    def _wait_before_copy(self, layer: StreamedLayer, slot: Slot, staged: Any, *, from_step: bool) -> None:
        """Makes the upload stream wait until the slot may be overwritten, and until the layer's bytes may be read.

        Args:
            layer, slot: the layer, and the slot to fill.
            staged: the event after which the bytes on the host may be read; None: at once.
            from_step: True if the layer has results of its last step on the GPU.
        """
        # ``idle`` is None if the slot is locked, or was viewed at its release: the last view could be dropped at any time. An
        # event recorded now covers all kernels that have read the slot so far. If views still exist, this layer's new values
        # are copied, and later kernels have to read these.
        idle = slot.idle if slot.idle is not None else self._device.record(Stream.COMPUTE)
        self._device.wait(Stream.UPLOAD, idle, Wait.FETCH_AFTER_USE)
        readable = staged
        if from_step and type(layer.rows) is AllRows:  # other classes may copy rows from host memory
            # The results are copied on the device, so the upload does not wait for their download.
            readable = layer.owner.stepped
        if readable is not None:
            self._device.wait(Stream.UPLOAD, readable, Wait.FETCH_AFTER_UPDATE)

    def _copy(
        self, layer: StreamedLayer, slot: Slot, source: Tensor, step_results: Sequence[tuple[Span, Tensor]]
    ) -> int:
        """Issues the copy of one layer. Returns the bytes copied from the host. The layer's bytes are in one of three places:

        - host memory, if the layer's ``rows`` upload single rows;
        - the results of its last step on the GPU (``step_results``), in device memory;
        - host memory, the whole layer. This is the common case.
        """
        if not layer.whole:
            sent = layer.rows.send(slot, source)
            if sent is not None:
                return sent
        if step_results:
            slot.sources = [result for _, result in step_results]
            targets = [part(slot.memory, span) for span, _ in step_results]
            self._device.copy(targets, slot.sources, Stream.UPLOAD)
            return 0
        nbytes = source.nbytes
        target = slot.memory if slot.memory.nbytes == nbytes else slot.memory[:nbytes]
        self._uploads.send(layer, target, source)
        return nbytes

    def _release_sources(self, slot: Slot) -> None:
        """Drops the device tensors that the last transfer into a slot has read.

        The step stream has allocated these tensors, and the allocator may give it their memory again. So the step stream first
        waits for the transfer into the slot, and for the download of the layer, which reads the same casts.
        """
        self._device.wait(Stream.STEP, slot.filled, Wait.STEP_AFTER_FETCH)
        if slot.layer is not None:
            self._device.wait(Stream.STEP, slot.layer.owner.downloaded, Wait.STEP_AFTER_FETCH)
        self._device.access(slot.sources, Stream.STEP, write=True)
        slot.sources = ()

    def lock(self, layer: StreamedLayer, *, backward: bool = False) -> Slot:
        """Locks the slot of a fetched layer for compute, until :meth:`release`. The compute stream waits for the upload."""
        slot = layer.slot
        assert slot is not None
        self._uploads.before_use(layer)
        self.wait_for_upload(slot)
        layer.state = UNPACKED
        slot.locked = True
        slot.idle = None  # kernels that follow will read the slot; `release` records the next event
        if self._device.timelines:
            self._uses[slot] = "backward" if backward else "forward", self._device.mark(Stream.COMPUTE)
        return slot

    def wait_for_upload(self, slot: Slot) -> None:
        """Makes the compute stream wait for the fetch into a slot that is in use, or will be. The host does not wait.

        Then drops the tensors that the fetch has read on the device.
        """
        self._device.wait(Stream.COMPUTE, slot.filled, Wait.USE_AFTER_FETCH)
        self._device.access(slot.memory, Stream.COMPUTE, write=False)
        if slot.sources:
            self._release_sources(slot)

    def resume(self) -> None:
        """Ends the interval ``between`` in the timeline: compute is about to use a layer, and may wait for it."""
        self._device.note("between", None, self.idle_since, Stream.COMPUTE)
        self.idle_since = None

    def release(self, layer: StreamedLayer, slot: Slot) -> bool:
        """Ends a layer's use of a slot: unlocks the slot, and sets the layer's state. Device parameters are stand-ins already.

        Returns:
            True if other tensors still view the slot.
        """
        self._device.access(slot.memory, Stream.COMPUTE, write=False)
        if self._device.timelines:
            kind, begun = self._uses.pop(slot, ("forward", None))
            self._device.note(kind, layer.index, begun, Stream.COMPUTE)
            self.idle_since = self._device.mark(Stream.COMPUTE)
        slot.locked = False
        viewed = slot.lease.in_use
        if layer.slot is None:  # the layer has left the slot during the use
            layer.state = HOST
        else:
            layer.state = VIEWED if viewed else FETCHED
        if viewed and layer.slot is not None:  # if the layer has left the slot, the views do not show its weights
            layer.views = True
        if not viewed:
            slot.idle = self._device.record(Stream.COMPUTE)
        return viewed

    def forget_dropped(self, layer: StreamedLayer, slot: Slot) -> bool:
        """Updates the state of a layer whose slot was viewed. Returns True if tensors still view the slot.

        The caller has copied writes through dropped views to the host.
        """
        viewed = slot.lease.in_use
        if not viewed:
            layer.views = False
        if not layer.state.locked:
            layer.state = VIEWED if viewed else FETCHED
        return viewed

    def give_back_extra(self) -> None:
        """Frees the extra slots that no tensor views.

        The allocator may give a slot's memory to the compute stream. So compute first waits for the last upload into the slot.
        Perhaps no use has waited for that upload, because the tensor that needed the layer was dropped before.
        """
        for slot in [slot for slot in self.all if slot.extra]:
            if slot.overwritable:
                self._device.wait(Stream.COMPUTE, slot.filled, Wait.USE_AFTER_FETCH)
                if slot.sources:
                    self._release_sources(slot)
                if slot.layer is not None and slot.layer.slot is slot:
                    slot.layer.evict()
                self._device.access(slot.memory, Stream.COMPUTE, write=True)
                self.all.remove(slot)
                self.device_bytes -= slot.memory.nbytes
                self.by_address.pop(slot.memory.data_ptr(), None)

    def synchronize(self, why: Wait, layer: StreamedLayer | None = None) -> None:
        """Makes the host wait until no transfer reads the weights of a layer; without ``layer``, of any layer.

        Transfers complete in the order in which they were issued, so the host waits for the last one.
        """
        self._device.synchronize(self._latest if layer is None else layer.transfer, why)

    def resize(self, plan: Plan) -> None:
        """Replaces the slots by those of another plan for the same layers, between two batches.

        A slot that is still viewed stays as an extra slot until its views are dropped.
        """
        held = [slot for slot in self.all if not slot.overwritable]
        self.free(held)
        self._plan = plan
        for layer in self._layers:
            layer.planned = plan.moving[layer.index]  # the layout is the same, but the ring may differ
        for slot in held:
            slot.extra = True
            self._add(slot)
        self._make_planned()

    def free(self, held: Sequence[Slot] = ()) -> None:
        """Frees all slots. Evicts the layers in slots, except layers in the slots ``held``."""
        self.synchronize(Wait.CLOSE_AFTER_FETCH)
        for slot in self.all:
            self._device.access(slot.memory, Stream.COMPUTE, write=True)
        for layer in self._layers:
            if layer.slot is not None and layer.slot not in held:
                layer.evict()
        self._uses.clear()
        self.by_address.clear()
        self.planned.clear()
        self.all.clear()
        self.device_bytes = 0
