"""Lent weights: gives modules the weights of the layers in use, and takes back to the host what they wrote there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.device.lease import shared
from sp_lightning.layers.casts import SavedValues, are_saved, keep_saved_values
from sp_lightning.layers.device_parameter import same_place
from sp_lightning.layers.layer import Kind, Slot, StreamedLayer
from sp_lightning.layers.slots import Slots
from sp_lightning.layers.writes import ExchangedMemory, StaleViews, ViewDigests, WeightWatch
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
        self._slots.release(slot)

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
        slots: the slots, whose memory is lent.
        device: waits for compute, and is told of reads and writes.
        resident_storages: addresses of storages that never leave the device. Memory that weights are given in a step is
            added for it.
        watch: is told which weights the engine itself has written, if ``debug_writes`` looks for writes; otherwise None.

    Attributes:
        await_update: waits until a layer's update is done and its results are on the host.
        write_backs: how often the host has waited to take back a weight.
        refuses: whether a weight that host and device have written is refused. Otherwise the host's write counts, because
            there is an error already.
    """

    def __init__(self, slots: Slots, device: Device, resident_storages: set[int], watch: WeightWatch | None) -> None:
        super().__init__(slots)
        self.device = device
        self.resident_storages = resident_storages
        self._watch = watch
        self._given: set[int] = set()  # addresses of the memory that weights were given in this step
        self._left = StaleViews()
        self._exchanged = ExchangedMemory()
        self.await_update: Callable[[StreamedLayer], None] = lambda layer: None
        self.write_backs = 0
        self.refuses = True

    # ------------------------------------------------------------------ a use begins

    def before_use(self, layer: StreamedLayer) -> None:
        """Takes back what was written outside of the layer's slot, before the layer comes."""
        for member in layer.family:
            self._take_back_replaced(member)

    def fetched(self, layer: StreamedLayer) -> None:
        """Notes that the device's copy is that of the host's present parameters."""
        layer.parameters.fetched()
        if layer.slot is not None and layer.slot.digests is not None:
            self._slots.join(layer.slot)  # user code that holds the slot may read it at any time
            self.take_digests(layer.slot)

    def move_in(self, layer: StreamedLayer, slot: Slot) -> None:
        """Makes the layer's device parameters views of its slot."""
        group = layer.parameters
        views = self._slots.views(layer, slot)
        if not group.attached:
            group.attach(views[: len(group.all)])  # (3)
            if self._watch is not None:  # with debug_writes, every weight on the device may have been written there
                group.expose()
        elif group.resting:
            group.ask(before_use=False)
        if layer.owner.updated_early:  # what user code does with weights that backward has updated is refused
            group.ask(before_use=True)
        group.resting = False
        group.sync_requires_grad()
        layer.casts.offer(views[len(group.all) :])

    def before_renewal(self, layer: StreamedLayer) -> None:
        """Takes back what was written on the device, and refuses weights that were given other memory on the host.

        Raises:
            RuntimeError: one was, or one was written on the host and on the device.
        """
        if layer.parameters.changed:
            self.take_back(layer)
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
        if layer.slot is not None and layer.slot.lease.in_use_beside(len(group.all) if group.attached else 0):
            raise RuntimeError(
                f"A weight of {layer.name!r} was read through .data, .detach() or a view while an older view is kept, after a "
                "backward inside a call of this layer. The older view would miss a write. Drop such views before the backward "
                "(del view), and take new ones after the write."
            )

    def renewed(self, layer: StreamedLayer, slot: Slot) -> None:
        """Copies the new values to weights that were given other memory in this use, and offers the new casts."""
        group = layer.parameters
        places = self._slots.views(layer, slot)
        with no_inference_mode(), torch.no_grad(), torch.DisableTorchFunctionSubclass():
            for index in range(len(group.all)):
                value = group.value(index)
                if index in group.retyped:
                    value.copy_(group.hosts[index])
                elif not same_place(value, places[index]):
                    value.copy_(places[index])
        self.move_in(layer, slot)

    # ------------------------------------------------------------------ a use ends

    def rest(self, layer: StreamedLayer) -> None:
        """Has every use of the layer's weights noticed, as while it is away."""
        group = layer.parameters
        group.ask(before_use=True)
        group.resting = True
        layer.casts.withdraw()

    def written(self, layer: StreamedLayer) -> bool:
        """Whether something of a resting layer may be left to take back."""
        return layer.parameters.written()

    def release(self, layer: StreamedLayer, slot: Slot) -> None:
        """Has the device parameters drop the slot's memory, and releases the slot."""
        try:
            self._detach(layer, slot)
        finally:  # what was written on the device may be refused
            self._slots.release(slot)  # (5)
            self._after_release(layer, slot)

    def _detach(self, layer: StreamedLayer, slot: Slot) -> None:
        """Takes back what was written, and has the device parameters drop the slot's memory."""
        group = layer.parameters
        if not group.attached:
            # Only autograd has used the layer. A view that had outlived an earlier use may have been written meanwhile.
            if slot.escaped:
                self._take_back_escaped(slot)
            return
        replaced: dict[int, Tensor] = {}
        try:
            _, replaced = self.take_back_slot(slot, held_is_compared_later=True)
        finally:  # it may be refused
            if not group.detach():
                self.held.add(layer)
            self._exchanged.forget_dropped()
        if replaced:  # param.data = other
            if not replaced.keys().isdisjoint(group.viewed):  # the slot does not have these values
                self.leave_views(slot, replaced)
                layer.leave_slot()
            self._set_replaced(layer, replaced)

    def _after_release(self, layer: StreamedLayer, slot: Slot) -> None:
        """Invalidates a layer that comes on demand after its use, unless user code still views it."""
        if not layer.whole:
            layer.casts.withdraw()
            layer.rows.end_use()
        group = layer.parameters
        if not slot.escaped:
            group.exposed.intersection_update(group.replaced)
            group.viewed.clear()
        if layer.on_demand:
            if slot.escaped:  # the weights may be written through a view at any time
                group.casts = None
            else:
                layer.invalidate()

    def free_dropped(self) -> bool:
        """Takes the memory from device parameters that user code has dropped. Returns whether any of a layer were held."""
        freed = {layer for layer in self.held if layer.parameters.free_dropped()}
        self.held -= freed
        return bool(freed)

    # ------------------------------------------------------------------ the host takes back

    def write_back(
        self, layer: StreamedLayer, written: Iterable[tuple[int, Tensor]], replaced: Collection[int] = ()
    ) -> None:
        """Copies weights that were written on the device, or may have been, to the host.

        Args:
            layer: the layer.
            written: the index and the value of each.
            replaced: the indices of those that were given other memory: views of the host's keep the old values.
        """
        group = layer.parameters
        for index, value in written:
            self._settle_update(layer)
            value = layer.rows.completed(index, value, self._slots.by_address)
            # The blocking copy in write() implies this wait. On a device where write() copies nothing, it is needed.
            self.device.synchronize(self.device.record(Stream.COMPUTE), Wait.WRITE_BACK_AFTER_USE)
            self.write_backs += 1
            if group.version_once_fetched(index) != group.version(index):  # the host's was written, too
                if self.refuses:
                    raise RuntimeError(
                        f"Parameter {group.spans[index].name!r} was written on the host (through a view from before the step, "
                        "for example .detach()), and written or viewed on the device in the same step: one of both would be "
                        "lost. Take a new view within the step, from the module: module.weight.data."
                    )
                continue
            if self._watch is not None:
                self._watch.compare_one(layer.block, index)
            if index in replaced:
                layer.block.leave_to_views(index)
            written_now = layer.block.write(index, value)
            if index in layer.block.retyped:
                group.set_retyped(index, value)
            if written_now:
                group.unversioned_writes[index] += 1
                group.written_back()
                group.casts = None
                layer.rows.drop_cached()
                if self._watch is not None:
                    self._watch.look_at(layer.block, index)

    def take_back_late(self, slots: Iterable[Slot]) -> None:
        """Takes back what was written since their layers' release through views that outlived it."""
        self._left.compare(self._settle, refuse=self.refuses)
        self.compare_exchanged()
        for slot in slots:
            if slot.escaped and not slot.lent:
                self._take_back_escaped(slot)

    def _take_back_escaped(self, slot: Slot) -> None:
        layer = slot.layer
        if layer is None:
            return
        self.take_back_slot(slot)
        self._slots.forget_dropped(slot)
        group = layer.parameters
        if not (group.attached or group.replaced.keys().isdisjoint(group.viewed)):
            layer.leave_slot()  # where a weight lay that was given other memory since, something else was written
        if not slot.escaped and not group.attached:
            group.exposed.intersection_update(group.replaced)
            group.viewed.clear()
            if slot.stale:
                layer.leave_slot()

    def take_back_slot(self, slot: Slot, *, held_is_compared_later: bool = False) -> tuple[bool, dict[int, Tensor]]:
        """Takes back what was written of the layer in a slot since the last time, or may have been.

        Args:
            slot: the slot.
            held_is_compared_later: leave weights to :meth:`_take_back_replaced` if user code holds their other memory and
                may write it at any time.

        Returns:
            Whether anything may have been written, and by index the weights that were given other memory than the slot's
            (``param.data = other``) while their layer is in use.
        """
        self._left.compare(self._settle, refuse=self.refuses)
        self.compare_exchanged()
        layer = slot.layer
        assert layer is not None
        group, written = layer.parameters, set(layer.parameters.take_written())
        if slot.digests is not None:  # any of them; an early update has them no longer among those that may be written
            written.update(range(len(group.all)))
        if not group.attached and group.replaced:  # their values are elsewhere
            written -= group.replaced.keys()
        if not written:
            return False, {}
        places = self._slots.views(layer, slot)
        values = {i: group.value(i) if group.attached else group.retyped.get(i, places[i]) for i in written}
        replaced = {i: value for i, value in values.items() if group.attached and not same_place(value, places[i])}
        if slot.digests is not None:
            written = set(slot.digests.written(group, self._values(slot), refuse=self.refuses))
            group.viewed |= written | replaced.keys()
            if not group.attached:
                written -= group.replaced.keys()
            if written:
                group.fetched()  # the host's are those of before, whatever their versions say
            written |= replaced.keys()
        elif replaced:
            # Beside is the device parameter.
            later = {i for i, value in replaced.items() if held_is_compared_later and shared(value, beside=1)}
            alike = self._alike(slot, replaced, later)
            written -= alike
            group.viewed |= replaced.keys() - alike  # the host has other values than the slot now
        self.device.access(slot.memory, Stream.COMPUTE, write=False)
        self.write_back(layer, ((index, values[index]) for index in sorted(written)), replaced)
        if slot.digests is not None and written:
            self.take_digests(slot)
        return bool(written), replaced

    def _alike(self, slot: Slot, given: Mapping[int, Tensor], later: Collection[int] = ()) -> set[int]:
        """Returns weights that were given other memory with equal values, so that nothing has to be copied.

        Libraries give a weight its own values in each forward (bitsandbytes' 8 bits), and cast weights up and down (diffusers'
        layerwise casting). They are compared on the device, where the slot has the host's values, with one wait for all.

        Args:
            slot: the slot that the layer is in.
            given: the other memory by the weight's index.
            later: weights to compare later. They count as equal if a comparison is possible.
        """
        layer = slot.layer
        assert layer is not None
        places = self._slots.views(layer, slot)
        group = layer.parameters
        if layer.kind in (Kind.RESIDENTS, Kind.TABLE) or layer.planned.rows or self._watch is not None:
            return set()
        if (
            layer.owner.update is not None
            or layer.owner.kept
            or slot.stale
            or slot.digests is not None
            or slot.coming is not None
            or layer.outdated
        ):
            return set()
        # Those of another dtype stay out: the slot keeps the values that they had before, not the host's.
        unwritten = [i for i in given.keys() - group.viewed - group.retyped.keys() if _same_form(given[i], places[i])]
        compared, written = [i for i in unwritten if i not in later], set[int]()
        if compared:
            self._slots.join(slot)
            with no_inference_mode(), torch.no_grad(), torch.DisableTorchFunctionSubclass():
                differ = torch.stack([_differ(given[i], places[i]) for i in compared])
                self.device.synchronize(self.device.record(Stream.COMPUTE), Wait.WRITE_BACK_AFTER_USE)
                self.write_backs += 1
                written = {i for i, differs in zip(compared, differ.tolist(), strict=True) if differs}
        return set(unwritten) - written

    def _values(self, slot: Slot) -> Sequence[Tensor]:
        """The weights in a slot, once everything is done that writes them."""
        assert slot.layer is not None
        self._settle(slot.memory)
        return self._slots.views(slot.layer, slot)[: len(slot.layer.parameters.spans)]

    def _settle(self, memory: Tensor) -> None:
        """Waits until everything is done that writes a slot's memory."""
        self.device.access(memory, Stream.COMPUTE, write=False)
        self.device.synchronize(self.device.record(Stream.COMPUTE), Wait.WRITE_BACK_AFTER_USE)

    def _settle_update(self, layer: StreamedLayer) -> None:
        """Called before the host's weights are read or written: a fetch does not wait until they are updated there."""
        if layer.owner.update is not None or layer.owner.kept:
            self.await_update(layer)

    def take_digests(self, slot: Slot) -> None:
        """Has what may be written of a slot from now on compared with what it is: its views, and the host's weights."""
        assert slot.layer is not None
        group = slot.layer.parameters
        self._settle_update(slot.layer)
        group.expose()
        slot.digests = ViewDigests(group, self._values(slot))

    def take_back(self, layer: StreamedLayer) -> None:
        """Takes back what may have been written of a layer through ``.data``."""
        if layer.parameters.attached and layer.slot is not None:
            self.take_back_slot(layer.slot)
        else:
            self._take_back_replaced(layer)
            self.take_back_late([slot for slot in self._slots.all if slot.layer is layer])

    def take_back_all(self) -> None:
        """Takes back everything that was written on the device, after a step or in its midst. No layer is in use."""
        for layer in list(self.replaced):
            self._take_back_replaced(layer)
            self._set_replaced(layer, {})
        self.resident_storages -= self._given
        self._given.clear()
        self.take_back_late(self._slots.all)
        for slot in self._slots.all:
            if slot.layer is not None and slot.digests is None and slot.held:
                self.take_digests(slot)

    # ------------------------------------------------------------------ weights that are given other memory

    def replace(self, layer: StreamedLayer, index: int, value: Tensor, run: object = None) -> None:
        """Prepares ``param.data = value`` of a layer in use: graphs that saved views of the weight keep its old values.

        Args:
            layer: the layer.
            index: of the weight.
            value: its new memory.
            run: the forward that runs and may have to run again; None if there is none.

        Raises:
            RuntimeError: the value has other strides than the weight.
        """
        group, span = layer.parameters, layer.parameters.spans[index]
        strides = zip(span.shape, span.stride, value.stride(), strict=False)
        if value.shape == span.shape and any(size > 1 and old != new for size, old, new in strides):
            raise RuntimeError(
                f"Parameter {span.name!r} has strides {span.stride} and was given memory with strides {value.stride()} inside a "
                "step (param.data = other, module.to(memory_format=…)); kernels choose by them. Give it the same order, "
                "param.data = torch.empty_like(param).copy_(other), or exchange it between two batches or before trainer.fit."
            )
        address = value.untyped_storage().data_ptr()
        if address not in self.resident_storages:  # a weight may get its own memory back
            self._given.add(address)
        self.resident_storages |= self._given
        if run is not None:
            self._note_exchanged(layer, index, run)
        if are_saved(group.present_values, index):
            self._note_exchanged(layer, index, group.present_values[index])
            self._settle_update(layer)
            self.write_back(layer, [(index, group.value(index))])  # the graphs see earlier writes through .data, too
            group.viewed.add(index)
            keep_saved(layer, index)

    def _note_exchanged(self, layer: StreamedLayer, index: int, needed_by: object) -> None:
        """Remembers the values in the memory that a weight is about to leave, if user code holds a view and may write them."""
        group, slot = layer.parameters, layer.slot
        if slot is None:
            return
        value = self._slots.views(layer, slot)[index]
        if not same_place(group.value(index), value):
            return
        storage = slot.memory.data_ptr()
        own = sum(group.value(i).untyped_storage().data_ptr() == storage for i in range(len(group.all)))
        if not slot.lease.in_use_beside(own):
            return

        def written() -> None:
            group.unversioned_writes[index] += 1  # for forwards that would run again
            if isinstance(needed_by_it := alive(), SavedValues):
                needed_by_it.overwritten = group.spans[index].name

        alive = weakref.ref(needed_by)
        self._settle(slot.memory)
        self._exchanged.note(slot.lease, slot.memory, value, needed_by, written)

    def compare_exchanged(self) -> None:
        """Detects writes of user code to memory that its weight has left; see :class:`ExchangedMemory`."""
        self._exchanged.compare(self._settle)

    def leave_views(self, slot: Slot, replaced: Collection[int]) -> None:
        """Remembers the views of a slot that its layer leaves: what they show of other weights must not be written."""
        if slot.lease.in_use and slot.layer is not None:
            weights = enumerate(zip(slot.layer.parameters.spans, self._values(slot), strict=True))
            others = [(span.name, value) for i, (span, value) in weights if i not in replaced]
            self._left.note(slot.lease, slot.memory, others)

    def _set_replaced(self, layer: StreamedLayer, given: Mapping[int, Tensor]) -> None:
        """Remembers weights that were given other memory (``param.data = other``) while user code holds it and may write it.

        Args:
            layer: the layer, which is away.
            given: that memory by the weight's index. The layer's other weights are forgotten, all of them if there is none.
        """
        group = layer.parameters
        group.replaced = {i: value for i, value in given.items() if shared(value)}
        group.exposed.intersection_update(group.replaced)
        if group.replaced:
            self.replaced.add(layer)
        else:
            self.replaced.discard(layer)

    def _take_back_replaced(self, layer: StreamedLayer) -> None:
        """Takes back what was written, while a layer is away, in other memory that its weights were given."""
        group = layer.parameters
        if group.replaced and not group.attached:
            before = list(group.unversioned_writes)
            slot = layer.slot
            alike = set() if slot is None or slot.layer is not layer else self._alike(slot, group.replaced)
            if written := [(i, value) for i, value in group.replaced.items() if i not in alike]:
                self._slots.synchronize(Wait.UPDATE_AFTER_FETCH, layer)  # a transfer of the old values may be under way
                self.write_back(layer, written)
            if group.unversioned_writes != before:
                layer.leave_slot()
            self._set_replaced(layer, group.replaced)


_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By their size in bytes, the dtypes in which values are compared: a NaN is not equal to itself, and -0.0 is equal to 0.0."""


def _same_form(tensor: Tensor, other: Tensor) -> bool:
    """True if two tensors can be compared by their bytes."""
    return (
        (tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        == (other.dtype, other.shape, other.stride(), other.device)
        and tensor.dtype.itemsize in _WHOLE_NUMBERS
        and not (tensor.is_conj() or tensor.is_neg())
    )  # fmt: skip


def _differ(tensor: Tensor, other: Tensor) -> Tensor:
    """Returns, on the device, whether any bytes of two tensors of the same form differ."""
    kind = _WHOLE_NUMBERS[tensor.dtype.itemsize]
    return (tensor.view(kind) != other.view(kind)).any()


def keep_saved(layer: StreamedLayer, index: int) -> None:
    """Keeps the present values of a weight, which are about to be replaced, for graphs that saved views of it."""
    keep_saved_values(layer.parameters.present_values, index, layer.block.present(index).clone())
