"""Seconds of a loan of the GPU (``gpu_released``) between two steps of an 8B model: the real engine on a simulated clock device.

The shape is Llama 3 8B in 16 bits, with all sizes and the rate of copies divided by the same number. A layer computes as long as
its upload takes. Only copies and computation take time.
"""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.device import Stream
from sp_lightning.tools.planner.prediction.visits import Rates
from tests.support.clocked import Clocked

RATE, SMALLER = 25e9, 2**16
"""Bytes per second, and the number by which all sizes are divided."""
BLOCKS, BLOCK_BYTES, TABLE_BYTES = 32, 2 * 218_112_000, 2 * 128_256 * 4096
STEPS, FIRST = 8, 3
"""The batches, and the first one that counts: the first ones have no optimizer state yet."""


class Weighs(nn.Module):
    """A layer of the shape's bytes."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(nbytes // SMALLER // 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.mean()


class Trained(pl.LightningModule):
    """The model.

    Args:
        device: its clocks are read.
        adapter: True if only one small weight is trained, and all layers are frozen.
    """

    def __init__(self, device: Clocked, adapter: bool) -> None:
        super().__init__()
        self.first, self.last = Weighs(TABLE_BYTES), Weighs(TABLE_BYTES)
        self.blocks = nn.ModuleList(Weighs(BLOCK_BYTES) for _ in range(BLOCKS))
        self.requires_grad_(not adapter)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("frequencies", torch.ones(64))
        self.clocks = device
        self.at = list[float]()
        self.before = self.staying = 0
        self.frees = 0.0

    @property
    def now(self) -> float:
        return max(*self.clocks.now.values(), self.clocks.host)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.at.append(max(self.clocks.now[Stream.COMPUTE], self.clocks.host))
        x = self.first(batch * self.scale)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.last(x).square().mean()
        return found

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Lends(Trained):
    """Lends the GPU after each batch. A run without loans has no such hook, after which weights count as written."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        begun, self.before = self.now, strategy._run.engine.weight_bytes
        with strategy.gpu_released() as self.staying:
            self.frees = self.now - begun


def train(trained: str, stay: int, k: int, *, lends: bool) -> tuple[float, Trained]:
    """Trains, and returns the seconds of a batch on the clocks, and the module."""
    rate = RATE / SMALLER
    device = Clocked(Rates(rate, rate, math.inf, math.inf, visit_seconds=0.0), BLOCK_BYTES / RATE, 0.0)
    where: Any = {"optimizer_on": "gpu", "gpu_layers": stay} if stay else {}
    strategy = SuperpipelineStrategy(k=k, k_prime=1, optimizer_overlap="off", **where)
    module = (Lends if lends else Trained)(device, trained == "an adapter")
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_epochs=1, logger=False, barebones=True)
    with mock.patch("sp_lightning.trainer.run.device_for", return_value=device):
        trainer.fit(module, DataLoader(torch.ones(STEPS, 2), batch_size=None))  # type: ignore[arg-type]
    return (module.at[-1] - module.at[FIRST]) / (STEPS - 1 - FIRST), module
