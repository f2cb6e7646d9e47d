"""What autograd saves for backward: a weight that lies in a slot is packed as its place, not as its memory.

Packing is why a graph holds no slot; unpacking brings the layer back, wherever it was meanwhile. The version checks
that autograd leaves out where saved-tensor hooks are active are done here, for weights and for everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sp_lightning.casts import Casts, Edition
from sp_lightning.memory import Loan, normal_mode, strided
from sp_lightning.offload import Offload, Stored
from sp_lightning.parameters import DeviceParameters, StandIn
from sp_lightning.slots import Slot


class _Packed(NamedTuple):
    """A saved tensor that lay in a slot: where it was, not what."""

    layer: int
    which: int | None
    version: int
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    edition: Edition | None

    def view(self, loan: Loan, weights: Sequence[Tensor]) -> Tensor:
        """The saved tensor, where its layer is now."""
        with normal_mode():
            if self.which is not None and weights[self.which].dtype is self.dtype:
                return weights[self.which].as_strided(self.shape, self.stride, self.offset // self.dtype.itemsize)
            return strided(loan.memory, self.offset, self.dtype, self.shape, self.stride)


_Kept = tuple[Tensor, int]
"""Any other saved tensor, and its version. Detached, because an output that its own node keeps would never be freed.
A plain tuple: there are many, and each costs the host time."""


class _Outer(NamedTuple):
    """A saved tensor that the hooks which were active outside ours have packed."""

    packed: Any
    unpack: Callable[[Any], Tensor]


_our_packs: WeakSet[Callable[..., Any]] = WeakSet()


def packs() -> bool:
    """Whether what autograd saves now is packed by us: no user's hooks and no checkpoint's recompute in between."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top is not None and top[0] in _our_packs


class Packing:
    """The pair of saved-tensor hooks.

    Args:
        parameters: device parameters by layer.
        slots: by the address of their memory.
        casts: by layer, where there are any.
        offload: where other saved tensors may go.
        reach: brings a layer and returns what a function makes of its memory and its weights there.
    """

    def __init__(
        self,
        parameters: list[DeviceParameters],
        slots: Mapping[int, Slot],
        casts: Mapping[int, Casts],
        offload: Offload,
        reach: Callable[[int, Callable[[Loan, Sequence[Tensor]], Tensor]], Tensor],
    ) -> None:
        self._parameters = parameters
        self._slots = slots
        self._casts = casts
        self._offload = offload
        self._reach = reach

    def hooks(self) -> AbstractContextManager[None]:
        """Pack while this is active; what is no weight goes to the hooks that were active before."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        slots, offload = self._slots, self._offload

        def pack(tensor: Tensor) -> _Packed | Stored | _Kept | _Outer:
            if isinstance(tensor, StandIn) and tensor._of.autocast is not None:
                return _away(tensor)  # by a function of the user's, which was given the cast
            try:
                address = tensor.untyped_storage().data_ptr()
            except (RuntimeError, NotImplementedError):  # no memory of its own: sparse, wrapped by a transform, fake
                address = 0
            slot = slots.get(address)
            if slot is not None and slot.layer is not None and not (tensor.is_conj() or tensor.is_neg()):
                return self._pack(slot.layer, tensor)
            if outer is not None:
                return _Outer(outer[0](tensor), outer[1])
            if address and offload.bundle is not None and (stored := offload.store(tensor)) is not None:
                return stored
            return tensor.detach(), tensor._version

        _our_packs.add(pack)
        return saved_tensors_hooks(pack, self._unpack)

    @torch.compiler.disable  # dynamo would read versions when it makes a graph, once for all (torch 2.10)
    def _pack(self, layer: int, tensor: Tensor) -> _Packed:
        offset = int(tensor.storage_offset()) * tensor.element_size()
        group = self._parameters[layer]
        which = group.at(offset)
        version = -1 if which is None else group.version(which)
        if which is not None and tensor._version != version:
            which = None  # of .data, say: a version counter of its own, which autograd does not hold against the weight
        edition = self._casts[layer].edition(offset) if layer in self._casts else None
        return _Packed(layer, which, version, offset, tensor.dtype, tensor.shape, tensor.stride(), edition)

    def _unpack(self, packed: _Packed | Stored | _Kept | _Outer) -> Tensor:
        if isinstance(packed, _Outer):
            return packed.unpack(packed.packed)
        if isinstance(packed, Stored):
            tensor, expected, found = self._offload.load(packed), packed.version, packed.parcel.witness._version
        elif isinstance(packed, _Packed):
            if packed.which is not None:
                self._parameters[packed.layer].refuse_exchanged(packed.which)
            tensor, expected = self._reach(packed.layer, packed.view), packed.version
            if packed.edition is not None and packed.edition.kept is not None:  # what has come may be newer
                return packed.edition.recall(packed.offset, packed.dtype, packed.shape, packed.stride)
            found = expected if packed.which is None else self._parameters[packed.layer].version(packed.which)
        else:
            tensor, expected = packed
            found = tensor._version
        _check_version(tensor, expected, found)
        return tensor


def _check_version(tensor: Tensor, expected: int, found: int) -> None:
    if found != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {found}; expected version {expected} instead. "
            "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True)."
        )


def _away(tensor: StandIn) -> _Packed:
    """A weight that is saved while its layer is away: to look at its memory would bring the layer."""
    group, index = tensor._of, tensor._index
    span = group.spans[index]
    version = group.version_once_fetched(index)
    return _Packed(group.layer, index, version, span.offset, span.dtype, span.shape, span.stride, None)
