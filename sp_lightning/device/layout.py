"""How tensors lie in flat memory: spans and alignment.

A *block* (host) or a *slot* (device) is one flat ``uint8`` tensor that holds all parameters of one layer. A
:class:`Span` says where a parameter lies in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# Vectorised CPU kernels give other last bits on other alignments, and cublasLt chooses its kernel by alignment:
# every parameter begins where an allocator would have put it.
ALIGNMENT = 512

PAGE = 4096


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
