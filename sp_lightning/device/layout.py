"""How tensors lie in flat memory: spans, alignment, and storages that are lent.

A *block* (host) or a *slot* (device) is one flat ``uint8`` tensor that holds all parameters of one layer. A
:class:`Span` says where a parameter lies in it; a :class:`Lease` hands memory out in such a way that one can tell later
whether anybody still holds it.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from sp_lightning.device.torch_private import (
    TENSOR_METADATA,
    count_dispatch_modes,
    disable_dispatch_modes,
    storage_use_count,
)

# Vectorised CPU kernels give other last bits on other alignments, and cublasLt chooses its kernel by alignment:
# every parameter begins where an allocator would have put it.
ALIGNMENT = 512


@dataclass(frozen=True)
class Span:
    """Where one parameter lies in its layer's memory.

    Attributes:
        name: qualified parameter name, as in ``named_parameters``.
        offset: bytes from the start of the block or slot; a multiple of :data:`ALIGNMENT`.
        nbytes: bytes that the parameter takes.
        shape, stride, dtype: those of the user's parameter (strides in elements).
    """

    name: str
    offset: int
    nbytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def no_inference_mode() -> AbstractContextManager[None]:
    """Outside inference mode, whose tensors could not be saved for a later backward. Costs nothing where that is so."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def no_dispatch_modes() -> AbstractContextManager[Any]:
    """The engine's operators are none of the model's: dispatch modes (selective checkpoints, counters) do not see them."""
    return disable_dispatch_modes() if count_dispatch_modes() else nullcontext()


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def lay_out(named: Iterable[tuple[str, Tensor]], *, begin: int = 0) -> tuple[Span, ...]:
    """Lay tensors one after the other, each aligned; dense strides (channels-last, say) are kept."""
    spans = []
    offset = begin
    for name, tensor in named:
        nbytes = tensor.numel() * tensor.element_size()
        stride = tuple(torch.empty_like(tensor, device="meta").stride())  # preserve_format: dense, same order
        spans.append(Span(name, offset, nbytes, tensor.shape, stride, tensor.dtype))
        offset += aligned(nbytes)
    return tuple(spans)


def total_bytes(spans: tuple[Span, ...]) -> int:
    """Bytes of the block that holds ``spans``, alignment included."""
    return spans[-1].offset + aligned(spans[-1].nbytes) if spans else 0


def lend(memory: Tensor) -> Tensor:
    """The same memory under a *new* storage.

    When the new storage has expired (``StorageWeakRef``), nobody can reach the memory through it any more.

    Args:
        memory: flat ``uint8`` tensor on any device; it stays alive as long as the new storage does.
    """
    return from_dlpack(to_dlpack(memory))


class Lease:
    """Memory that is handed out under a storage of its own, again and again, while nobody else holds any of it.

    Args:
        memory: flat ``uint8`` tensor on any device.
    """

    def __init__(self, memory: Tensor) -> None:
        with no_inference_mode():
            self.memory = lend(memory)
        self._storage = self.memory.untyped_storage()
        self._views: dict[Hashable, list[Tensor]] = {}
        self._own = self._holders()

    @property
    def in_use(self) -> bool:
        """Whether anybody but this object can reach the memory: any tensor or storage object, in Python or in C++.

        For good once the storage was moved elsewhere in place, as ``share_memory_`` does: others may have mapped it.
        """
        return self._holders() != self._own

    def _holders(self) -> tuple[int, int, int]:
        storage = self._storage
        return storage_use_count(storage), sys.getrefcount(storage), storage.data_ptr()

    def views(self, key: Hashable, spans: Sequence[Span]) -> list[Tensor]:
        """The parameters at ``spans``, made once for each ``key``. Nobody may keep them: that would not be seen."""
        if key not in self._views:
            with no_inference_mode():
                self._views[key] = [view(self.memory, span) for span in spans]
            tensors, objects, address = self._own
            self._own = tensors + len(spans), objects, address
        return self._views[key]


def shared(tensor: Tensor) -> bool:
    """Whether somebody else holds the memory of a tensor: another tensor, a graph."""
    storage = tensor.untyped_storage()
    return bool(storage_use_count(storage) > 2)  # the tensor, and the object here


def view(memory: Tensor, span: Span) -> Tensor:
    """The parameter at ``span`` of a flat ``uint8`` tensor whose storage begins with the block or slot."""
    return strided(memory, span.offset, span.dtype, span.shape, span.stride)


def part(memory: Tensor, span: Span) -> Tensor:
    """As :func:`view`, of memory that need not begin its storage."""
    return memory[span.offset : span.offset + span.nbytes].view(span.dtype).as_strided(span.shape, span.stride)


def strided(memory: Tensor, offset: int, dtype: torch.dtype, shape: Iterable[int], stride: Iterable[int]) -> Tensor:
    """A view ``offset`` bytes into the storage of ``memory``; ``stride`` in elements of ``dtype``."""
    result = torch.empty(0, dtype=dtype, device=memory.device)
    result.set_(memory.untyped_storage(), offset // dtype.itemsize, tuple(shape), tuple(stride))
    return result


def _metadata() -> frozenset[Any]:
    attributes = (
        "shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "is_cuda", "is_cpu", "is_xpu",
        "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "is_mps", "itemsize", "nbytes",
        "names", "output_nr", "retains_grad", *TENSOR_METADATA,
    )  # fmt: skip
    methods = (
        "size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_inference", "get_device",
        "ndimension", "is_signed", "__len__", "has_names",
    )  # fmt: skip
    functions = ("numel", "is_floating_point", "is_complex", "is_inference", "is_signed")
    found = [getattr(Tensor, name).__get__ for name in attributes if hasattr(getattr(Tensor, name, None), "__get__")]
    found += [getattr(Tensor, name) for name in methods if hasattr(Tensor, name)]
    found += [getattr(torch, name) for name in functions]
    return frozenset(found)


METADATA = _metadata()
"""What torch can be asked of a tensor without a look at its memory."""
