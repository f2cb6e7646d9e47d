"""Trainings in which user code runs at moments of a batch, and small nets for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.models import EitherOptimization


class Linears(nn.Module):
    """Two linear layers: their backwards need a transpose each, and the second one the first one's output."""

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
        self.first, self.second = nn.Linear(1, 1), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x)) * self.first(x[..., :1])


def net_of(block: Callable[[], nn.Module] = Linears, depth: int = 4) -> nn.Sequential:
    return nn.Sequential(*(block() for _ in range(depth)))


Code = Callable[[Any], Any]


class At(EitherOptimization):
    """Runs code at moments of a training. The code gets the module.

    Args:
        block: makes a layer of the net.
        depth: the number of layers.
        manual: True to optimize by hand.
        loss: returns the loss; it gets the module and the batch.
        moments: hooks of Lightning by name, or one of ``init``, ``start`` (of a training step), ``after_forward``,
            ``after_backward``, and, by hand, ``after_step``.

    Attributes:
        kept: for references to weights: a list, in which no module looks for parameters.
        seen: values that have to be those of plain Lightning.
        noted: values that a test looks at, whatever those of plain Lightning are.
        batch: the number of the training step's batch; -1 before the first step.
    """

    def __init__(
        self,
        block: Callable[[], nn.Module] = Linears,
        *,
        depth: int = 4,
        manual: bool = False,
        loss: Callable[[Any, Tensor], Tensor] | None = None,
        **moments: Code,
    ) -> None:
        super().__init__(net_of(block, depth), manual=manual)
        self.kept: list[Any] = []
        self.seen: list[Any] = []
        self.noted: list[Any] = []
        self.batch = -1
        self.own_loss = loss
        self.moments = moments
        if "after_backward" in moments and not manual:
            moments["on_after_backward"] = moments.pop("after_backward")
        for name, code in moments.items():
            if name.startswith("on_"):  # only hooks that do something, because the engine asks which there are
                setattr(self, name, lambda *_, code=code: (code(self), None)[1])
        self.at("init")

    def at(self, moment: str) -> None:
        if moment in self.moments:
            self.moments[moment](self)

    @property
    def optimizer(self) -> Any:
        """The first one that Lightning has, as it is."""
        return self.trainer.optimizers[0]

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) if self.own_loss is None else self.own_loss(self, batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batch = batch_idx
        self.at("start")
        loss = self.loss(batch)
        self.at("after_forward")
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.at("after_backward")
            optimizer.step()
            self.at("after_step")
        return loss


# ---------------------------------------------------------------------- ways to write a weight


def rebind(p: Any) -> Any:
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


def add_then_multiply(p: Any) -> None:
    p.data += 0.1  # which ends in p.data = p.data
    p.data.mul_(0.5)


WRITES: list[Callable[[Any], None]] = [
    rebind, rebind_twice, multiply, copy_into, rebind_then_multiply, multiply_then_rebind, add_then_multiply,
]  # fmt: skip


def each(write: Callable[[Any], Any], *, of: str = "net") -> Code:
    """Code that writes all weights of a part of the module."""
    return lambda m: [write(p) for p in getattr(m, of).parameters()]


# ---------------------------------------------------------------------- modules that give their weights other memory


class GivesItsOwnValues(nn.Module):
    """As bitsandbytes' 8-bit layer: it computes with a copy that it holds, and gives the weight that copy in each forward."""

    def __init__(self, write: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 16).half(), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(64))
        self.back = nn.Linear(64, 16, bias=False).requires_grad_(False)
        self.write = write
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "copied"):
            with torch.no_grad():
                self.copied = [self.weight.detach().clone()]
        (held,) = self.copied
        self.calls += 1
        out = F.linear(x, self.weight.float()) * self.scale
        self.weight.data = held
        if self.calls == 3 and self.write:
            {
                "held": lambda: held.mul_(0.5),
                "held.data": lambda: held.data.mul_(0.5),
                "weight": lambda: self.weight.mul_(0.5),
                "other": lambda: setattr(self.weight, "data", held * 0.5),
            }[self.write]()
        return torch.tanh(self.back(torch.tanh(out)))


class Checkpointed(nn.Module):
    """Checkpoints its own forward, as transformers does: no call of a module tells that it runs again."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self._run, x, use_reentrant=False)
        return out

    def _run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.forward(x)
        return x


class CastsItself(nn.Linear):
    """As diffusers' layerwise casting: weights in 8 bits are cast up before the forward and back after it."""

    def forward(self, x: Tensor) -> Tensor:
        self.to(torch.bfloat16)
        out = super().forward(x)
        self.to(torch.float8_e4m3fn)
        return out


class CastBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = CastsItself(16, 16).requires_grad_(False), CastsItself(16, 16).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x) * self.scale)))


def in_8_bits(block: Callable[[], nn.Module]) -> At:
    """Casts ``first`` and ``second`` of each block to 8 bits from the beginning. Batches are cast to 16 bits."""
    module = At(block, loss=lambda m, x: m.net(x.bfloat16()).square().mean())
    module.bfloat16()
    for each_block in module.net:
        each_block.first.to(torch.float8_e4m3fn)
        each_block.second.to(torch.float8_e4m3fn)
    return module
