"""Modules that write their weights through ``.data``, and ways to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import Module


class Linears(nn.Module):
    """Two linear layers: their backwards need a transpose each, and the second one what the first one gave."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


class Convolutions(nn.Module):
    """Two convolutions and a norm: their backwards need the weights themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Conv1d(16, 16, 1), nn.Conv1d(16, 16, 1), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x[..., None])))[..., 0]
        return torch.tanh(self.norm(x))


class Scalars(nn.Module):
    """Weights of one element: a view of one looks like the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(1, 1), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.wide(x)) * self.narrow(x[..., :1])


BLOCKS = {"linear": Linears, "convolution": Convolutions, "scalar": Scalars}


def rebind(p: Any) -> None:
    p.data = 0.5 * p.data


def rebind_twice(p: Any) -> None:
    p.data = 0.5 * p.data
    p.data = p.data + 0.1


def multiply(p: Any) -> None:
    p.data.mul_(0.5)


def copy_into(p: Any) -> None:
    p.data.copy_(0.5 * p.data)


def rebind_then_multiply(p: Any) -> None:
    p.data = 0.5 * p.data
    p.data.mul_(0.5)


def multiply_then_rebind(p: Any) -> None:
    p.data.mul_(0.5)
    p.data = p.data + 0.1


WRITES = [rebind, rebind_twice, multiply, copy_into, rebind_then_multiply, multiply_then_rebind]


class Writes(Module):
    """Writes all its weights between forward and backward."""

    def __init__(self, block: type[nn.Module], write: Callable[[Any], None]) -> None:
        super().__init__(nn.Sequential(*(block() for _ in range(4))))
        self.write = write

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.training:
            for p in self.net.parameters():
                self.write(p)
        return loss


class WritesUnseen(Module):
    """Writes of which torch shows no sign, by ``how``."""

    def __init__(self, how: str) -> None:
        super().__init__(nn.Sequential(*(Linears() for _ in range(4))))
        self.old = [[layer.second.weight for layer in self.net]]
        self.how = how

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.how == "reference":
            self.old[0][1].data.mul_(0.5)
        elif self.how == "numpy":
            self.net[1].second.weight.detach().numpy()[:] *= 0.5
        elif self.how == "dlpack":
            torch.from_dlpack(self.net[1].second.weight.detach()).mul_(0.5)
        return loss
