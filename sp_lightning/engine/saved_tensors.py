"""Packs what autograd saves for backward: a weight that lies in a slot is packed as its place, not as its memory.

A graph therefore holds no slot. Unpacking brings the layer back, wherever it was meanwhile. Autograd does not check versions
of saved tensors if saved-tensor hooks are active, so this is done here, for weights and for everything else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakSet

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sp_lightning.activations.offload import Offload
from sp_lightning.activations.offloaded_storage import SavedReference
from sp_lightning.device.device import Device
from sp_lightning.device.lease import Lease, SavedView, SavedViews
from sp_lightning.device.modes import never_compiled
from sp_lightning.device.torch_private import top_saved_tensors_hooks
from sp_lightning.weights.device_parameter import DeviceParameter
from sp_lightning.weights.expert_rows import Rows
from sp_lightning.weights.layer import Kind, StreamedLayer
from sp_lightning.weights.saved_values import SavedValues
from sp_lightning.weights.slots import Slot


@dataclass(eq=False, slots=True)
class _Packed:
    """The place of a saved tensor that lay in a slot, in place of its values.

    Attributes:
        which: the index of the weight that the tensor is, or is a view of; None for a cast, and for a view of ``.data``.
        version: the version of that weight when the tensor was saved; -1 for a cast.
        place: where it lies in the slot; None for a weight itself.
        values: the values of a view of a weight, or of a cast. None for a weight itself, which plain autograd follows if it
            is given other memory (``param.data = other``), whereas a view keeps the old memory.
        rows: the experts that it needs, if they are stacked; None for all of them.
    """

    layer: StreamedLayer
    which: int | None
    version: int
    place: SavedView | None
    values: SavedValues | None
    rows: Rows = None

    def view(self, lease: Lease) -> Tensor:
        """The saved tensor, in the memory that its layer has now."""
        assert self.place is not None
        return lease.saved(self.place)

    def follow(self, lease: Lease) -> Tensor:
        """The present weight, which may lie outside of the slot."""
        assert self.which is not None
        layer, group = self.layer, self.layer.parameters
        # Either is an alias that counts as use of the slot, before the lock is given back.
        return (
            group.value(self.which) if group.attached else lease.views(layer.layout, layer.spans)[self.which].detach()
        )


_Kept = tuple[Tensor, int]
"""Any other saved tensor, and its version.

A leaf is kept itself, as autograd keeps it, and so follows an assignment to its ``.data``. Other tensors are detached, because
a node that kept its own output, and with it itself, would never be freed. This is a plain tuple, because there are many of
them and each costs the host time."""


class _Outer(NamedTuple):
    """A saved tensor that was packed by the hooks that had been active before ours."""

    packed: Any
    unpack: Callable[[Any], Tensor]


_our_packs: WeakSet[Callable[..., Any]] = WeakSet()


def packs() -> bool:
    """Whether our hooks pack what autograd saves now, with no hooks of a user or of a checkpoint above them."""
    top = top_saved_tensors_hooks()
    return top is not None and top[0] in _our_packs


class SavedTensors:
    """Makes the pair of hooks for what autograd saves.

    Args:
        slots: the slots by the address of their memory.
        offload: stores other saved tensors on the host, if it is active.
        device: brings kept values back.
        reach: brings a layer and returns what a function makes of its memory there; it calls the function outside of all modes.
    """

    def __init__(
        self,
        slots: Mapping[int, Slot],
        offload: Offload,
        device: Device,
        reach: Callable[[StreamedLayer, Callable[[Lease], Tensor], Rows], Tensor],
    ) -> None:
        self._slots = slots
        self._offload = offload
        self._device = device
        self._reach = reach
        self._views: defaultdict[int, SavedViews] = defaultdict(SavedViews)  # by the layers' layout

    def hooks(self) -> AbstractContextManager[None]:
        """A context that packs what autograd saves. Tensors that are no weights go to the hooks that were active before."""
        outer = top_saved_tensors_hooks()
        slots, offload = self._slots, self._offload

        def pack(tensor: Tensor) -> _Packed | SavedReference | _Kept | _Outer:
            kind = type(tensor)
            if kind is not Tensor and issubclass(kind, DeviceParameter):
                return self._pack_weight(tensor)
            try:
                address = tensor.untyped_storage().data_ptr()
            except (RuntimeError, NotImplementedError):  # sparse, fake and transformed tensors have no memory
                address = 0
            slot = slots.get(address)
            if slot is not None and slot.layer is not None and not (tensor.is_conj() or tensor.is_neg()):
                return self._pack(slot.layer, tensor)
            if outer is not None:
                return _Outer(outer[0](tensor), outer[1])
            if offload.active and address and (stored := offload.store(tensor)) is not None:
                return stored
            return tensor if tensor.is_leaf else tensor.detach(), tensor._version

        _our_packs.add(pack)
        return saved_tensors_hooks(pack, self._unpack)

    @never_compiled  # dynamo would read versions only once, when it traces the graph (torch 2.10)
    def _pack(self, layer: StreamedLayer, tensor: Tensor) -> _Packed:
        offset = int(tensor.storage_offset()) * tensor.element_size()
        group = layer.parameters
        index = which = group.at(offset)
        if which is None:
            version, values = -1, layer.casts.saved_values(offset) if layer.casts is not None else None
        else:
            version, values = group.version(which), group.present_values[which].now
            if tensor._version != version:  # a view of .data, for example, whose writes autograd does not check
                which = None
        rows = None if layer.experts is None else layer.experts.saved_rows(index, tensor, offset)
        return _Packed(layer, which, version, self._views[layer.layout].find(tensor, offset), values, rows)

    @never_compiled
    def _pack_weight(self, weight: Any) -> _Packed | _Kept:
        """Packs a device parameter itself. Its memory is not read, because that would bring a layer that is away."""
        group, index = weight._of, weight._index
        if group.layer.kind is Kind.RESIDENTS:  # residents are never away
            return weight, weight._version
        version = group.version_once_fetched(index)
        if weight.dtype is not group.spans[index].dtype:  # param.data = other, for which the slot has no place
            return weight.detach(), weight._version
        rows = None if group.experts is None else group.experts.saved_stack_rows()
        return _Packed(group.layer, index, version, None, None, rows)

    def _unpack(self, packed: Any) -> Tensor:
        if type(packed) is tuple:  # most saved tensors are of this kind
            tensor, expected = packed
            version = tensor._version
        elif type(packed) is _Packed:
            expected = packed.version
            tensor, version = self._unpack_weight(packed)
        elif isinstance(packed, SavedReference):
            tensor, expected, version = self._offload.load(packed), packed.version, packed.storage.version
        else:
            assert isinstance(packed, _Outer)
            return packed.unpack(packed.packed)
        if version != expected:
            raise RuntimeError(_modified(tensor, expected, version))
        return tensor

    def _unpack_weight(self, packed: _Packed) -> tuple[Tensor, int]:
        """Returns a tensor that lay in a slot from wherever its layer is now, and its version there."""
        which, values, group = packed.which, packed.values, packed.layer.parameters
        if which is not None and (group.exposed or group.apart):
            group.refuse_exchanged(which)
        follows = values is None and which is not None
        tensor = self._reach(packed.layer, packed.follow if follows else packed.view, packed.rows)
        version = packed.version if which is None else group.version(which)
        if values is not None and values.kept is not None:  # the layer has other values by now
            assert packed.place is not None
            tensor = values.recall(self._device, packed.place)
        return tensor, version


def _modified(tensor: Tensor, expected: int, version: int) -> str:
    """Autograd's own message about a saved tensor that was modified in place."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {version}; expected version {expected} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
