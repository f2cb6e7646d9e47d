"""A frozen base with adapters, as trials of a shared base train it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from sp_lightning import SharedBase, SuperpipelineStrategy
from sp_lightning.experimental.sharing.shared_base import current
from tests.support.models import Module
from tests.support.runs import Outcome, fit

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
WIDTH = 64  # some pages for each weight


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Inside, the main thread can be interrupted as Ctrl-C does it, even if this process was started to ignore that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


class Adapted(nn.Module):
    """A frozen linear layer with a trained adapter, and dropout."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, rank, bias=False)
        self.up = nn.Linear(rank, WIDTH, bias=False)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(self.drop(x)))) + x


def blocks(depth: int) -> nn.Sequential:
    """The frozen weights of each block are the same, whatever the depth."""
    torch.manual_seed(1)
    return nn.Sequential(*(Adapted() for _ in range(depth)))


def shared(max_trials: int | None = None, *, dtype: torch.dtype = torch.float32, **options: Any) -> SharedBase:
    with torch.random.fork_rng():
        return SharedBase(blocks(7).to(dtype), max_trials, **options)


class Learner(Module):
    """A frozen base of some layers, the same in all trials, with adapters of one's own."""

    def __init__(self, rate: float, depth: int = 4) -> None:
        super().__init__(blocks(depth))
        torch.manual_seed(int(1e5 * rate))
        for block in self.net:  # type: ignore[union-attr]
            nn.init.normal_(block.up.weight, std=0.1)
        self.rate = rate
        if (trial := current()) is not None:
            self.take(trial.base)

    def take(self, base: SharedBase) -> Self:
        """Takes the frozen weights of a base, which are equal."""
        for block, its in zip(self.net, base.copy(), strict=False):  # type: ignore[call-overload]
            block.base = its.base
        return self

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.rate)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def batches(rate: float, count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(int(1e6 * rate))
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(count)]


def learn(
    rate: float, *, make: Callable[[float], pl.LightningModule] = Learner, plain: bool = False, **options: Any
) -> Outcome:
    """A trial."""
    ours = {
        name: options.pop(name) for name in ("k", "activations", "optimizer_overlap", "optimizer_on") if name in options
    }
    strategy: Any = "auto" if plain else SuperpipelineStrategy(**{"k": 1, **ours})
    return fit(lambda: make(rate), batches(rate), strategy, **options)
