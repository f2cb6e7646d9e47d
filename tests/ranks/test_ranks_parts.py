"""Gradients in 16 bits that come in parts, on all ranks or on one."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sp_lightning import SuperpipelineStrategy
from tests.equality.on_ranks import Averages, EveryBatch, divided, seen
from tests.support.models import Module, Stack, vectors
from tests.support.ranks import in_ranks, rank
from tests.support.runs import Make, assert_equal, fit

pytestmark = pytest.mark.rest("runs of two ranks; test_ranks has other models in the first tier")

RANKS = 2


class Twice(Stack):
    """Rank 1 uses a block twice, so the gradients of its weights are sums of two, which no 16 bits hold."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return self.blocks[2](x) if rank() == 1 else x


class Thrice(Stack):
    """Three reentrant checkpoints give the same weights a gradient each, of 16 bits. Their sum has more."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = checkpoint(self.blocks[1], x, use_reentrant=True)
        return self.head(x)


def make_thrice() -> Module:
    return Module(Thrice())


def make_twice() -> Module:
    return Module(Twice())


def train(make: Make, strategy: Any, **options: Any) -> dict[str, Any]:
    return seen(fit(make, vectors(8), strategy, devices=RANKS, precision="bf16-mixed", **options))


def plain(make: Make, **options: Any) -> dict[str, Any]:
    return train(make, Averages() if make is make_thrice else EveryBatch(), **options)  # ddp refuses parts


def ours(make: Make, **options: Any) -> dict[str, Any]:
    return train(make, SuperpipelineStrategy(k=1), **options)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("make", [make_twice, make_thrice])
def test_gradients_of_16_bits_that_come_in_parts_are_added_in_32(make: Make) -> None:
    outcomes = zip(in_ranks(RANKS, ours, make), in_ranks(RANKS, plain, make), strict=True)
    for number, (mine, theirs) in enumerate(outcomes):
        assert_equal(mine, divided(theirs, number), f"rank {number}")
