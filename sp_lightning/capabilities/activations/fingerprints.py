"""Compares the tensors that autograd saves in the two runs of a forward, bit by bit.

The host does not wait for the comparison, with one exception: one run has saved the 16-bit cast of a weight in the layer's slot,
and the other run has saved autocast's own cast. The two casts are then compared on the host.

Backward follows the graph of the first run and computes with the tensors of the second run. If the two runs save the same bits,
backward computes the same as without a second run. If not, gradients are wrong. The tensors of the first run are freed before the
second run. A fingerprint of each tensor remains: sums over its memory, less than 24 KiB.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.device.host_memory import PinnedMemory
from sp_lightning.core.device.layout import PAGE, flat_bytes, strided
from sp_lightning.core.engine.saved_objects import like_plain, plain_has_no_hooks
from sp_lightning.core.model.wrapped import OffloadedWrapper, parts
from sp_lightning.core.store.block import HostBlock
from sp_lightning.core.torch_compat.modes import never_compiled, unseen
from sp_lightning.core.torch_compat.private import (
    base_of,
    is_traceable_wrapper_subclass,
    sparse_indices,
    sparse_values,
    storage_id,
    top_saved_tensors_hooks,
)
from sp_lightning.core.weights.layer import StreamedLayer

LayerAt = Callable[[int], StreamedLayer | None]
"""Returns the layer whose weights lie in the device's storage at an address."""

_SMALL = 2**14
"""Tensors of at most this many bytes are copied whole."""

_COLUMNS = 1021
"""The memory of a larger tensor is summed to this number of 64-bit numbers. It is prime."""

_SHORT = 4
"""Saved int64 tensors of one dimension and at most this many elements may be a seed that a kernel has not written."""

_PENDING = 2
"""The byte of a result that is not on the host yet. Results are 0 or 1."""


class Fingerprint(NamedTuple):
    """A fingerprint of a saved tensor.

    Attributes:
        kind: the dtype, shape and strides of a plain tensor. For other tensors also the class or the parts.
        sums: sums over the tensor's memory, or a copy of a small tensor; each flat, ``uint8``. Empty for a weight, and for a
            tensor whose values are not compared.
        place: the place of a weight, which no run may write; empty for other tensors.
        cast_in: for a weight's 16-bit cast, the layer's block on the host, and the offset of the cast in it in bytes; otherwise
            None.
    """

    kind: tuple[Any, ...]
    sums: tuple[Tensor, ...] = ()
    place: tuple[Any, ...] = ()
    cast_in: tuple[HostBlock, int] | None = None

    def with_sums(self) -> Fingerprint:
        """Returns the fingerprint of a cast's values on the host, for a comparison with autocast's own cast of the weight.

        If other code has read the weight in a run, the whole weight is on the device, and autocast casts it. Returns the present
        fingerprint if the tensor is not a cast.
        """
        if self.cast_in is None:
            return self
        block, offset = self.cast_in
        dtype, shape, stride = self.kind
        return Fingerprint(
            self.kind, _values(strided(block.weights, _begin(block.weights) + offset, dtype, shape, stride))
        )


class SavedRun:
    """Fingerprints of the tensors that autograd saves in one run of a forward, in the order in which they are saved.

    Args:
        layer_at: finds weights on the device.
        hold: called with each saved tensor that is not a weight.

    Attributes:
        found: the fingerprints.
        short: the number of fingerprints up to the last short tensor of integers (:data:`_SHORT`); 0 without one.
    """

    def __init__(self, layer_at: LayerAt, hold: Callable[[Tensor], None] | None = None) -> None:
        self._layer_at = layer_at
        self._hold = hold
        self.found: list[Fingerprint] = []
        self.short = 0
        # Several operators may save one tensor: for example, those that compute queries, keys and values.
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, Fingerprint]] = {}

    @contextmanager
    def noting(
        self,
        unpack: Callable[[Callable[..., Any], Any], Any],
        *,
        alone: bool = False,
        plain: bool = False,
    ) -> Iterator[None]:
        """A context in which each tensor is recorded before the present hooks pack it.

        Args:
            unpack: called in place of the present unpack hook, with that hook and its argument.
            alone: True to keep each tensor instead of calling the present hooks.
            plain: True if plain autograd would have no hooks, though those of our own checkpoint are the present ones.
        """
        present: Any = (Tensor.detach, Tensor.detach) if alone else top_saved_tensors_hooks()
        its_pack, its_unpack = present

        def pack(tensor: Tensor) -> Any:
            self._note(tensor)
            return its_pack(tensor)

        if plain or plain_has_no_hooks():
            like_plain.add(pack)
        with saved_tensors_hooks(pack, partial(unpack, its_unpack)):
            try:
                yield
            finally:
                self._known.clear()

    @never_compiled  # it looks at addresses and versions
    def _note(self, tensor: Tensor) -> None:
        with unseen():
            self.found.append(self._fingerprint(tensor))

    def _fingerprint(self, tensor: Any) -> Fingerprint:
        # A nested tensor has no shape, or one with a symbol that differs from tensor to tensor.
        kind: tuple[Any, ...] = (tensor.dtype, None if tensor.is_nested else tensor.shape)
        if isinstance(tensor, OffloadedWrapper):
            return Fingerprint((*kind, id(tensor.host)))
        # A weight is found by its device parameter. The address does not suffice: the weight may be offloaded, and a view of the
        # weight may be outside the slot.
        weight: Any = tensor if hasattr(tensor, "_of") else base_of(tensor)
        if hasattr(weight, "_of"):
            before = 0 if weight is tensor else _begin(tensor) - _begin(weight)
            return Fingerprint((*kind, tensor.stride()), place=(weight._of.layer.index, weight._index, before))
        plain = _plain_parts(tensor)
        if plain is None:
            return Fingerprint((type(tensor), *kind))
        if len(plain) != 1 or plain[0] is not tensor:
            inner = [self._fingerprint(each) for each in plain]
            kinds, sums = [(each.kind, each.place) for each in inner], [each.sums for each in inner]
            return Fingerprint((type(tensor), *kind, *kinds), tuple(chain(*sums)))
        kind, storage = (*kind, tensor.stride()), tensor.untyped_storage()
        if (layer := self._layer_at(storage.data_ptr())) is not None:
            place = _place(layer, _begin(tensor))
            return Fingerprint(kind, place=place, cast_in=(layer.block, _begin(tensor)) if place[1] is None else None)
        if self._hold is not None:
            self._hold(tensor)
        if may_be_unwritten(tensor):
            return Fingerprint(kind)
        if tensor.dtype is torch.int64 and tensor.ndim == 1 and tensor.numel() <= _SHORT:
            self.short = len(self.found) + 1
        if tensor.nbytes <= _SMALL:
            return Fingerprint(kind, _values(tensor))
        key = (storage_id(storage), tensor._version, tensor.storage_offset(), *kind)
        if key not in self._known:
            self._known[key] = StorageWeakRef(storage), Fingerprint(kind, _values(tensor))
        return self._known[key][1]

    def filled(self, among: int) -> Set[int]:
        """Returns the positions, among the first ones, of int64 tensors that have only the value that torch fills memory with."""
        most = torch.iinfo(torch.int64).max
        integers = (
            (at, each.sums[0].view(torch.int64))
            for at, each in enumerate(self.found[:among])
            if each.kind[0] is torch.int64 and len(each.sums) == 1
        )
        return {at for at, values in integers if bool((values == most).all())}


def _begin(tensor: Tensor) -> int:
    """Returns the bytes from the start of a tensor's storage to its first element."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _place(layer: StreamedLayer, offset: int) -> tuple[int, int | None, int]:
    """Returns the index of a layer, the index of the layer's weight at an offset, and the offset in that weight, in bytes.

    For a cast, the index is None and the offset is counted from the start of the layer.
    """
    which = layer.parameters.at(offset)
    return layer.index, which, offset if which is None else offset - layer.spans[which].offset


def _plain_parts(tensor: Any) -> Sequence[Any] | None:
    """Returns the strided tensors that a tensor consists of, possibly itself; None if it has no values that can be read."""
    if tensor.is_meta or not tensor.numel():
        return None
    if is_traceable_wrapper_subclass(tensor):
        return [each for _, each in parts("", tensor)]
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.layout is torch.sparse_coo:
        return sparse_indices(tensor), sparse_values(tensor)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    if tensor.layout is not torch.strided:
        return [tensor.to_dense()]
    if tensor.is_conj() or tensor.is_neg():
        return [tensor.resolve_conj().resolve_neg()]
    if tensor.is_complex():
        return [torch.view_as_real(tensor)]
    return [tensor.int_repr()] if tensor.is_quantized else [tensor]


def may_be_unwritten(tensor: Tensor) -> bool:
    """Returns True for tensors, by dtype and shape, that operators save without having written all of them.

    Recurrent layers (cuDNN, oneDNN) save a workspace with gaps. Attention on an accelerator saves the seed and the offset of
    random numbers that it has not drawn. The values in such memory are arbitrary, and backward does not use them.
    """
    if tensor.ndim == 1 and tensor.dtype is torch.uint8:
        return True
    seeds = tensor.dtype is torch.uint64 or (tensor.ndim == 0 and tensor.dtype is torch.int64)
    return seeds and tensor.device.type != "cpu"


def _values(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns a copy of a tensor's memory if the tensor is small. Otherwise returns sums over it. Both are flat ``uint8``."""
    if tensor.nbytes <= _SMALL:
        return (flat_bytes(tensor.detach().clone()),)
    return _sums(tensor.detach())


def _sums(tensor: Tensor) -> tuple[Tensor, ...]:
    """Returns sums over a large tensor's memory, each flat, ``uint8``. If any bit differs, they differ with near certainty.

    The memory is read once, as a matrix of 64-bit numbers whose columns are summed modulo 2**64.

    - A change of a single bit is detected anywhere.
    - Elements that have changed places are detected if they are in other columns. They are in the same columns only if they moved
      by a multiple of 1021 numbers. This is a prime number, and no size of a model is a multiple of it.
    - The highest bits of the numbers are the signs of every second float32. A change of signs is detected if their number in a
      column is odd. The number of rows is odd, so a change of all signs is detected.
    """
    size, begin = tensor.element_size(), tensor.storage_offset()
    extent = 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    # Not dense (a part of another tensor, or an expanded one), or not aligned for int64.
    if extent != tensor.numel() or begin * size % 8:
        tensor, begin = tensor.clone(memory_format=torch.contiguous_format), 0
    rows = tensor.nbytes // (8 * _COLUMNS)
    rows -= 1 - rows % 2
    summed = rows * 8 * _COLUMNS // size
    lanes = tensor.as_strided((summed,), (1,), begin).view(torch.int64).view(rows, _COLUMNS)
    rest = tensor.as_strided((tensor.numel() - summed,), (1,), begin + summed)
    return lanes.sum(0).view(torch.uint8), rest.clone().view(torch.uint8)


@contextmanager
def deterministic() -> Iterator[None]:
    """A context with deterministic kernels, where torch has them. In it torch fills new memory, and gives no warnings."""
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one for each kernel that is not deterministic
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            memory.fill_uninitialized_memory = True
            yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warns)
            memory.fill_uninitialized_memory = fills


def differences(first: SavedRun, second: SavedRun, unwritten: Set[int] = frozenset()) -> list[Tensor]:
    """Compares two runs up to the last tensor of the second run, because torch ends the second run early.

    Tensors at positions in ``unwritten`` are not compared.

    Each device compares all of its values at once. The host waits only to compare a weight's cast with autocast's own cast (see
    :meth:`Fingerprint.with_sums`).

    Returns:
        For each device a tensor of shape ``(1,)``, ``uint8``: 1 if values on the device differ, else 0. If the kind or place of a
        tensor differs, a single tensor on the CPU that is 1.
    """
    found: list[Tensor] = []
    pairs: dict[torch.device, dict[tuple[int, int], tuple[Tensor, Tensor]]] = {}
    for at, (one, other) in enumerate(zip(first.found, second.found, strict=False)):
        if at in unwritten and one.kind == other.kind:
            continue
        if bool(one.place) != bool(other.place):  # a weight's cast in the slot, and autocast's own cast
            one, other = (_on_the_host(each.with_sums()) for each in (one, other))
        if (one.kind, one.place) != (other.kind, other.place) or len(one.sums) != len(other.sums):
            return [torch.ones(1, dtype=torch.uint8, device="cpu")]
        for before, now in zip(one.sums, other.sums, strict=True):
            pairs.setdefault(now.device, {})[id(before), id(now)] = before, now
    with unseen(), torch.no_grad():
        for each in pairs.values():
            first_sums, second_sums = zip(*each.values(), strict=True)
            found.append((torch.cat(first_sums) != torch.cat(second_sums)).any().view(1).view(torch.uint8))
    return found


def _on_the_host(fingerprint: Fingerprint) -> Fingerprint:
    """Returns a fingerprint with its sums in host memory. The host waits for them."""
    return fingerprint._replace(sums=tuple(each.cpu() for each in fingerprint.sums))


class Differences:
    """Results of comparisons, in flight to the host, and the error for the first difference that was found.

    On an accelerator, results are copied to the host on the compute stream, and the host does not wait for them. The host reads
    results when it has waited for gradients: the result for a second run arrives before the gradients that follow from the run.

    Args:
        device: the device that computes.
        pin: True to page-lock host memory.
    """

    def __init__(self, device: Device, *, pin: bool) -> None:
        self._device = device
        self._pin = pin
        self._memory: PinnedMemory | None = None
        self._free: deque[int] = deque()  # the offsets of free bytes in `_memory`
        self._in_flight: deque[tuple[Callable[[], Exception], int]] = deque()
        self._error: Exception | None = None
        self._lock = threading.RLock()  # each device has a thread of autograd's

    def add(self, results: Sequence[Tensor], error: Callable[[], Exception]) -> None:
        """Adds the results of a comparison.

        Args:
            results: from :func:`differences`.
            error: makes the error for a difference.

        Raises:
            Exception: the error for the first difference, of any comparison, if the host has read it already.
        """
        with self._lock:
            for each in results:
                if self._device.computes_on_host or each.device != self._device.device:
                    if each.item():
                        self._error = self._error or error()
                else:
                    self._send(each, error)
        self.check()

    def _send(self, result: Tensor, error: Callable[[], Exception]) -> None:
        if self._memory is None:
            self._memory = PinnedMemory(self._device, PAGE, pin=self._pin)
            self._free.extend(range(PAGE))
        if not self._free:
            self._read(everything=True)
        at = self._free.popleft()
        place = self._memory.bytes[at : at + 1]
        with unseen():
            place.fill_(_PENDING)
            self._device.copy([place], [result], Stream.COMPUTE)
        self._in_flight.append((error, at))

    def check(self, *, everything: bool = False) -> None:
        """Reads the results that have arrived.

        Args:
            everything: wait for all results in flight.

        Raises:
            Exception: the error for the first difference since :meth:`clear`.
        """
        if self._in_flight:
            with self._lock:
                self._read(everything=everything)
        if self._error is not None:
            raise self._error

    def clear(self) -> None:
        """Called at the end of a backward. Waits for the results in flight, and forgets all differences."""
        with self._lock:
            self._read(everything=True)
            self._error = None

    def _read(self, *, everything: bool) -> None:
        """Reads the results that have arrived, in order, and keeps the error for the first difference.

        Args:
            everything: wait for all results in flight.
        """
        if self._in_flight and everything:
            assert self._memory is not None
            self._device.synchronize(self._device.record(Stream.COMPUTE), Wait.READ_AFTER_COMPARE)
            self._device.access(self._memory.bytes, None, write=False)
        while self._in_flight:
            assert self._memory is not None
            error, at = self._in_flight[0]
            with unseen():
                arrived = self._memory.bytes[at].item()
            if arrived not in (0, 1) and not everything:
                return
            self._in_flight.popleft()
            self._free.append(at)
            if arrived:
                self._error = self._error or error()
