"""Several devices that update layers in backward: weights that users write count, and some steps are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.engine.layerwise import LayerwiseStep
from tests.equality.on_ranks import EveryBatch, seen
from tests.support.models import Module, Stack, vectors
from tests.support.ranks import RanksFailed, in_ranks
from tests.support.runs import assert_equal, fit, fused

pytestmark = pytest.mark.rest("runs of two ranks; test_ranks compares this mode in the first tier")

RANKS = 2


@contextmanager
def submitted() -> Iterator[list[int]]:
    """The layers whose updates were submitted while backward went on."""
    early: list[int] = []
    begin = LayerwiseStep._update_early

    def noted(self: Any, layer: Any) -> None:
        early.append(layer.index)
        begin(self, layer)

    with mock.patch.object(LayerwiseStep, "_update_early", noted):
        yield early


class Writes(Module):
    """Writes and exchanges weights before each batch, on every rank, as a module under ``ddp`` has to."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for index, parameter in enumerate(self.parameters()):
            if index % 3 == 0:
                parameter.data.mul_(0.9)
            elif index % 3 == 1:
                parameter.data = parameter.data * 0.9


def writes(plain: bool, precision: Any) -> tuple[Any, list[int]]:
    strategy = EveryBatch() if plain else SuperpipelineStrategy(k=1, optimizer_overlap="backward")
    with submitted() as early:
        outcome = fit(fused(Writes), vectors(8), strategy, devices=RANKS, recorded="losses", precision=precision)
    return seen(outcome), early


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_weights_that_users_write_count(precision: str) -> None:
    ours, plain = in_ranks(RANKS, writes, False, precision), in_ranks(RANKS, writes, True, precision)
    for index, ((mine, early), (theirs, _)) in enumerate(zip(ours, plain, strict=True)):
        state = [{**each, "state": {}} for each in theirs["optimizers"]] if index else theirs["optimizers"]
        assert_equal(mine, {**theirs, "optimizers": state}, f"rank {index}")
        assert len(early) == 4 * 7, "all layers, in every step"


# ---------------------------------------------------------------------- what does not go


class Foreign(Module):
    """Its optimizer steps a parameter that the module does not have."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.others = [nn.Parameter(torch.ones(16))]

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch * self.others[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.parameters(), *self.others])


def train(make: Any, mode: Any) -> None:
    fit(fused(make), vectors(8), SuperpipelineStrategy(k=1, optimizer_overlap=mode), devices=RANKS, recorded="losses")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_a_step_that_must_run_as_a_whole_is_refused(mode: str) -> None:
    with pytest.raises(RanksFailed, match=r"one by one, but the optimizer has a parameter of shape \(16,\)"):
        in_ranks(RANKS, train, Foreign, mode)
