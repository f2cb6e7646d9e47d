"""Floating-point operations of operators for which torch has no formula, or not the right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from sp_lightning.device.torch_private import (
    cpu_attention_backward_operator,
    cpu_attention_operator,
    grouped_mm_operator,
)


def formula(operator: Any) -> Callable[..., int] | None:
    """Returns the function that counts an operator's FLOPs, given its arguments and its result; None if it has none."""
    return _FLOPS.get(operator) or flop_registry.get(operator)


def _grouped_flops(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    """FLOPs of several experts at once, which share out rows of ``a``, columns of ``b`` or what is summed over."""
    experts_share_nothing = a.ndim == 3 and b.ndim == 3
    return 2 * a.numel() * b.shape[-1] if a.ndim == 2 or experts_share_nothing else 2 * a[0].numel() * b.shape[-1]


def _convolution_backward_flops(
    gradient: Tensor, x: Tensor, weight: Tensor, _bias: Any, _stride: Any, _padding: Any, _dilation: Any, transposed: bool,
    _output_padding: Any, _groups: int, mask: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """Counts a forward for each gradient that is wanted. torch's own formula ignores the groups."""
    multiplications = weight[0].numel() * (x if transposed else gradient).numel()
    return 2 * multiplications * sum(bool(wanted) for wanted in mask[:2])


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    """FLOPs of the CPU's attention, for which torch 2.10 and 2.11 have no formula. Several queries may share a key."""
    return 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward_flops(
    _gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> int:
    """Scores are computed again; then come the gradients of query and key, of value and of the scores."""
    return 2 * query[..., 0].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


_FLOPS: dict[Any, Callable[..., int]] = {
    grouped_mm_operator: _grouped_flops,
    torch.ops.aten.convolution_backward: _convolution_backward_flops,
    cpu_attention_operator: _attention_flops,
    cpu_attention_backward_operator: _attention_backward_flops,
}
