"""Writes: what happens to weights that user code writes while a step runs.

On plain Lightning a weight is one memory. Here the device has a copy of it, so the engine has to find out which copy was written.
There are three rules:

1. **A version counter shows the write**: at the layer's release, the weight is copied to the host (``copy_to_host``).
2. **No counter can show it**, because the code uses ``.data``, a view that it keeps, or memory that it has given to the weight
   (``param.data = other``). The layer's :class:`~sp_lightning.core.weights.write_guard.WriteGuard` records that such writes
   may happen. At release, before the next fetch and at the end of the step, the values are compared, and written ones are
   copied. A table in ``write_guard.py`` has each case. If views outlive their step, digests are compared (:class:`ViewDigests`).
3. **Otherwise the write would be lost**, so it is an error: host and device have both written a weight, or a weight was written
   in memory that it has left (:class:`LeftMemory`).

The methods that copy weights back:

========================  =======================================  =============================================================
method                    copies back weights of                   called
========================  =======================================  =============================================================
``write_back``            a layer, in use or not                   when modules get host parameters while a call of the layer
                                                                   runs (``Step.write_back``); before a gradient of another
                                                                   dtype arrives; before user code asks how often a weight was
                                                                   written; before an update in backward
``write_back_all``        all layers not in use                    when modules get host parameters: a step ends or pauses, or
                                                                   an optimizer steps (``Step.write_back``)
``write_back_slot``       the layer in a slot                      when an attached layer is released; for residents
``write_back_unattached`` a layer not attached                     when a layer is released that only autograd has used
``write_back_viewed``     the VIEWED layers of slots               before slots are overwritten, or copies are marked as stale
``write_back_replaced``   a layer whose weights have other memory  before the layer is used (``BoundWeights.before_use``)
========================  =======================================  =============================================================

The first two call other ones of these.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import DisableTorchFunctionSubclass, Tensor
from torch.utils.weak import WeakIdKeyDictionary

from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.device.lease import Lease, shared
from sp_lightning.core.messages import KEPT_VIEW, LOG, say_once
from sp_lightning.core.model.wrapped import parts
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.core.weights.casts import SavedValues, are_saved, keep_saved_values
from sp_lightning.core.weights.device_parameter import same_place
from sp_lightning.core.weights.layer import Kind, Slot, StreamedLayer
from sp_lightning.core.weights.parameter_group import ParameterGroup
from sp_lightning.core.weights.ring import Slots
from sp_lightning.core.weights.states import VIEWED
from sp_lightning.core.weights.write_guard import drop_if_empty, guard_of


class WriteBack:
    """Copies weights that were written on the device to the host. The caller holds the engine's lock.

    Args:
        slots: the slots of the layers.
        device: waits for compute; reads and writes are declared to the device.
        resident_storages: addresses of storages on the device that activation offloading must not copy: the residents' memory.
            :meth:`replace` adds the memory that weights are given in a step, until the weights are copied back.
        await_update: waits until a layer's update is done and its results are on the host.

    Attributes:
        replaced: released layers with weights in other memory, which user code holds.
        left: memory that weights have left, as long as user code views it.
        refuses: True if it is an error that host and device have both written a weight. Otherwise the host's write is kept,
            because an error is being raised already.
    """

    def __init__(
        self,
        slots: Slots,
        device: Device,
        resident_storages: set[int],
        await_update: Callable[[StreamedLayer], None],
    ) -> None:
        self._slots = slots
        self.device = device
        self.resident_storages = resident_storages
        self.replaced: set[StreamedLayer] = set()
        self._copied: list[tuple[str, Tensor, str]] = []
        """Other memory that was forgotten within this step (:meth:`write_back_all`): the weight, the memory, its digest."""
        self._given: set[int] = set()  # addresses of the memory that weights were given in this step
        self.left = LeftMemory(self._wait_for_kernels)
        self._await_update = await_update
        self.refuses = True

    # ------------------------------------------------------------------ weights are copied to the host

    def copy_to_host(
        self, layer: StreamedLayer, written: Iterable[tuple[int, Tensor]], replaced: Collection[int] = ()
    ) -> None:
        """Copies weights that were written on the device, or may have been, to the host.

        Args:
            layer: the layer.
            written: the index and the value of each weight.
            replaced: the indices of weights that were given other memory. Views of their memory on the host keep the old values.

        Raises:
            RuntimeError: ``refuses`` is set, and a weight was written on the host as well; or see :meth:`HostBlock.write`.
        """
        group, waited = layer.parameters, False
        for index, value in written:
            if not waited:
                self._wait_for_update(layer)
                # On a GPU the copy in write() blocks, and so implies this wait. On other devices the wait is needed.
                self.device.synchronize(self.device.record(Stream.COMPUTE), Wait.WRITE_BACK_AFTER_USE)
                self.device.stats.host_waits += 1
                waited = True
            value = layer.rows.completed(index, value, self._slots.by_address)
            if group.version_once_fetched(index) != group.version(index):  # the host's weight was written, too
                if self.refuses:
                    raise RuntimeError(
                        f"Parameter {group.spans[index].name!r} was written on the CPU (through a view from before the step, "
                        "for example .detach()), and written or viewed on the GPU in the same step: one of both would be "
                        "lost. Take a new view within the step, from the module: module.weight.data."
                    )
                continue
            if index in replaced:
                layer.block.detach_views(index)
            written_now = layer.block.write(index, value)
            if index in layer.block.retyped or (layer.guard is not None and index in layer.guard.retyped):
                group.set_retyped(index, value)
            if written_now:
                group.unversioned_writes[index] += 1
                group.written_back()
                group.casts = None

    def write_back_viewed(self, slots: Iterable[Slot]) -> None:
        """Copies back weights of VIEWED layers that were written through views of these slots since the layers' release."""
        self.left.compare()
        for slot in slots:
            if slot.layer is not None and slot.layer.state is VIEWED:
                self.write_back_unattached(slot.layer, slot)

    def write_back_unattached(self, layer: StreamedLayer, slot: Slot) -> None:
        """Copies back weights that were written through views of a layer's slot. If no view is left, forgets the views.

        The layer is not attached: its device parameters do not view the slot. If the slot's values are out of date and no view
        needs the slot any more, the layer leaves the slot.
        """
        self.write_back_slot(slot)
        viewed = self._slots.forget_dropped(layer, slot)
        guard = layer.guard
        if guard is not None and not guard.replaced.keys().isdisjoint(guard.diverged):
            # A weight has other memory, and user code has written the weight's former place in the slot. So the slot does not
            # have the layer's values any more.
            layer.leave_slot()
        # The frames of an error that is being handled may view the slot, too. So one step later, and not while it is handled.
        if viewed and guard is not None and guard.digests is not None and sys.exception() is None:
            say_once(LOG, KEPT_VIEW)
        if not viewed:
            if guard is not None:
                guard.drop_views()
                drop_if_empty(layer)
            if slot.stale:
                layer.leave_slot()

    def write_back_slot(self, slot: Slot, *, held_is_compared_later: bool = False) -> tuple[bool, dict[int, Tensor]]:
        """Copies back the weights of the layer in a slot that were written since the last call, or may have been.

        1. Version counters and the guard show which weights may have been written (``written``).
        2. If the layer is in use, some of these weights may have memory outside the slot (``param.data = other``, ``replaced``).
        3. If user code has held views longer than a step, digests show which weights were really written.
        4. Otherwise weights in other memory with the values of the slot are left out (:meth:`_alike`).

        Args:
            slot: the slot.
            held_is_compared_later: True to leave weights to :meth:`write_back_replaced` if user code holds their other memory,
                and so may write it at any time.

        Returns:
            True if a weight may have been written; and the other memory of the ``replaced`` weights, by their index.

        Raises:
            RuntimeError: as for :meth:`copy_to_host`; or digests show that a weight was written on the host and on the device.
        """
        self.left.compare()
        layer = slot.layer
        assert layer is not None
        group, attached, written = layer.parameters, layer.state.attached, set(layer.parameters.take_written())
        guard = layer.guard
        if guard is None:
            return False, {}  # `take_written` makes a guard if it finds a written weight
        digests = guard.digests
        # With digests, any weight may have been written. `exposed` does not tell this, because an early update clears it.
        if digests is not None:
            written.update(range(len(group.all)))
        if not attached:  # these weights are in other memory, and the slot does not have their values
            written -= guard.replaced.keys()
        if not written:
            return False, {}
        places = self._slots.views(layer, slot)
        values = {i: group.value(i) if attached else guard.retyped.get(i, places[i]) for i in written}
        replaced = {i: value for i, value in values.items() if attached and not same_place(value, places[i])}
        if digests is not None:
            written = set(digests.written(group, self._values(slot), refuse=self.refuses))
            guard.diverged |= written | replaced.keys()
            if not attached:
                written -= guard.replaced.keys()
            if written:
                # Digests have shown that the host was not written, even if versions differ. `copy_to_host` compares versions.
                group.fetched()
            written |= replaced.keys()
        elif replaced:
            # `beside=1`: the device parameter itself holds the memory, too.
            later = {i for i, value in replaced.items() if held_is_compared_later and shared(value, beside=1)}
            alike = self._alike(slot, replaced, later)
            written -= alike
            guard.diverged |= replaced.keys() - alike  # the host has other values than the slot now
        self.device.access(slot.memory, Stream.COMPUTE, write=False)
        self.copy_to_host(layer, ((index, values[index]) for index in sorted(written)), replaced)
        if digests is not None and written:
            self.take_digests(slot)
        return bool(written), replaced

    def _alike(self, slot: Slot, given: Mapping[int, Tensor], later: Collection[int] = ()) -> set[int]:
        """Returns the indices of weights that were given other memory with the same values, so that nothing must be copied.

        Some libraries give a weight its own values in each forward (bitsandbytes in 8 bits), or cast weights up and down
        (diffusers' layerwise casting). Without the comparison, each weight in 8 bits would be downloaded after each use. It runs
        on the device, where the slot has the host's values, with one wait.

        Args:
            slot: the slot of the layer.
            given: the other memory by the weight's index.
            later: the indices of weights that are compared later. They count as equal if a comparison is possible.
        """
        layer = slot.layer
        assert layer is not None
        places = self._slots.views(layer, slot)
        guard = guard_of(layer)
        if layer.kind in (Kind.RESIDENTS, Kind.TABLE) or layer.planned.rows:
            return set()
        # The comparison needs a complete slot with the values that the host has now.
        if layer.owner.update is not None or slot.stale or guard.digests is not None or layer.stale:
            return set()
        # Weights of another dtype are left out, because the slot has their values from before the change.
        unwritten = [i for i in given.keys() - guard.diverged - guard.retyped.keys() if _same_form(given[i], places[i])]
        compared, written = [i for i in unwritten if i not in later], set[int]()
        if compared:
            self._slots.wait_for_upload(slot)
            with no_inference_mode(), torch.no_grad(), torch.DisableTorchFunctionSubclass():
                differ = torch.stack([_differ(given[i], places[i]) for i in compared])
                self.device.synchronize(self.device.record(Stream.COMPUTE), Wait.WRITE_BACK_AFTER_USE)
                self.device.stats.host_waits += 1
                written = {i for i, differs in zip(compared, differ.tolist(), strict=True) if differs}
        return set(unwritten) - written

    # ------------------------------------------------------------------ views are kept

    def _values(self, slot: Slot) -> Sequence[Tensor]:
        """Waits for all kernels that write a slot, and returns the weights in it."""
        assert slot.layer is not None
        self._wait_for_kernels(slot.memory)
        return self._slots.views(slot.layer, slot)[: len(slot.layer.parameters.spans)]

    def _wait_for_kernels(self, memory: Tensor) -> None:
        """Waits for all kernels that write a slot's memory."""
        self.device.access(memory, Stream.COMPUTE, write=False)
        self.device.synchronize(self.device.record(Stream.COMPUTE), Wait.WRITE_BACK_AFTER_USE)

    def _wait_for_update(self, layer: StreamedLayer) -> None:
        """Waits until the host has the results of a layer's update. A fetch of the layer may not have waited for the download."""
        if layer.owner.update is not None:
            self._await_update(layer)

    def take_digests(self, slot: Slot) -> None:
        """Takes digests of a viewed slot and of the host's weights, to detect later which of the two was written.

        All weights of the layer count as exposed from then on.
        """
        assert slot.layer is not None
        group = slot.layer.parameters
        self._wait_for_update(slot.layer)
        group.expose()
        guard_of(slot.layer).digests = ViewDigests(group, self._values(slot))

    def write_back(self, layer: StreamedLayer) -> None:
        """Copies back the weights of a layer that were written on the device, or may have been."""
        if layer.state.attached and layer.slot is not None:
            self.write_back_slot(layer.slot)
        else:  # only tensors that user code has kept can have been written
            self.write_back_replaced(layer)
            self.write_back_viewed([slot for slot in self._slots.all if slot.layer is layer])

    def write_back_all(self, *, goes_on: bool) -> None:
        """Copies back all weights that were written on the device, after a step or in the middle of one.

        Does not cover layers in use: :meth:`write_back` copies these. If user code still views a slot, takes digests of the slot,
        because the view may outlive the step. Other memory of weights (``replaced``) is forgotten.

        Args:
            goes_on: True in the middle of a step.

        Raises:
            RuntimeError: the step is over, and user code has written other memory after it was forgotten: the write is lost.
        """
        for layer in list(self.replaced):
            self.write_back_replaced(layer)
            if goes_on:
                names = [span.name for span in layer.parameters.spans]
                self._copied += [(names[i], value, digest(value)) for i, value in guard_of(layer).replaced.items()]
            self.set_replaced(layer, {})
        self.resident_storages -= self._given
        self._given.clear()
        self.write_back_viewed(self._slots.all)
        for slot in self._slots.all:
            guard = None if slot.layer is None else slot.layer.guard
            if slot.layer is not None and (guard is None or guard.digests is None) and slot.viewed:
                self.take_digests(slot)
        if not goes_on:
            self._refuse_late_writes()

    def _refuse_late_writes(self) -> None:
        """Raises the error of :meth:`write_back_all`. After a step that has failed it only forgets the memory."""
        copied, self._copied = self._copied, []
        for name, value, before in copied:
            if self.refuses and digest(value) != before:
                raise RuntimeError(
                    f"Parameter {name!r} was given other memory in this step (param.data = other), and that memory was written "
                    "after the weight had been copied to the CPU. The write would be lost. Write the parameter in place: "
                    "param.data.copy_(other)."
                )

    # ------------------------------------------------------------------ weights are given other memory

    def replace(self, layer: StreamedLayer, index: int, value: Tensor) -> None:
        """Prepares ``param.data = value`` of a layer in use: graphs that saved views of the weight keep its old values.

        BYOL and MoCo set ``param.data`` so, between forward and backward.

        Activations in the new memory are not offloaded in this step. If user code views the old memory, later writes to it are
        detected (:class:`LeftMemory`).

        Args:
            layer: the layer.
            index: the index of the weight.
            value: the weight's new memory.

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
        if address not in self.resident_storages:  # a resident may get its own memory back, which stays in the set
            self._given.add(address)
        self.resident_storages |= self._given
        if are_saved(group.present_values, index):
            self._note_exchanged(layer, index, group.present_values[index])
            self._wait_for_update(layer)
            self.copy_to_host(layer, [(index, group.value(index))])  # graphs also see earlier writes through .data
            guard_of(layer).diverged.add(index)
            keep_saved(layer, index)

    def _note_exchanged(self, layer: StreamedLayer, index: int, needed_by: object) -> None:
        """Remembers the values in the memory that a weight is about to leave, if user code views that memory and may write it.

        Args:
            layer: the layer.
            index: the index of the weight.
            needed_by: the saved values of a graph, which need the values to stay the same.
        """
        group, slot = layer.parameters, layer.slot
        if slot is None:
            return
        value = self._slots.views(layer, slot)[index]
        if not same_place(group.value(index), value):  # the weight has left the slot before
            return
        storage = slot.memory.data_ptr()
        own = sum(group.value(i).untyped_storage().data_ptr() == storage for i in range(len(group.all)))
        if not slot.lease.in_use_beside(own):
            return

        def written(name: str) -> None:
            group.unversioned_writes[index] += 1  # a forward that runs again detects the write by this
            if isinstance(needed_by_it := alive(), SavedValues):
                needed_by_it.overwritten = name

        alive = weakref.ref(needed_by)
        self._wait_for_kernels(slot.memory)
        self.left.note(slot.lease, slot.memory, {group.spans[index].name: value}, written, alive)

    def note_stale_views(self, slot: Slot, replaced: Collection[int]) -> None:
        """Remembers views of a slot that its layer leaves: user code must not write the layer's other weights through them."""
        if slot.lease.in_use and slot.layer is not None:
            weights = enumerate(zip(slot.layer.parameters.spans, self._values(slot), strict=True))
            others = {span.name: value for i, (span, value) in weights if i not in replaced}
            self.left.note(slot.lease, slot.memory, others, self._refuse_lost)

    def _refuse_lost(self, name: str) -> None:
        """Raises a RuntimeError, because a weight was written through a view of a slot that its layer has left."""
        if self.refuses:
            raise RuntimeError(
                f"Parameter {name!r} was written through an old view of it (.data, .detach(), weight[0]): another weight of its "
                "layer was given other memory since (param.data = other). The write would be lost. Take a new view from the "
                "module, or write the other weight in place: param.data.copy_(other)."
            )

    def set_replaced(self, layer: StreamedLayer, given: Mapping[int, Tensor]) -> None:
        """Remembers weights that were given other memory (``param.data = other``) while user code holds it and may write it.

        Args:
            layer: the layer, which is not attached.
            given: that memory by the weight's index. Other weights of the layer are forgotten.
        """
        guard_of(layer).replace({i: value for i, value in given.items() if shared(value)})
        if guard_of(layer).replaced:
            self.replaced.add(layer)
            layer.parameters.casts = None  # user code may write that memory at any time, so each use reads it
        else:
            self.replaced.discard(layer)
            drop_if_empty(layer)

    def write_back_replaced(self, layer: StreamedLayer) -> None:
        """Copies back weights in other memory (``replaced``) that user code has written while the layer was not in use."""
        group, guard = layer.parameters, layer.guard
        if guard is not None and guard.replaced and not layer.state.attached:
            before = list(group.unversioned_writes)
            slot = layer.slot
            alike = set() if slot is None or slot.layer is not layer else self._alike(slot, guard.replaced)
            if written := [(i, value) for i, value in guard.replaced.items() if i not in alike]:
                self._slots.synchronize(Wait.UPDATE_AFTER_FETCH, layer)  # a transfer of the old values may be in flight
                self.copy_to_host(layer, written)
            if group.unversioned_writes != before:  # copy_to_host has changed the host, so the slot is out of date
                layer.leave_slot()
            self.set_replaced(layer, guard.replaced)


_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes for comparisons of values, by size in bytes. As floats, a NaN differs from itself, and -0.0 equals 0.0."""


def _same_form(tensor: Tensor, other: Tensor) -> bool:
    """Returns True if two tensors can be compared by their bytes."""
    return (
        (tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        == (other.dtype, other.shape, other.stride(), other.device)
        and tensor.dtype.itemsize in _WHOLE_NUMBERS
        and not (tensor.is_conj() or tensor.is_neg())
    )  # fmt: skip


def _differ(tensor: Tensor, other: Tensor) -> Tensor:
    """Returns a bool tensor on the device: True if any bytes of two tensors of the same form differ."""
    kind = _WHOLE_NUMBERS[tensor.dtype.itemsize]
    return (tensor.view(kind) != other.view(kind)).any()


def keep_saved(layer: StreamedLayer, index: int) -> None:
    """Keeps the present values of a weight, which are about to be replaced, for graphs that saved views of it."""
    keep_saved_values(layer.parameters.present_values, index, layer.block.weight_bytes(index).clone())


class ViewDigests:
    """Digests of a layer's weights on the device and on the host, from a moment when both were equal.

    On plain Lightning, a view and its weight are one memory. With slots they are two. A write to one of the two may change no
    version (``.data``), or run no code of torch (NumPy). So both are compared with their digests, and the written one is copied
    to the other. The caller has waited for all kernels and updates that write the two.

    Args:
        group: the parameters of the layer.
        values: the values on the device.
    """

    def __init__(self, group: ParameterGroup, values: Iterable[Tensor]) -> None:
        self._device = [digest(value) for value in values]
        self._host = [digest(host) for host in group.hosts]

    def written(self, group: ParameterGroup, values: Iterable[Tensor], *, refuse: bool = True) -> list[int]:
        """Returns the indices of the weights that were written on the device only.

        Raises:
            RuntimeError: ``refuse`` is set, and one of these weights was written on the host as well: one write would be lost.
        """
        device = [digest(value) for value in values]
        written = [index for index, (old, new) in enumerate(zip(self._device, device, strict=True)) if old != new]
        twice = [index for index in written if digest(group.hosts[index]) != self._host[index]]
        if twice and refuse:
            raise RuntimeError(
                f"Parameter {group.spans[twice[0]].name!r} was written twice: on the CPU, and through a view that was taken "
                "inside a step and kept (.data, .detach(), weight[0], numpy()). One of both writes would be lost. Take a new "
                "view from the module for each write: module.weight.data."
            )
        return [index for index in written if index not in twice]


@dataclass(eq=False)
class _Left:
    """Memory that weights have left.

    Attributes:
        lease, memory: the slot's lease and memory. Compute has ended all kernels that write the memory.
        values: by name, the weights' views of the memory.
        written: called with the name of the first weight that was written. It may raise an error.
        needed_by: a weak reference to an object that needs the values to stay the same while it lives.
        digests: the digests of the values.
    """

    lease: Lease
    memory: Tensor
    values: Mapping[str, Tensor]
    written: Callable[[str], None]
    needed_by: Callable[[], Any] = lambda: True

    def __post_init__(self) -> None:
        self.digests = {name: digest(value) for name, value in self.values.items()}


class LeftMemory:
    """Memory of slots that weights have left while user code views it, and so may still write it.

    Weights leave memory in two cases:

    - A weight got other memory (``param.data = other``), and a graph needs the old values. On plain Lightning, a graph that has
      saved a view of the weight has the new values after a later write to the old memory. With slots, the graph has a copy of
      the old values.
    - A layer has left its slot because one of its weights got other memory. A write to another weight of the layer through an old
      view of the slot would be lost.

    No published program writes so. Such a write is an error, because without it the results would differ silently.

    Args:
        wait: waits for all kernels that write a slot's memory.
    """

    def __init__(self, wait: Callable[[Tensor], None]) -> None:
        self._wait = wait
        self.noted: list[_Left] = []

    def note(self, *left: Any) -> None:
        """Records values of weights in memory that the weights leave. The arguments are those of :class:`_Left`."""
        self.noted.append(_Left(*left))

    def compare(self) -> None:
        """Compares memory with the recorded values, and forgets memory that was written, or is not needed or viewed any more."""
        for left in list(self.noted):
            written = None
            if left.needed_by() is not None:
                self._wait(left.memory)
                written = next(
                    (name for name, value in left.values.items() if digest(value) != left.digests[name]), None
                )
            if written is not None or left.needed_by() is None or not left.lease.in_use:
                self.noted.remove(left)
            if written is not None:
                left.written(written)

    def forget_dropped(self) -> None:
        """Forgets memory that no tensor views any more, before the memory is overwritten."""
        self.noted = [left for left in self.noted if left.lease.in_use]


known_digests: Any = WeakIdKeyDictionary()
"""For weights whose values need not be read each time: a function that returns the digest of the weight."""


def digest(tensor: Tensor) -> str:
    """Returns a hexadecimal SHA-256 of a weight's values, shape and dtype."""
    known = known_digests.get(tensor)
    return digest_of_values(tensor) if known is None else known(tensor)


def digest_of_values(tensor: Tensor) -> str:
    """Returns :func:`digest` without :data:`known_digests`. It reads the weight's memory once."""
    result = hashlib.sha256(usedforsecurity=False)
    with DisableTorchFunctionSubclass():  # within a step, a host parameter would return the device's values
        detached = tensor.detach()
    for _, plain in parts("", detached):
        memory = plain.cpu().resolve_conj().resolve_neg().contiguous()
        result.update(repr((plain.dtype, tuple(plain.shape))).encode())
        if memory.nbytes:
            result.update((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr()))
    return result.hexdigest()
