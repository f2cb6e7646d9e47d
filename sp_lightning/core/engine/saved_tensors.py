"""Saved tensors: what autograd saves for backward. A tensor in a slot is packed as its place in the slot, not as its memory.

So a graph holds no slot, and the slot can be overwritten. Unpacking fetches the layer again if necessary. If saved-tensor hooks
are active, autograd does not check the versions of saved tensors, so the hooks of this file check them, for weights and for all
others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sp_lightning.core.device.lease import SavedView, SavedViews
from sp_lightning.core.engine.saved_objects import like_plain
from sp_lightning.core.model.wrapped import builder, parts
from sp_lightning.core.torch_compat.modes import held, never_compiled
from sp_lightning.core.torch_compat.private import (
    base_of,
    current_graph_task,
    is_traceable_wrapper_subclass,
    top_saved_tensors_hooks,
)
from sp_lightning.core.weights.casts import SavedPlace
from sp_lightning.core.weights.device_parameter import DeviceParameter
from sp_lightning.core.weights.layer import Kind, Rows, StreamedLayer

if TYPE_CHECKING:
    from sp_lightning.core.engine.engine import Engine


class _Packed(tuple[StreamedLayer, int | None, int, SavedView | None, SavedPlace | None, Rows]):
    """A saved tensor that is in a slot: its place there. Fields:

    - layer.
    - which: the index of the weight that the tensor is, or is a view of; None for a cast, and for a view of ``.data``.
    - version: the version of that weight when the tensor was saved; 0 for a cast.
    - place: its place in the slot; None for a weight itself.
    - given: for a view of a weight, or a cast, its :class:`SavedPlace`: it shows new casts, and ``param.data = other`` on the
      host, which change no version. None for a weight itself, of which plain autograd unpacks the new values, too.
    - rows: the rows of the layer that the tensor needs; None for all rows.
    """

    __slots__ = ()


_Kept = tuple[Tensor, int, Any]
"""Any other saved tensor, its version, and the result of :attr:`Engine.count_saved`.

A leaf is kept as the same object, as autograd keeps it, so an assignment to its ``.data`` has an effect on the graph. Other
tensors are detached: a node that kept its own output would keep itself alive, and would never be freed.

This is a plain tuple, and :class:`_Packed` a tuple without a constructor of its own: there are many of them, and a constructor in
Python would be a call for each."""


class _Outer(NamedTuple):
    """A saved tensor that other hooks have packed, which were active before the hooks of this file."""

    packed: Any
    unpack: Callable[[Any], Tensor]


class _Wrapped(NamedTuple):
    """A saved tensor subclass whose plain tensors are in a slot, for example a quantised weight or a row of it."""

    parts: Sequence[Any]
    build: Callable[[Iterator[Tensor]], Tensor]


_our_packs: WeakSet[Callable[..., Any]] = WeakSet()


def packs() -> bool:
    """Returns True if the hooks of this file pack saved tensors now: no hooks of a user or a checkpoint are above them."""
    top = top_saved_tensors_hooks()
    return top is not None and top[0] in _our_packs


class SavedTensors:
    """Makes the saved-tensor hooks of the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._views: defaultdict[int, SavedViews] = defaultdict(SavedViews)  # by the layers' layout

    def hooks(self) -> AbstractContextManager[None]:
        """A context with the hooks. Tensors that are not in a slot are passed to the hooks that were active before, if any."""
        engine = self.engine
        outer = top_saved_tensors_hooks()
        slots, store = engine.residency.slots.by_address, engine.activations.store
        count = engine.count_saved

        def pack(tensor: Tensor) -> Any:
            kind = type(tensor)
            if kind is not Tensor:
                if issubclass(kind, DeviceParameter):
                    return self._pack_weight(tensor)
                if is_traceable_wrapper_subclass(tensor):
                    plain = [part for _, part in parts("", tensor)]
                    if any(self._in_slot(part) for part in plain):
                        return _Wrapped([pack(part) for part in plain], builder(tensor))
            try:
                address = tensor.untyped_storage().data_ptr()
            except (RuntimeError, NotImplementedError):  # sparse, fake and transformed tensors have no memory
                address = 0
            slot = slots.get(address)
            # A place in a slot does not record the conjugate and negative bits, so a view with such a bit is not packed as one.
            if slot is not None and slot.layer is not None and not (tensor.is_conj() or tensor.is_neg()):
                return self._pack(slot.layer, tensor)
            if outer is not None:
                return _Outer(outer[0](tensor), outer[1])
            if store is not None and address and (saved := store(tensor)) is not None:
                return saved
            held = None if count is None else count(tensor)
            if tensor.is_leaf and not _is_of_frozen_weight(tensor):
                return tensor, tensor._version, held
            kept = tensor.detach()
            if address == engine.residents.address:
                engine.writes.saved[kept] = None
            return kept, tensor._version, held

        _our_packs.add(pack)
        if outer is None:
            like_plain.add(pack)
        return saved_tensors_hooks(pack, self._unpack)

    def _in_slot(self, tensor: Tensor) -> bool:
        """Returns True if the memory of a plain tensor is in a slot."""
        try:
            return tensor.untyped_storage().data_ptr() in self.engine.residency.slots.by_address
        except (RuntimeError, NotImplementedError):
            return False

    @never_compiled  # dynamo would read versions only once, when it traces the graph (torch 2.10)
    def _pack(self, layer: StreamedLayer, tensor: Tensor) -> _Packed:
        """Packs a tensor whose memory is in a layer's slot: a view of a weight, or a cast."""
        offset = int(tensor.storage_offset()) * tensor.element_size()
        group = layer.parameters
        index = which = group.at(offset)
        if which is None:  # a cast
            version, given = 0, layer.casts.saved_place(offset)
        else:
            version, given = group.counters[which]._version, group.places[which]
            if tensor._version != version:  # a view of .data, for example, whose writes autograd does not check
                which = None
        rows = None if layer.whole else layer.rows.saved_rows(index, tensor, offset)
        return _Packed((layer, which, version, self._views[layer.layout].find(tensor, offset), given, rows))

    @never_compiled
    def _pack_weight(self, weight: Any) -> _Packed | _Kept:
        """Packs a device parameter itself, without reading its memory, because reading a stand-in would fetch the layer."""
        group, index = weight._of, weight._index
        if group.layer.kind is Kind.RESIDENTS:  # residents are always on the device
            return weight, weight._version, None
        version = group.version_once_fetched(index)
        # After param.data = other with another dtype, for which the slot has no place.
        if weight.dtype is not group.spans[index].dtype:
            return weight.detach(), weight._version, None
        return _Packed((group.layer, index, version, None, None, group.layer.rows.saved_rows(index)))

    def _unpack(self, packed: Any) -> Tensor:
        """Returns the tensor that was saved, for backward. Checks that it was not modified in place since, as autograd does."""
        if type(packed) is tuple:  # most saved tensors are of this kind
            tensor, expected, _ = packed
            version = tensor._version
        elif type(packed) is _Packed:
            tensor, expected, version = self._unpack_from_slot(packed)
        elif type(packed) is _Outer:
            return packed.unpack(packed.packed)
        elif type(packed) is _Wrapped:
            return packed.build(iter([self._unpack(part) for part in packed.parts]))
        else:  # a SavedActivation
            tensor, expected, version = packed.load()
        if version != expected:
            raise RuntimeError(_modified(tensor, expected, version))
        return tensor

    def _unpack_from_slot(self, packed: _Packed) -> tuple[Tensor, int, int]:
        """Returns a tensor of a slot, its weight's version when the tensor was saved, and the weight's version now."""
        layer, which, expected, place, given, rows = packed
        group = layer.parameters
        # The weight may have another dtype now. The slot has the saved values nevertheless, which the backward of a frozen
        # weight can use. A trained weight's update would fail.
        if group.retyped and which is not None and layer.block.parameters[which].requires_grad:
            group.refuse_exchanged(which)
        tensor = self._bring(layer, which, place, rows)
        # Includes writes of the host's weight: a hook may have written the weight while the layer is in use.
        version = expected if which is None else group.version_once_fetched(which)
        if given is not None and given.written and version == expected:
            version += 1
        return tensor, expected, version

    def _bring(self, layer: StreamedLayer, which: int | None, place: SavedView | None, rows: Rows) -> Tensor:
        """Returns a saved tensor of a layer on the device. Locks the layer, and fetches it first if necessary.

        If the layer was not locked, its backward begins: the transfer of other layers' gradients is issued.

        Args:
            layer: the layer.
            which: the index of the weight; needed if ``place`` is None.
            place: the place in the slot; None for the weight itself.
            rows: the rows that the tensor needs.
        """
        engine = self.engine
        backward, residency = engine.backward, engine.residency
        with held(engine.lock, leaves_inference_mode=True):
            if current_graph_task() not in backward.tasks:
                backward.join()
            if not layer.whole:
                layer.rows.need(rows)
            slot = residency.used.get(layer)
            was_unused = slot is None
            if slot is None or not layer.rows.complete:
                slot = residency.unpack(layer)
            if place is not None:
                saved = slot.lease.saved(place)  # (6)
            else:
                assert which is not None
                if layer.state.attached:  # the weight may have memory outside the slot
                    saved = layer.parameters.value(which)
                else:
                    saved = slot.lease.views(layer.layout, layer.spans)[which].detach()
        if was_unused:  # the backward of this layer begins
            backward.make_room((layer,))
        return saved


def _is_of_frozen_weight(leaf: Tensor) -> bool:
    """Returns True if a leaf is a view of a device parameter outside its slot. A graph with the leaf would hold the parameter."""
    return issubclass(type(base_of(leaf)), DeviceParameter)


def _modified(tensor: Tensor, expected: int, version: int) -> str:
    """Returns autograd's own message about a saved tensor that was modified in place."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {version}; expected version {expected} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
