"""Writes: what happens to weights that user code writes while a step runs.

On plain Lightning a weight is one memory. Here the device has a copy of it, so the engine has to find out which copy was written.
There are four rules:

1. **A version counter shows the write**: at the layer's release, the weight is copied to the host (``copy_to_host``).
2. **No counter can show it**, because the code has taken the weight's ``.data`` in this use of the layer (``exposed``), or a
   view of that: at the release, the weight is downloaded, and written to the host if it differs. MoCo, BYOL and teachers as in
   fairscale #805 write so (``p.data = p * 0.999 + …``).
3. ``param.data = other`` **copies** ``other`` (:meth:`WriteBack.give`), and counts as a write in place. It is an error if other
   code holds the weight's old memory, which would get the new values, and if ``other`` and the weight, which are one memory on
   plain Lightning, are written apart in the same step. With another dtype the weight gets memory of its own (``retyped``):
   diffusers' layerwise casting (#10347), and transformers' SwitchTransformers, which casts its router in each forward.
4. **Otherwise the write would be lost**, so it is an error: host and device have both written a weight, or a view was written
   that was taken in a step, while modules hold the host's weights.

What is taken from a weight in a step is for that step. A view that is kept longer (``views``, the state VIEWED) keeps its slot,
and shows the host's values after each upload. Its version counter is still followed; other writes through it are lost.

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
========================  =======================================  =============================================================

The first two call other ones of these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.device.layout import Span
from sp_lightning.core.device.lease import shared
from sp_lightning.core.messages import KEPT_VIEW, LOG, say_once
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.core.weights.device_parameter import DeviceParameter, Untouched, same_place
from sp_lightning.core.weights.layer import Kind, Slot, StreamedLayer
from sp_lightning.core.weights.ring import Slots
from sp_lightning.core.weights.states import VIEWED


@dataclass(eq=False, slots=True)
class _Given:
    """A tensor that a weight was given in this step (``param.data = other``). On plain Lightning both are one memory then.

    Attributes:
        memory, version: a tensor with its memory and version counter, and its version then. It is held until it was compared.
        host: the number of writes of the host's weight when it had the same values; None if it does not have them yet.
        kept: True if other code held it when it was compared last.
    """

    memory: Tensor
    version: int
    host: int | None = None
    kept: bool = False


class WriteBack:
    """Copies weights that were written on the device to the host. The caller holds the engine's lock.

    Args:
        slots: the slots of the layers.
        device: waits for compute; reads and writes are declared to the device.
        resident_storages: addresses of storages on the device that activation offloading must not copy: the residents' memory.
            :meth:`give` adds the memory of weights of another dtype, until a step ends or pauses.
        await_update: waits until a layer's update is done and its results are on the host.

    Attributes:
        on_host: returns True while modules hold host parameters.
        saved: tensors in the residents' memory that graphs have saved, as keys.
        given: by layer and index, the tensors that weights were given in this step.
        refuses: True if it is an error that a write is lost. Otherwise the host's write is kept, because an error is being
            raised already.
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
        self.on_host: Callable[[], bool] = lambda: False
        self.saved: MutableMapping[Tensor, None] = WeakIdKeyDictionary()
        self.given: dict[tuple[StreamedLayer, int], _Given] = {}
        self._retyped: set[int] = set()  # addresses of the memory of weights that were given another dtype in this step
        self._found: tuple[tuple[Slot, tuple[int, int, int]] | None, list[tuple[int, int]]] = (None, [])  # see `_users`
        self._kept: set[StreamedLayer] = set()  # layers that user code viewed at the end of the last step
        self._await_update = await_update
        self.refuses = True

    # ------------------------------------------------------------------ weights are copied to the host

    def copy_to_host(self, layer: StreamedLayer, written: Iterable[tuple[int, Tensor]]) -> None:
        """Copies weights that were written on the device, or may have been, to the host.

        Args:
            layer: the layer.
            written: the index and the value of each weight.

        Raises:
            RuntimeError: ``refuses`` is set, and a weight was written on the host as well; or see :meth:`HostBlock.write`.
        """
        group, waited = layer.parameters, False
        for index, value in written:
            if not waited:
                if layer.owner.update is not None:  # a fetch of the layer may not have waited for the download
                    self._await_update(layer)
                # On a GPU the copy in write() blocks, and so implies this wait. On other devices the wait is needed.
                self._wait_for_kernels()
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
            if layer.block.write(index, value):
                group.unversioned_writes[index] += 1
                group.written_back()
                group.casts = None
            if (given := self.given.get((layer, index))) is not None:
                given.host = _host_writes(layer, index)

    def _wait_for_kernels(self) -> None:
        """Makes the host wait for all kernels."""
        self.device.synchronize(self.device.record(Stream.COMPUTE), Wait.WRITE_BACK_AFTER_USE)
        self.device.stats.host_waits += 1

    def write_back_viewed(self, slots: Iterable[Slot]) -> None:
        """Copies back weights of VIEWED layers that were written through views of these slots since the layers' release."""
        for slot in slots:
            if slot.layer is not None and slot.layer.state is VIEWED:
                self.write_back_unattached(slot.layer, slot)

    def write_back_unattached(self, layer: StreamedLayer, slot: Slot) -> None:
        """Copies back weights that were written through views of a layer's slot.

        The layer is not attached: its device parameters do not view the slot. If the slot's values are out of date and no view
        needs the slot any more, the layer leaves the slot.
        """
        self.write_back_slot(slot, late=self.on_host())
        if not self._slots.forget_dropped(layer, slot):
            layer.parameters.forget_views()
            if slot.stale:
                layer.leave_slot()

    def write_back_slot(self, slot: Slot, *, late: bool = False) -> bool:
        """Copies back the weights of the layer in a slot that were written since the last call, or may have been.

        Args:
            slot: the slot.
            late: True while modules hold host parameters, whose writes may be unseen. A write on the device is an error then. A
                use of a device parameter is noticed, and so not late.

        Returns:
            True if the slot does not have the values of a weight.

        Raises:
            RuntimeError: as for :meth:`copy_to_host`; a view was written late; or a tensor that a weight was given, and the
                weight, were written apart.
        """
        layer = slot.layer
        assert layer is not None
        group, attached = layer.parameters, layer.state.attached
        self.compare_given(layer)
        if late:
            group.exposed.clear()
        written = group.take_written()
        if written and late and self.refuses:
            raise RuntimeError(LATE.format(name=group.spans[written[0]].name))
        if not written or late:
            return False
        places = self._slots.views(layer, slot)
        values = [(i, group.value(i) if attached else group.retyped.get(i, places[i])) for i in written]
        self.device.access(slot.memory, Stream.COMPUTE, write=False)
        self.copy_to_host(layer, values)
        moved = attached and any(i not in group.retyped and not same_place(value, places[i]) for i, value in values)
        if moved:  # by Tensor.set_: the slot has older values
            layer.leave_slot()
        return moved

    def write_back(self, layer: StreamedLayer) -> None:
        """Copies back the weights of a layer that were written on the device, or may have been."""
        if layer.state.attached and layer.slot is not None:
            self.write_back_slot(layer.slot)
        else:  # only tensors that user code has kept can have been written
            self.write_back_viewed([slot for slot in self._slots.all if slot.layer is layer])

    def write_back_all(self, *, goes_on: bool) -> None:
        """Copies back all weights that were written on the device, after a step or in the middle of one.

        Does not cover layers in use: :meth:`write_back` copies these.

        Args:
            goes_on: True in the middle of a step.

        Raises:
            RuntimeError: as for :meth:`write_back_slot`.
        """
        self.resident_storages -= self._retyped
        self._retyped.clear()
        self.write_back_viewed(self._slots.all)
        self.compare_given(forget=not goes_on)
        self._found = None, []
        if not goes_on:
            kept = {slot.layer for slot in self._slots.all if slot.layer is not None and self.is_held(slot)}
            # The frames of an error that is being handled may view slots, too. So one step later, and not while it is handled.
            if kept & self._kept and sys.exception() is None:
                say_once(LOG, KEPT_VIEW)
            self._kept = kept

    # ------------------------------------------------------------------ weights are given other values (param.data = other)

    def give(self, layer: StreamedLayer, index: int, value: Tensor, *, again: bool) -> None:
        """Carries out ``param.data = value`` for a weight of an attached layer: copies the value, and counts a write in place.

        If a frozen weight has the same values already, nothing is written: bitsandbytes' 8-bit layer gives its weight the same
        copy in each forward.

        Args:
            layer, index: the weight.
            value: the value.
            again: True in backward. A forward may run again there. Its checkpoint holds the memory of frozen weights then, and
                the first run has shown whether other code holds it.

        Raises:
            RuntimeError: the value has another shape or other strides than the weight; other code holds the weight's memory; or
                see :meth:`compare_given`.
        """
        group, span = layer.parameters, layer.parameters.spans[index]
        now = group.value(index)
        if same_place(value, now):  # p.data += 1 assigns the same memory again
            group.exposed.add(index)
            return
        _refuse_form(span, value)
        slot = layer.slot
        own = value.dtype is not span.dtype or slot is None  # a weight that the slot has no place for
        returns = not own and now.dtype is not span.dtype
        place = now if slot is None or not returns else self._slots.views(layer, slot)[index]
        del now  # another holder of the memory
        self.compare_given(layer, index, forget=True)
        in_sync = index not in group.exposed and not group.changed
        alike = (returns or not (own or group.hosts[index].requires_grad)) and self._alike(place, value)
        if own:  # the place in the slot keeps its values, which graphs may have saved
            with no_inference_mode(), torch.no_grad():
                memory = torch.empty_like(value, device=place.device, requires_grad=False).copy_(value)
            group.move(index, memory)
            group.converted.add(index)
            self._retyped.add(memory.untyped_storage().data_ptr())
            self.resident_storages |= self._retyped
        elif returns and alike:
            group.move(index, place)
            group.converted.discard(index)
            if index in layer.block.retyped:
                group.converted.add(index)
        else:
            del place  # another holder of the memory
            if not (alike and again):
                self._refuse_held(layer, index)
            if not alike:
                group.give(
                    index,
                    self._slots.views(layer, slot)[index] if slot is not None and returns else group.value(index),
                    value,
                )
                group.exposed.add(index)
        if value.is_conj() or value.is_neg():  # its memory has other values
            return
        version = 0 if value.is_inference() else value._version
        host = _host_writes(layer, index) if alike and in_sync and not returns else None
        self.given[layer, index] = _Given(value.detach(), version, host)

    def _alike(self, place: Tensor, value: Tensor) -> bool:
        """Returns True if a value has the bytes that a weight has at its place on the device. The host waits for the result."""
        if (
            value.device != place.device
            or place.dtype.itemsize not in _WHOLE_NUMBERS
            or value.is_conj()
            or value.is_neg()
        ):
            return False
        with no_inference_mode(), torch.no_grad(), torch.DisableTorchFunctionSubclass():
            differ = _differ(value, place)
            self._wait_for_kernels()
            return not differ.item()

    def is_held(self, slot: Slot) -> bool:
        """Returns True if tensors view a slot besides the device parameters of its layer.

        Graphs save places of slots. They also save tensors in the residents' memory (``saved``), which don't count, and without
        hooks (nothing is streamed), which count.
        """
        layer = slot.layer
        assert layer is not None
        group, address = layer.parameters, slot.memory.data_ptr()
        own = len(group.all) - len(group.retyped) if layer.state.attached else 0
        if layer.kind is Kind.RESIDENTS:  # graphs save places of other slots
            own += sum(saved.untyped_storage().data_ptr() == address for saved in self.saved)
        return slot.lease.in_use_beside(own)

    def _refuse_held(self, layer: StreamedLayer, index: int) -> None:
        """Raises a RuntimeError if code holds memory of a weight that is about to get other values.

        On plain Lightning that memory keeps the old values after ``param.data = other``.
        """
        slot, span = layer.slot, layer.parameters.spans[index]
        held = layer.block.is_viewed_at(index)
        if slot is not None and self.is_held(slot):
            held = held or any(
                begin < span.offset + span.nbytes and span.offset < end for begin, end in self._users(slot)
            )
        if held:
            raise RuntimeError(HELD.format(name=span.name))

    def _users(self, slot: Slot) -> list[tuple[int, int]]:
        """Returns the bytes of a viewed slot that Python tensors view, as (begin, end), without device parameters and graphs.

        They are looked for again if the number of the slot's users has changed.
        """
        key = slot, slot.lease.holders()
        if self._found[0] != key:
            found = [
                each
                for each in slot.lease.users()
                if not issubclass(type(each), DeviceParameter) and each not in self.saved and each.numel()
            ]
            self._found = key, [_extent(each) for each in found]
        return self._found[1]

    def compare_given(
        self, layer: StreamedLayer | None = None, index: int | None = None, *, forget: bool = False
    ) -> None:
        """Checks that tensors that weights were given still have the weights' values, and forgets those that no code holds.

        Args:
            layer, index: a weight; without ``index`` all weights of the layer; without ``layer`` all weights.
            forget: True to forget the tensors, because the weights are about to be updated or given other values.

        Raises:
            RuntimeError: ``refuses`` is set, and one of the two was written.
        """
        for (each, at), given in list(self.given.items()) if self.given else ():
            if (layer is not None and each is not layer) or (index is not None and at != index):
                continue
            memory = given.memory
            written = not memory.is_inference() and memory._version != given.version
            kept, given.kept = given.kept, shared(memory)
            if (
                kept or given.kept
            ):  # not if nobody has held it since it was given: then only the weight can have been written
                written = written or self._differs(each, at, given, memory)
            if written or forget or not given.kept:
                del self.given[each, at]
            if written and self.refuses:
                raise RuntimeError(APART.format(name=each.parameters.spans[at].name))

    def _differs(self, layer: StreamedLayer, index: int, given: _Given, memory: Tensor) -> bool:
        """Returns True if a weight has other values than memory that it was given. False if this is not known."""
        group = layer.parameters
        if layer.state.attached:
            present = group.value(index)
        elif given.host == _host_writes(layer, index):
            present = host_value(layer, index)
            if memory.device == self.device.device:
                memory = self.device.receive(memory)
        else:
            return False
        if (present.dtype, present.shape) != (
            memory.dtype,
            memory.shape,
        ) or present.dtype.itemsize not in _WHOLE_NUMBERS:
            return False
        return not self._alike(present, memory)


LATE = (
    "Parameter {name!r} was written through a view that was taken inside a step and kept (.data, .detach(), weight[0]), while "
    "modules hold the weights in CPU memory: the write would be lost. Take a new view from the module for each write: "
    "module.weight.data."
)
HELD = (
    "Parameter {name!r} was given a tensor inside a step (param.data = other), which is copied into its memory, while other code "
    "holds this memory (old = param.data, param.detach(), a view, a state_dict()) and would find the new values there. Keep a "
    "copy: old = param.data.clone()."
)
APART = (
    "Parameter {name!r} was given a tensor inside a step (param.data = other), which was copied, and then one of the two was "
    "written, and not the other. On plain Lightning they are one memory. Write first, and assign then; or keep a copy of the "
    "tensor: param.data = other.clone()."
)


def _refuse_form(span: Span, value: Tensor) -> None:
    """Raises a RuntimeError if a value has another shape or other strides than a weight."""
    if value.shape != span.shape:
        raise RuntimeError(
            f"Parameter {span.name!r} is {span.dtype} of shape {tuple(span.shape)} and was given {value.dtype} of shape "
            f"{tuple(value.shape)} inside a step (param.data = other). Exchange it between two batches or before trainer.fit, "
            f"or keep it on the GPU: SuperpipelineStrategy(keep_on_gpu=[{span.name!r}])."
        )
    strides = zip(span.shape, span.stride, value.stride(), strict=True)
    if any(size > 1 and old != new for size, old, new in strides):
        raise RuntimeError(
            f"Parameter {span.name!r} has strides {span.stride} and was given memory with strides {value.stride()} inside a "
            "step (param.data = other, module.to(memory_format=…)); kernels choose by them. Give it the same order, "
            "param.data = torch.empty_like(param).copy_(other), or exchange it between two batches or before trainer.fit."
        )


def host_value(layer: StreamedLayer, index: int) -> Tensor:
    """Returns the value of a host weight."""
    with Untouched():
        return layer.block.parameters[index].data


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Returns the first byte of a tensor in its storage, and the byte after its last one."""
    begin = int(tensor.storage_offset())
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.itemsize, (begin + last + 1) * tensor.itemsize


def _host_writes(layer: StreamedLayer, index: int) -> int:
    """Returns a number that rises with each known write of a host weight."""
    with Untouched():
        return layer.block.parameters[index]._version + layer.parameters.unversioned_writes[index]


_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes for comparisons of values, by size in bytes. As floats, a NaN differs from itself, and -0.0 equals 0.0."""


def _differ(tensor: Tensor, other: Tensor) -> Tensor:
    """Returns a bool tensor on the device: True if any bytes of two tensors of the same dtype and shape differ."""
    kind = _WHOLE_NUMBERS[tensor.dtype.itemsize]
    return (tensor.view(kind) != other.view(kind)).any()
