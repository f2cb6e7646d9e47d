"""What autograd saves for backward: a weight that lies in a slot is packed as its place, not as its memory.

Packing is why a graph holds no slot; unpacking brings the layer back, wherever it was meanwhile. The version checks
that autograd leaves out where saved-tensor hooks are active are done here, for weights and for everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sp_lightning.memory import normal_mode, strided
from sp_lightning.parameters import DeviceParameters


class _Packed(NamedTuple):
    """A saved tensor that lay in a slot: where it was, not what."""

    layer: int
    which: int | None
    version: int
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


class _Kept(NamedTuple):
    """Any other saved tensor. Detached, because an output that its own node keeps would never be freed."""

    tensor: Tensor
    version: int


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
        lent_at: storage address → the layer that is lent there, or None.
        reach: brings a layer and returns its memory (flat ``uint8``, lent).
    """

    def __init__(
        self,
        parameters: list[DeviceParameters],
        lent_at: Callable[[int], int | None],
        reach: Callable[[int], Tensor],
    ) -> None:
        self._parameters = parameters
        self._lent_at = lent_at
        self._reach = reach

    def hooks(self) -> AbstractContextManager[None]:
        """Pack while this is active; what is no weight goes to the hooks that were active before."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def pack(tensor: Tensor) -> _Packed | _Kept | _Outer:
            packed = self._pack(tensor)
            if packed is not None:
                return packed
            if outer is not None:
                return _Outer(outer[0](tensor), outer[1])
            return _Kept(tensor.detach(), tensor._version)

        _our_packs.add(pack)
        return saved_tensors_hooks(pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _Packed | None:
        try:
            layer = self._lent_at(tensor.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError):  # it has no memory of its own: sparse, wrapped by a transform, fake
            return None
        if layer is None or tensor.is_conj() or tensor.is_neg():
            return None
        offset = int(tensor.storage_offset()) * tensor.element_size()
        group = self._parameters[layer]
        which = self._covering(layer, offset)
        if which is not None and tensor._version != group.all[which]._version:
            which = None  # of .data, say: a version counter of its own, which autograd does not hold against the weight
        saved = -1 if which is None else group.version(which)
        return _Packed(layer, which, saved, offset, tensor.dtype, tensor.shape, tensor.stride())

    def _unpack(self, packed: _Packed | _Kept | _Outer) -> Tensor:
        if isinstance(packed, _Outer):
            return packed.unpack(packed.packed)
        if isinstance(packed, _Kept):
            _check_version(packed.tensor, packed.tensor._version, packed.version)
            return packed.tensor
        with normal_mode(), torch.no_grad():
            memory = self._reach(packed.layer)
            tensor = strided(memory, packed.offset, packed.dtype, packed.shape, packed.stride)
        if packed.which is not None:
            _check_version(tensor, self._parameters[packed.layer].version(packed.which), packed.version)
        return tensor

    def _covering(self, layer: int, offset: int) -> int | None:
        for index, span in enumerate(self._parameters[layer].spans):
            if span.offset <= offset < span.offset + span.nbytes:
                return index
        return None


def _check_version(tensor: Tensor, found: int, expected: int) -> None:
    if found != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {found}; expected version {expected} instead. Hint: "
            "enable anomaly detection to find the operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True)."
        )
