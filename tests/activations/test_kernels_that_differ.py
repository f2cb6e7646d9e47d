"""Kernels that leave memory unwritten or round in another way each time, and backwards that read saved tensors twice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_lightning.capabilities.activations.recompute import FirstRun, Unrepeatable
from tests.equality.programs.recompute import RetainsGraph
from tests.support.kernels import (
    CountsSaved,
    RunsKernel,
    new_memory,
)
from tests.support.models import Module, twice, vectors
from tests.support.runs import fit, superpipeline
from tests.support.simdevice import simulated

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")

_numbers = itertools.count()


class WritesLater(RunsKernel):
    """A counter fills the memory from the third batch on."""

    batch = 0

    def saved(self) -> Tensor:  # type: ignore[override]
        return torch.tensor([next(_numbers), 1]) if self.batch > 1 else new_memory()


class CountsBatches(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        WritesLater.batch = batch_idx


@pytest.mark.long("takes a second or more")
def test_memory_that_a_kernel_writes_later_is_compared_again() -> None:
    with simulated(), pytest.raises(Unrepeatable, match="computed other values in backward"):
        fit(lambda: CountsBatches(twice(WritesLater)().net), vectors(), superpipeline(k=1, activations="recompute"))
    assert WritesLater.batch == 2


# ---------------------------------------------------------------------- saved tensors that are read twice


@pytest.mark.rest("takes tenths of a second")
def test_what_is_read_twice_is_computed_once_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    firsts: set[Any] = set()
    held: list[int] = []
    factor, unpacked = CountsSaved.factor, FirstRun.unpacked

    def counted(self: Any, x: Tensor) -> Any:
        runs.append(self)
        return factor(self, x)

    def watched(self: Any, *args: Any) -> Any:
        tensor = unpacked(self, *args)
        firsts.add(self)
        held.append(sum(len(each.read) > 0 for each in firsts))
        return tensor

    monkeypatch.setattr(CountsSaved, "factor", counted)
    monkeypatch.setattr(FirstRun, "unpacked", watched)
    fit(lambda: RetainsGraph(CountsSaved), vectors(1), superpipeline(k=1, activations="recompute"))
    assert len(runs) == 5 * 3  # a forward and two backwards
    assert max(held) == 1
