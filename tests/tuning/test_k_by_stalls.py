"""``k="auto"`` on clocks: the engine's own stalls choose a k with which a batch is as fast as with the best one."""

from __future__ import annotations

import logging
import math
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineStrategy
from sp_lightning.tools.planner.prediction.visits import Rates
from tests.support.clocked import LAYERS, WIDTH, Clocked
from tests.support.tiers import first
from tests.tuning import k_by_stalls

LAYER = 4 * WIDTH * WIDTH


class Predicted(pl.LightningModule):
    """A stack of equal layers that notes k when each batch begins."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.ks = list[int]()

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        strategy: SuperpipelineStrategy = self.trainer.strategy  # type: ignore[assignment]
        self.ks.append(strategy.plan.k)
        return self.net(batch)  # type: ignore[no-any-return]


def predict(ratio: float, layers: int) -> list[int]:
    """k in each batch, if an upload takes ``ratio`` times as long as a layer's forward and memory holds ``layers`` layers."""
    rate = LAYER / ratio
    device = Clocked(Rates(rate, rate, math.inf, math.inf, visit_seconds=0.0), 1.0, 0.05)
    module = Predicted()
    strategy = SuperpipelineStrategy(gpu_memory=layers * LAYER)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", logger=False, barebones=True)
    with mock.patch("sp_lightning.trainer.run.device_for", return_value=device):
        trainer.predict(module, DataLoader(torch.ones(16, 2, WIDTH), batch_size=None))  # type: ignore[arg-type]
    return module.ks


@pytest.mark.rest("takes tenths of a second")
def test_k_is_doubled_while_uploads_stall_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "lightning.pytorch.superpipeline"):
        assert predict(3.0, 18) == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 12, 12, 16, 16, 16, 16]
    said = [line for line in caplog.messages if "uploads stalled" in line]
    assert [line.split(" (")[0] for line in said] == [f"Superpipeline: k = {k}, k' = 1" for k in (2, 4, 8, 16, 12, 16)]


@pytest.mark.rest("takes tenths of a second")
def test_k_stays_where_the_engine_hides_uploads() -> None:
    assert set(predict(0.1, 18)) == {1}


MODELS = first(
    list(k_by_stalls.MODELS),
    "ResNet-152, bf16-mixed, 32 images",
    "Llama 3 8B, bf16-true, 2,048 tokens",
    why="each takes seconds",
)


@pytest.mark.long("plans a model three times, with each k")
@pytest.mark.parametrize("model", MODELS)
def test_the_chosen_k_is_as_fast_as_the_best_of_twice_its_memory(model: str) -> None:
    for estimate in k_by_stalls.estimates(model):
        assert k_by_stalls.choose(estimate).times <= k_by_stalls.MOST
