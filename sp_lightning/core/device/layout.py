"""The layout of tensors in flat memory (spans, alignment), and tensors whose memory is absent.

A *block* (host) or a *slot* (device) is one flat ``uint8`` tensor that holds all parameters of one layer. A
:class:`Span` is the place of one parameter in it.

User code may be in inference mode when a layer is needed. In inference mode, ``view(dtype)``, ``set_`` and ``from_dlpack`` return
inference tensors, which must not be written outside of inference mode. Functions of this file and of ``lease`` therefore leave
inference mode first.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.core.torch_compat.private import null_storage, refuse_access, storage_id

ALIGNMENT = 512
"""Alignment of each parameter in bytes, that of torch's CUDA allocator.

Results depend on it: CPU kernels round differently with other alignments, and cublasLt chooses its kernel by alignment.
"""

PAGE = mmap.PAGESIZE
"""Bytes of a page of host memory: 4,096, or 65,536 on some ARM systems. Only whole pages can be locked and mapped."""


@dataclass(frozen=True)
class Span:
    """The place of one parameter in its layer's memory.

    Attributes:
        name: the parameter's qualified name, as in ``named_parameters``.
        offset: bytes from the start of the block or slot, a multiple of :data:`ALIGNMENT`.
        nbytes: bytes of the parameter, without padding.
        shape, stride, dtype: as in the user's parameter; strides in elements.
    """

    name: str
    offset: int
    nbytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def aligned(nbytes: int) -> int:
    """Rounds ``nbytes`` up to a multiple of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def whole_pages(nbytes: int) -> int:
    """Rounds ``nbytes`` up to whole pages, at least one."""
    return -(-max(nbytes, 1) // PAGE) * PAGE


def lay_out(
    named: Iterable[tuple[str, Tensor]], *, begin: int = 0, dtype: torch.dtype | None = None
) -> tuple[Span, ...]:
    """Returns consecutive, aligned spans for tensors. Dense strides (for example channels-last) are kept.

    Args:
        named: tensors with their names; their values are not read.
        begin: offset of the first span in bytes, a multiple of :data:`ALIGNMENT`.
        dtype: dtype of all spans; None: that of each tensor.
    """
    spans = []
    offset = begin
    for name, tensor in named:
        kept = dtype or tensor.dtype
        nbytes = tensor.numel() * kept.itemsize
        # empty_like makes the strides dense and keeps their order. It is slow for the fake tensors of ``superpipeline plan``, so
        # it is called only for tensors that are not contiguous. The context is needed because no values are read: the functions
        # must neither wait for a parameter's update, nor fetch an offloaded tensor.
        with torch.DisableTorchFunctionSubclass():
            dense = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
            stride = tuple(dense.stride())
        spans.append(Span(name, offset, nbytes, tensor.shape, stride, kept))
        offset += aligned(nbytes)
    return tuple(spans)


def total_bytes(spans: tuple[Span, ...]) -> int:
    """Returns the bytes of a block that holds ``spans``, including the padding after the last span."""
    return spans[-1].offset + aligned(spans[-1].nbytes) if spans else 0


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Returns torch's version counter of each tensor: the number of in-place writes that torch has seen."""
    with torch.DisableTorchFunctionSubclass():  # must not wait for a pending update
        return list(map(version_of, tensors))


version_of: Callable[[Tensor], int] = attrgetter("_version")


def view(memory: Tensor, span: Span) -> Tensor:
    """Returns the parameter at ``span`` of flat ``uint8`` memory that starts at offset 0 of its storage."""
    return strided(memory, span.offset, span.dtype, span.shape, span.stride)


def bytes_of(memory: Tensor, span: Span) -> Tensor:
    """Returns the bytes at ``span`` of flat ``uint8`` memory."""
    return memory[span.offset : span.offset + span.nbytes]


def part(memory: Tensor, span: Span) -> Tensor:
    """Does the same as :func:`view`, for flat ``uint8`` memory at any offset of its storage."""
    with no_inference_mode():
        return bytes_of(memory, span).view(span.dtype).as_strided(span.shape, span.stride)


def strided(memory: Tensor, offset: int, dtype: torch.dtype, shape: Iterable[int], stride: Iterable[int]) -> Tensor:
    """Returns a view of the storage of ``memory``. ``offset`` is in bytes, ``stride`` in elements of ``dtype``."""
    with no_inference_mode():
        result = torch.empty(0, dtype=dtype, device=memory.device)
        result.set_(memory.untyped_storage(), offset // dtype.itemsize, tuple(shape), tuple(stride))
    return result


def absent(like: Span | Tensor, device: torch.device, why: str) -> Tensor:
    """Returns a tensor without memory, with the shape, strides and dtype of ``like``. A read raises a RuntimeError with ``why``.

    Some functions do not see the class of a tensor (transforms, TorchScript, C++ extensions) and read its memory directly.
    Without the error they would compute with arbitrary bytes.
    """
    stride = like.stride if isinstance(like, Span) else like.stride()
    last = sum((length - 1) * step for length, step in zip(like.shape, stride, strict=True))
    storage = null_storage(0, device, (last + 1) * like.dtype.itemsize if like.shape.numel() else 0)
    with no_inference_mode():
        result = torch.empty(0, dtype=like.dtype, device=device).set_(storage, 0, like.shape, stride)
    refuse_access(storage_id(storage), why)
    return result


def flat_bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor's elements in order, flat ``uint8``: a view if the tensor is contiguous, else a copy."""
    flat = tensor.reshape(-1).contiguous()
    with no_inference_mode():  # as_strided, because one element counts as contiguous with any stride
        return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def is_dense(tensor: Tensor) -> bool:
    """Returns True if the elements of a tensor fill its memory without gaps, in any order of the dimensions."""
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride != size:
                return False
            size *= length
    return True
