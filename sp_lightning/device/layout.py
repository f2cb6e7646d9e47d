"""How tensors lie in flat memory: spans and alignment; and what can be asked of a tensor whose memory is not there.

A *block* (host) or a *slot* (device) is one flat ``uint8`` tensor that holds all parameters of one layer. A
:class:`Span` says where a parameter lies in it.

User code may be in inference mode when a layer is needed. In it ``view(dtype)``, ``set_`` and ``from_dlpack`` make inference
tensors even of ordinary memory, and nothing outside of inference mode may write these. So what is made here, and in ``lease``, is
made outside of it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from sp_lightning.torch_compat.modes import no_inference_mode
from sp_lightning.torch_compat.private import null_storage, refuse_access, storage_id

ALIGNMENT = 512
"""Every parameter begins at a multiple of so many bytes, as it would if torch's CUDA allocator had placed it.

Results depend on that: vectorised CPU kernels round differently on other alignments, and cublasLt chooses its kernel
by alignment.
"""

PAGE = mmap.PAGESIZE
"""Bytes of a page of host memory, 4,096 or, on some ARM systems, 65,536: the system locks and maps whole pages alone."""


@dataclass(frozen=True)
class Span:
    """Where one parameter lies in its layer's memory.

    Attributes:
        name: the parameter's qualified name, as in ``named_parameters``.
        offset: bytes from the start of the block or slot, a multiple of :data:`ALIGNMENT`.
        nbytes: bytes that the parameter takes, without the padding behind it.
        shape, stride, dtype: those of the user's parameter; strides in elements.
    """

    name: str
    offset: int
    nbytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def whole_pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages, of which there is at least one."""
    return -(-max(nbytes, 1) // PAGE) * PAGE


def lay_out(
    named: Iterable[tuple[str, Tensor]], *, begin: int = 0, dtype: torch.dtype | None = None
) -> tuple[Span, ...]:
    """Returns one span for each tensor, one after the other, aligned. Dense strides (of channels-last, say) are kept.

    Args:
        named: tensors with their names; their values are not read.
        begin: offset of the first span in bytes, a multiple of :data:`ALIGNMENT`.
        dtype: of all spans; None for those of the tensors.
    """
    spans = []
    offset = begin
    for name, tensor in named:
        kept = dtype or tensor.dtype
        nbytes = tensor.numel() * kept.itemsize
        # empty_like keeps the order of the strides and makes them dense. It takes long where plan has torch's fake tensors.
        with torch.DisableTorchFunctionSubclass():  # a stand-in itself is asked, which brings no values
            dense = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
            stride = tuple(dense.stride())
        spans.append(Span(name, offset, nbytes, tensor.shape, stride, kept))
        offset += aligned(nbytes)
    return tuple(spans)


def total_bytes(spans: tuple[Span, ...]) -> int:
    """Bytes of the block that holds ``spans``, with the padding behind the last span."""
    return spans[-1].offset + aligned(spans[-1].nbytes) if spans else 0


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """How often each tensor was written, as far as torch counts it."""
    with torch.DisableTorchFunctionSubclass():  # code that computes with one has waited for its update
        return list(map(_version, tensors))


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Where the first element of each tensor lies; of one whose memory is hidden, where it lay."""
    with torch.DisableTorchFunctionSubclass():  # a stand-in itself is asked
        if not _hidden:
            return list(map(_data_ptr, tensors))
        return [_hidden[id(each)] if id(each) in _hidden else _data_ptr(each) for each in tensors]


_hidden: dict[int, int] = {}
"""By the ``id`` of a tensor whose memory is hidden: where it lay."""


def hide(tensor: Tensor, span: Span, why: str) -> None:
    """Takes the memory from a host tensor. Reading it raises a RuntimeError, ``why``, until :func:`shown` was called."""
    with no_inference_mode(), torch.no_grad(), torch.DisableTorchFunctionSubclass():
        _hidden[id(tensor)] = tensor.data_ptr()
        tensor.data = absent(span, tensor.device, why)


def shown(tensor: Tensor) -> None:
    """Notes that a tensor has memory again."""
    _hidden.pop(id(tensor), None)


_version: Callable[[Tensor], int] = attrgetter("_version")
_data_ptr: Callable[[Tensor], int] = Tensor.data_ptr


def view(memory: Tensor, span: Span) -> Tensor:
    """Returns the parameter at ``span`` of a flat ``uint8`` tensor that begins where its storage begins."""
    return strided(memory, span.offset, span.dtype, span.shape, span.stride)


def bytes_of(memory: Tensor, span: Span) -> Tensor:
    """Returns the bytes at ``span`` of flat ``uint8`` memory, flat as well."""
    return memory[span.offset : span.offset + span.nbytes]


def part(memory: Tensor, span: Span) -> Tensor:
    """As :func:`view`, for a flat ``uint8`` tensor that may begin anywhere in its storage."""
    with no_inference_mode():
        return bytes_of(memory, span).view(span.dtype).as_strided(span.shape, span.stride)


def strided(memory: Tensor, offset: int, dtype: torch.dtype, shape: Iterable[int], stride: Iterable[int]) -> Tensor:
    """Returns a view that begins ``offset`` bytes into the storage of ``memory``; ``stride`` in elements of ``dtype``."""
    with no_inference_mode():
        result = torch.empty(0, dtype=dtype, device=memory.device)
        result.set_(memory.untyped_storage(), offset // dtype.itemsize, tuple(shape), tuple(stride))
    return result


def absent(like: Span | Tensor, device: torch.device, why: str) -> Tensor:
    """A tensor without memory that has the shape, strides and dtype of ``like``. Reading it raises a RuntimeError: ``why``.

    torch hides a tensor's class from some functions (transforms, TorchScript, C++ extensions). They read its memory, and would
    compute with anything that was there.
    """
    stride = like.stride if isinstance(like, Span) else like.stride()
    last = sum((length - 1) * step for length, step in zip(like.shape, stride, strict=True))
    storage = null_storage(0, device, (last + 1) * like.dtype.itemsize if like.shape.numel() else 0)
    with no_inference_mode():
        result = torch.empty(0, dtype=like.dtype, device=device).set_(storage, 0, like.shape, stride)
    refuse_access(storage_id(storage), why)
    return result


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements in their order: ``uint8``, flat; a view where they lie so, else a copy."""
    flat = tensor.reshape(-1).contiguous()
    with no_inference_mode():  # One element counts as contiguous, whatever its stride is.
        return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def is_dense(tensor: Tensor) -> bool:
    """Returns True if a tensor is dense: its elements fill its memory without gaps, in any order of the dimensions."""
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride != size:
                return False
            size *= length
    return True
