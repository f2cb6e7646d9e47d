"""What autograd saves for backward: a weight that lies in a slot is packed as its place, not as its memory.

Packing is why a graph holds no slot; unpacking brings the layer back, wherever it was meanwhile. The version checks
that autograd leaves out where saved-tensor hooks are active are done here, for weights and for everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sp_lightning.activations.offload import Offload, Stored
from sp_lightning.device.device import Device
from sp_lightning.device.layout import strided
from sp_lightning.device.lease import Lease
from sp_lightning.device.torch_private import top_saved_tensors_hooks
from sp_lightning.weights.device_parameter import DeviceParameter
from sp_lightning.weights.layer import Kind, StreamedLayer
from sp_lightning.weights.saved_values import Edition
from sp_lightning.weights.slots import Slot


class _Packed(NamedTuple):
    """A saved tensor that lay in a slot: where it was, not what."""

    layer: StreamedLayer
    which: int | None
    version: int
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    edition: Edition | None
    """Of a view of a weight, or of a cast. None for a weight itself, which plain autograd follows when it is given other
    memory (``param.data = other``); a view keeps the old."""

    def view(self, lease: Lease) -> Tensor:
        """The saved tensor, where its layer is now."""
        layer, dtype = self.layer, self.dtype
        if self.which is not None:
            weight = lease.views(layer.layout, layer.spans)[self.which]
            if weight.dtype is dtype:
                return weight.as_strided(self.shape, self.stride, self.offset // dtype.itemsize)
        return strided(lease.memory, self.offset, dtype, self.shape, self.stride)

    def follow(self, lease: Lease) -> Tensor:
        """The weight as it is now; it may lie outside of the slot."""
        assert self.which is not None
        layer, group = self.layer, self.layer.parameters
        return (
            group.value(self.which)
            if group.attached
            else lease.views(layer.layout, layer.spans)[self.which].detach()  # all of it, and cheaper than view()
        )


_Kept = tuple[Tensor, int]
"""Any other saved tensor, and its version. A leaf is kept itself, as autograd keeps it: it is followed where its ``.data`` is
exchanged. Others are detached, because an output that its own node keeps would never be freed. A plain tuple: there are
many, and each costs the host time."""


class _Outer(NamedTuple):
    """A saved tensor that the hooks which were active outside ours have packed."""

    packed: Any
    unpack: Callable[[Any], Tensor]


_our_packs: WeakSet[Callable[..., Any]] = WeakSet()


def packs() -> bool:
    """Whether what autograd saves now is packed by us: no user's hooks and no checkpoint's recompute in between."""
    top = top_saved_tensors_hooks()
    return top is not None and top[0] in _our_packs


class Packing:
    """The pair of saved-tensor hooks.

    Args:
        slots: by the address of their memory.
        offload: where other saved tensors may go.
        device: the seam.
        reach: brings a layer and returns what a function makes of its memory there, outside of all modes.
    """

    def __init__(
        self,
        slots: Mapping[int, Slot],
        offload: Offload,
        device: Device,
        reach: Callable[[StreamedLayer, Callable[[Lease], Tensor]], Tensor],
    ) -> None:
        self._slots = slots
        self._offload = offload
        self._device = device
        self._reach = reach

    def hooks(self) -> AbstractContextManager[None]:
        """Pack while this is active; what is no weight goes to the hooks that were active before."""
        outer = top_saved_tensors_hooks()
        slots, offload = self._slots, self._offload

        def pack(tensor: Tensor) -> _Packed | Stored | _Kept | _Outer:
            kind = type(tensor)
            if kind is not Tensor and issubclass(kind, DeviceParameter):
                return self._pack_weight(tensor)
            try:
                address = tensor.untyped_storage().data_ptr()
            except (RuntimeError, NotImplementedError):  # no memory of its own: sparse, wrapped by a transform, fake
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

    @torch.compiler.disable  # dynamo would read versions when it makes a graph, once for all (torch 2.10)
    def _pack(self, layer: StreamedLayer, tensor: Tensor) -> _Packed:
        offset = int(tensor.storage_offset()) * tensor.element_size()
        group = layer.parameters
        which = group.at(offset)
        if which is None:
            version, edition = -1, layer.casts.edition(offset) if layer.casts is not None else None
        else:
            version, edition = group.version(which), group.editions[which].now()
            if tensor._version != version:  # of .data, say, which autograd does not hold against the weight
                which = None
        return _Packed(layer, which, version, offset, tensor.dtype, tensor.shape, tensor.stride(), edition)

    @torch.compiler.disable
    def _pack_weight(self, weight: DeviceParameter) -> _Packed | _Kept:
        """The parameter itself, whether its layer is there or away: to look at its memory would bring the layer."""
        group, index = weight._of, weight._index
        if group.layer.kind is Kind.RESIDENTS:  # they are never away
            return weight, weight._version
        version, span = group.version_once_fetched(index), group.spans[index]
        if weight.dtype is not span.dtype:  # param.data = other, which the slot has no place for
            return weight.detach(), weight._version
        return _Packed(group.layer, index, version, span.offset, span.dtype, span.shape, span.stride, None)

    def _unpack(self, packed: Any) -> Tensor:
        if type(packed) is tuple:  # most of them
            tensor, expected = packed
            found = tensor._version
        elif isinstance(packed, _Packed):
            expected = packed.version
            tensor, found = self._unpack_weight(packed)
        elif isinstance(packed, Stored):
            tensor, expected, found = self._offload.load(packed), packed.version, packed.parcel.witness._version
        else:
            assert isinstance(packed, _Outer)
            return packed.unpack(packed.packed)
        if found != expected:
            raise RuntimeError(_modified(tensor, expected, found))
        return tensor

    def _unpack_weight(self, packed: _Packed) -> tuple[Tensor, int]:
        """What lay in a slot, where its layer is now; and its version there."""
        which, edition, group = packed.which, packed.edition, packed.layer.parameters
        if which is not None and (group.exposed or group.apart):
            group.refuse_exchanged(which)
        follows = edition is None and which is not None
        tensor = self._reach(packed.layer, packed.follow if follows else packed.view)
        found = packed.version if which is None else group.version(which)
        if edition is not None and edition.kept is not None:  # what has come may be newer
            tensor = edition.recall(self._device, packed.offset, packed.dtype, packed.shape, packed.stride)
        return tensor, found


def _modified(tensor: Tensor, expected: int, found: int) -> str:
    """As autograd says it."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {found}; expected version {expected} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
