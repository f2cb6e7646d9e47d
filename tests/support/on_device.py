"""Modules whose optimizer is given, and the strategy that steps it on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning import SuperpipelineStrategy
from tests.support.models import Module, Stack
from tests.support.runs import superpipeline


def adamw(parameters: Any) -> Optimizer:
    """AdamW as it comes."""
    return torch.optim.AdamW(parameters, lr=1e-2)


class Stepped(Module):
    """A stack of blocks.

    Args:
        make: makes its optimizer.
    """

    def __init__(self, make: Callable[[Any], Optimizer] = adamw) -> None:
        super().__init__(Stack())
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def on_device(**options: Any) -> SuperpipelineStrategy:
    """The smallest window, with steps on the device."""
    return superpipeline(k=1, optimizer_on="gpu", **options)


class Alternates(nn.Module):
    """Two parts of the same shapes that take turns: in each step one has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.parts[self.calls % 2](x))


def alternating() -> Stepped:
    """Blocks whose parts take turns, so that the state of the second ones is made while the first ones keep theirs."""
    module = Stepped()
    module.net = nn.Sequential(*(Alternates() for _ in range(4)))
    return module
