"""Steps on the device take as long as was predicted: the real engine on a device whose streams, and whose threads, are clocks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.device import Stream
from sp_lightning.tools.planner.prediction.clocks import ClockDevice
from sp_lightning.tools.planner.prediction.simulator import Walk
from sp_lightning.tools.planner.prediction.visits import Rates, Visit
from tests.support.clocked import LAYERS, STEPS, WIDTH, Clocked, Trained
from tests.support.tiers import first

MOST = 1.05
"""The aim: measured ÷ planned."""

CASES = [
    (overlap, precision, ratio)
    for overlap in ("off", "forward", "backward")
    for precision in ("32-true", "bf16-mixed")
    for ratio in (0.5, 1, 4)
]


class Row(NamedTuple):
    """A mode of updates on a machine.

    Attributes:
        overlap: the mode.
        precision: Lightning's.
        ratio: how many times as long as all of its computation the transfers of a layer take.
        measured, planned: seconds of a step.
    """

    overlap: Any
    precision: Any
    ratio: float
    measured: float
    planned: float

    @property
    def times(self) -> float:
        """The one by the other."""
        return self.measured / self.planned


def measure(overlap: Any, precision: Any, ratio: float) -> Row:
    """Trains on such a device. The arguments are those of :class:`Row`."""
    bytes_of_layer = 4 * WIDTH * WIDTH
    # Uploads of a step: the weights twice (forward and backward), and gradients, weights and state for the optimizer.
    rate = 6 * bytes_of_layer / (2 * ratio)
    rates = Rates(rate, rate, math.inf, math.inf, visit_seconds=0.0)
    device = Clocked(rates, 1.0, 0.05)
    strategy = SuperpipelineStrategy(k=2, k_prime=1, optimizer_on="gpu", optimizer_overlap=overlap)
    module = Trained(device)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", precision=precision, max_epochs=1, logger=False, barebones=True
    )
    with mock.patch("sp_lightning.trainer.run.device_for", return_value=device):
        trainer.fit(module, DataLoader(torch.ones(STEPS, 2, WIDTH), batch_size=None))  # type: ignore[arg-type]
    plan = strategy.plan
    gradients = sum(layer.gradient_bytes for layer in plan.trained)
    # The last step's figures, because the first step makes the state.
    uploaded, downloaded = (sum(moved[-LAYERS:]) / gradients for moved in device.moved.values())
    forward = [Visit((layer,), 1.0) for layer in plan.order]
    visits = [*forward, *(Visit((layer,), 1.0, True, (layer,)) for layer in reversed(plan.order))]
    update = gradients / LAYERS / 0.05
    rates = Rates(rate, rate, update, math.inf, visit_seconds=0.0, update_upload=uploaded, update_download=downloaded)
    planned = Walk(plan, visits, rates, overlap=overlap).predict(batches=4).seconds
    at = module.at[2:]
    return Row(overlap, precision, ratio, (at[-1] - at[0]) / (len(at) - 1), planned)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("overlap", "precision", "ratio"),
    first(CASES, ("forward", "32-true", 1), ("forward", "bf16-mixed", 1), why="other balances of the same"),
)
def test_a_step_takes_no_longer_than_planned(overlap: str, precision: str, ratio: float) -> None:
    row = measure(overlap, precision, ratio)
    assert 0.9 < row.times <= MOST


RATE, SMALLER = 25e9, 2**16
"""Bytes per second, and the number by which all sizes are divided."""
BLOCK_BYTES, TABLE_BYTES = 2 * 218_112_000, 2 * 128_256 * 4096
"""Llama 3 8B in 16 bits, of 32 blocks and two tables."""


class Weighs(nn.Module):
    """A layer of the shape's bytes."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(nbytes // SMALLER // 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.mean()


class Large(pl.LightningModule):
    """The model, whose layers compute as long as their uploads take. It notes when each batch begins."""

    def __init__(self, device: Clocked) -> None:
        super().__init__()
        self.first, self.last = Weighs(TABLE_BYTES), Weighs(TABLE_BYTES)
        self.blocks = nn.ModuleList(Weighs(BLOCK_BYTES) for _ in range(32))
        self.scale = nn.Parameter(torch.ones(1))
        self.clocks = device
        self.at = list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.at.append(max(self.clocks.now[Stream.COMPUTE], self.clocks.host))
        x = self.first(batch * self.scale)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.last(x).square().mean()
        return found

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Lends(Large):
    """Lends the GPU after each batch. A run without loans has no such hook, after which weights count as written."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.trainer.strategy.gpu_released():  # type: ignore[attr-defined]
            pass


@pytest.mark.long("two trainings on clocks")
@pytest.mark.parametrize(("stay", "most"), [(0, 0.01), (2, 1.0)])
def test_a_loan_of_the_gpu_takes_less_than_a_second(stay: int, most: float) -> None:
    """With an 8B model, copies at 25 GB/s. The first batches have no optimizer state yet, and do not count."""

    def seconds(kind: type[Large]) -> float:
        rate = RATE / SMALLER
        device = Clocked(Rates(rate, rate, math.inf, math.inf, visit_seconds=0.0), BLOCK_BYTES / RATE, 0.0)
        where: Any = {"optimizer_on": "gpu", "gpu_layers": stay} if stay else {}
        strategy = SuperpipelineStrategy(k=2, k_prime=1, optimizer_overlap="off", **where)
        module = kind(device)
        trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_epochs=1, logger=False, barebones=True)
        with mock.patch("sp_lightning.trainer.run.device_for", return_value=device):
            trainer.fit(module, DataLoader(torch.ones(8, 2), batch_size=None))  # type: ignore[arg-type]
        return (module.at[-1] - module.at[3]) / 4

    assert seconds(Lends) - seconds(Large) < most


def test_steps_take_the_models_time_where_they_overlap() -> None:
    device = ClockDevice(Rates(1.0, 1.0, 1.0, 1.0))
    device.spend(Stream.COMPUTE, 2.0, "forward", 0)
    device.step(1.0, 0)
    assert device.now[Stream.COMPUTE] == 3.0, "kernels that were issued before"
    device.now[Stream.STEP] = 10.0
    device.step(1.0, 0)
    device.spend(Stream.COMPUTE, 2.0, "forward", 0)
    assert device.now[Stream.COMPUTE] == 5.0, "over before the step begins"
    device.spend(Stream.COMPUTE, 6.0, "forward", 0)
    assert device.now[Stream.COMPUTE] == 12.0, "beside the step"
    device.spend(Stream.COMPUTE, 1.0, "forward", 0)
    assert device.now[Stream.COMPUTE] == 13.0
