"""Models with an embedding of which only rows travel, and what a user may do with its weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models import Block, Module
from tests.support.runs import Batches

ROWS = 300


class Text(nn.Module):
    """Looks up twice, in a table that is larger than a block."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 16, **options)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.table(numbers)
        for block in self.blocks:
            x = block(x)
        return x + self.table(numbers.flip(0))


class OutputsByTable(Text):
    """Reads the whole weight as well, which is tied by use and not by name."""

    def forward(self, numbers: Tensor) -> Tensor:
        return F.linear(super().forward(numbers), self.table.weight)


class WrittenInForward(Text):
    def forward(self, numbers: Tensor) -> Tensor:
        with torch.no_grad():
            self.table.weight[:5].mul_(0.9)
        x = super().forward(numbers)
        self.table.weight.data.clamp_(-1, 1)
        return x


class Words(nn.Module):
    """A table with other weights beside it, as BERT's, and a dropout behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(ROWS, 16), nn.LayerNorm(16)

    def forward(self, numbers: Tensor) -> Tensor:
        return F.dropout(self.norm(self.words(numbers)), 0.1, self.training)


class Inside(Text):
    """Two wrappers around tables in one list, as pykeen's representations."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.ModuleList([Words(), Words()])  # type: ignore[assignment]

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.table[0](numbers)  # type: ignore[index]
        for block in self.blocks:
            x = block(x)
        return x + self.table[1](numbers.flip(0))  # type: ignore[index]


class Checkpointed(Text):
    def forward(self, numbers: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, numbers, use_reentrant=False)


class CheckpointedWithHead(Text):
    """The second forward finds the whole weight there, the first did not."""

    def body(self, numbers: Tensor) -> Tensor:
        return self.table(numbers) @ self.table.weight.t()

    def forward(self, numbers: Tensor) -> Tensor:
        return super().forward(numbers).mean() + torch.utils.checkpoint.checkpoint(
            self.body, numbers, use_reentrant=False
        )


class Hooked(Module):
    """The user's hook sees the dense gradient that it would see on plain Lightning."""

    def __init__(self, net: Text) -> None:
        super().__init__(net)
        net.table.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3) + gradient.abs().mean())


class Asks(Module):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if not torch.is_grad_enabled():
            return loss
        (plain,) = torch.autograd.grad(loss, [self.net.table.weight], retain_graph=True)
        (graph,) = torch.autograd.grad(loss, [self.net.table.weight], create_graph=True)
        return loss + graph.square().sum() + plain.abs().sum()


class Frozen(Module):
    def __init__(self, net: Text) -> None:
        super().__init__(net)
        net.table.requires_grad_(False)


class Thaws(Frozen):
    """As ``BaseFinetuning`` does it, later."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.net.table.requires_grad_(True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Replaced(Module):
    """Between two steps, where nothing but its rows is read afterwards."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.net.table.weight.data = self.net.table.weight.data * 0.5


class KeepsGradients(Module):
    """So that the memory of the last step's gradient is not free."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.kept = [p.grad for p in self.parameters()]


class BothWays(Text):
    """By the module one way, by the function the other: dense together, as autograd adds them."""

    def forward(self, numbers: Tensor) -> Tensor:
        return super().forward(numbers) + F.embedding(numbers, self.table.weight, sparse=not self.table.sparse)


class Sgd(Module):
    """AdamW refuses sparse gradients."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def numbers(count: int = 4) -> Batches:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, ROWS, (3, 7), generator=generator) for _ in range(count)]


CASES: dict[str, Callable[[], Module]] = {
    "looked-up": lambda: Module(Text()),
    "padding": lambda: Module(Text(padding_idx=-3)),
    "by-frequency": lambda: Module(Text(scale_grad_by_freq=True)),
    "sparse": lambda: Sgd(Text(sparse=True)),
    "whole-as-well": lambda: Module(OutputsByTable()),
    "written": lambda: Module(WrittenInForward()),
    "checkpointed": lambda: Module(Checkpointed()),
    "checkpointed-with-head": lambda: Module(CheckpointedWithHead()),
    "hooked": lambda: Hooked(Text()),
    "asked-for": lambda: Asks(Text()),
    "frozen": lambda: Frozen(Text()),
    "thawed": lambda: Thaws(Text()),
    "kept": lambda: KeepsGradients(Text()),
    "inside": lambda: Module(Inside()),
    "sparse-and-dense": lambda: Sgd(BothWays(sparse=True)),
    "dense-and-sparse": lambda: Sgd(BothWays()),
}
