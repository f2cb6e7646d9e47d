"""Layers and kernels that autograd may run again, and what differs then."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.support.models import Module, Stack


class Block(nn.Module):
    """``x + tanh(inner(x)) * factor``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def factor(self, x: Tensor) -> Any:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)) * self.factor(x)


_numbers = itertools.count()


def new_memory() -> Tensor:
    """Two numbers that nothing has written. On the simulated device they differ each time."""
    return torch.empty(2, dtype=torch.int64)


class Kernel(torch.autograd.Function):
    """Doubles, outside of torch. ``saved`` makes a tensor that it saves beside its input, ``rounds`` a factor of its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Callable[[], Tensor], rounds: Callable[[], float]) -> Tensor:  # type: ignore[override]
        out = torch.empty_like(x)
        out.copy_(torch.from_numpy(x.detach().float().cpu().numpy() * np.float32(2 * rounds())))
        ctx.save_for_backward(x, saved(), out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * 2, None, None


class RunsKernel(Block):
    """As FlashAttention 2, which saves memory for a seed and writes it only if there is dropout."""

    saved = staticmethod(new_memory)

    def rounds(self) -> float:
        return 1.0

    def factor(self, x: Tensor) -> Any:
        return Kernel.apply(self.inner(x), self.saved, self.rounds)


class Scales(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        assert len(ctx.saved_tensors) == 2
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0).to(weight.dtype)


class CountsSaved(Block):
    """As mamba's and MegaBlocks' kernels."""

    def factor(self, x: Tensor) -> Any:
        return Scales.apply(torch.tanh(self.inner(x)), self.inner.bias)


def with_one(block: Callable[[], nn.Module]) -> Any:
    def make() -> Module:
        stack = Stack()
        stack.blocks[2] = block()
        return Module(stack)

    return make
