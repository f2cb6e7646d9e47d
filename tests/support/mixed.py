"""Runs in mixed precision without callbacks of the tests', and modules that note what they see."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from tests.support.bare import bare as without_callbacks
from tests.support.models import Block, Module, Stack, vectors
from tests.support.poison import poisoned
from tests.support.runs import assert_equal, superpipeline
from tests.support.simdevice import simulated


class Masked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * (self.weight > 0), self.bias) + F.linear(x, self.weight, self.bias)


MIXED: dict[str, Any] = {"precision": "bf16-mixed"}


def scaled(kind: type[torch.amp.GradScaler] = torch.amp.GradScaler, init_scale: float = 2.0**8) -> dict[str, Any]:
    """Options of a trainer that trains in 16-mixed on the CPU, where Lightning would take bf16-mixed by itself."""
    scaler = kind("cpu", init_scale=init_scale, growth_interval=2, backoff_factor=2.0**-14)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


def bare(make: Any, strategy: Any, **options: Any) -> list[Any]:
    """The same in mixed precision."""
    return without_callbacks(make, strategy, vectors(4), **{**MIXED, **options})


def assert_like_plain(make: Any, **options: Any) -> None:
    plain = bare(make, "auto", **options)
    for context in (nullcontext, poisoned, simulated):
        for k in (1, 99):
            with context():
                ours = bare(make, superpipeline(k=k), **options)
            assert_equal(ours, plain, f"{context.__name__}, k={k}")


class Seeing(Module):
    """Notes what it sees, and does something with the weights of its layers before or while they are called."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net or Stack(3))
        self.seen: list[Any] = []

    def see(self, *things: Any) -> None:
        self.seen.extend(thing.detach().clone() if isinstance(thing, Tensor) else thing for thing in things)


class Manual(Seeing):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net)
        self.automatic_optimization = False


class OwnLinear(Block):
    """A subclass, an instance with a forward of its own, and a module that is called with its weight by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Masked(16, 32)
        self.more = nn.Linear(16, 16)
        self.more.forward = lambda x: F.linear(input=x, weight=self.more.weight * 2, bias=self.more.bias)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.more(x)
        own = {"weight": self.outer.weight * 0.5, "bias": self.outer.bias.detach()}
        return super().forward(x) + torch.func.functional_call(self.outer, own, (self.inner(x),))


class Readers(nn.Module):
    """Modules that read their children's weights past their calls, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[None]
        x = self.encoder(x + self.attention(x, x, x)[0])
        return self.decoder(x, x)[0]


class Tied(nn.Module):
    """One weight in two linear layers travels as a cast; one that an embedding has as well does not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[3].inner.weight = self.blocks[0].inner.weight
        self.table = nn.Embedding(16, 16)
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.table(torch.arange(x.shape[0])))


def of_blocks(block: type[Block]) -> Any:
    class Of(Stack):
        def __init__(self) -> None:
            super().__init__(0)
            self.blocks = nn.ModuleList(block() for _ in range(3))

    Of.__name__ = block.__name__
    return Of
