"""Layers with a norm, which saves its weight as it is, under checkpoints and hooks of all kinds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Normed(nn.Module):
    """A norm saves its weight as it is, where a linear layer saves a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.norm(torch.tanh(self.linear(x))))


class NormedStack(nn.Module):
    def __init__(self, how: str, *, frozen: bool) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(Normed() for _ in range(4))
        for block in self.blocks:
            block.norm.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_() if self.training else x
        for block in self.blocks:
            if self.how == "calls":
                x = checkpoint(block, x, use_reentrant=False)
            elif self.how == "inside":
                x = checkpoint(block.forward, x, use_reentrant=False)
            elif self.how == "all":
                x = checkpoint(block, x, use_reentrant=False, early_stop=False)
            else:
                with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                    x = block(x) if self.how == "kept" else block.forward(x)
        return x
