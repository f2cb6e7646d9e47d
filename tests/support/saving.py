"""Layers that save a known number of large tensors, and little else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import Module

MODES = ("recompute", "offload")


# ---------------------------------------------------------------------- what leaves, and how often


class Saves(torch.autograd.Function):
    """Saves some large tensors, and has no others."""

    SIZE = 2**16

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(*(x.new_ones(Saves.SIZE // 4).mul_(x[0, 0]) for _ in range(count)))
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.saved_tensors[-1][0], None


class Saving(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return self.after(Saves.apply(self.before(x), self.count))  # type: ignore[no-untyped-call]


def saving(counts: Sequence[int]) -> Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Saving(count) for count in counts)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    return Module(Net())


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 8, generator=generator) for _ in range(3)]
