"""After user code has written weights, its rank's private pages are dropped: memory has the weights once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, WeightAveraging

from sp_lightning import SuperpipelineStrategy
from sp_lightning.experimental.ranks.owners import memory_of
from tests.support.models import Module, Stack, vectors
from tests.support.ranks import in_ranks
from tests.support.runs import fit


class Average(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(avg_fn=lambda average, value, number: average * 0.9 + value * 0.1)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None


class Counts(Callback):
    """Counts the layers with private pages after each batch."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        layers = trainer.strategy._run.engine.layers
        self.seen.append(sum(memory_of(layer).look() for layer in layers))
        if batch_idx == 10:
            for parameter in pl_module.parameters():
                parameter.mul_(0.9)
            assert sum(memory_of(layer).look() for layer in layers) >= len(layers) - 1


def train() -> list[int]:
    counts = Counts()
    fit(
        lambda: Module(Stack()), vectors(26), SuperpipelineStrategy(k=1), val=vectors(2), devices=2, max_epochs=2,
        callbacks=[counts, Average()], recorded="losses",
    )  # fmt: skip
    return counts.seen


@pytest.mark.rest("starts two ranks")
def test_no_rank_keeps_private_pages() -> None:
    """The averages are swapped with the weights, before and after validation, and ten steps follow."""
    for seen in in_ranks(2, train):
        assert len(seen) == 26
        assert not any(seen), seen
