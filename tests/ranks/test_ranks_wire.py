"""What ranks send each other: gradients in 16 bits where these hold all of them on every rank, and the sum is the same."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sp_lightning import SuperpipelineStrategy
from sp_lightning.experimental.ranks.ranks import Ranks
from tests.equality.on_ranks import Averages, EveryBatch, seen
from tests.support.models import Module, Stack, vectors
from tests.support.ranks import in_ranks, rank
from tests.support.runs import Make, assert_equal, fit

pytestmark = pytest.mark.rest("runs of two ranks, to count bytes; test_ranks compares values")

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


def make_alike() -> Module:
    return Module(Stack())


def make_thrice() -> Module:
    return Module(Thrice())


def make_twice() -> Module:
    return Module(Twice())


def plain(make: Make, precision: Any, **options: Any) -> dict[str, Any]:
    strategy = Averages() if make is make_thrice else EveryBatch()  # ddp refuses a gradient that comes in parts
    return seen(fit(make, vectors(8), strategy, devices=RANKS, precision=precision, **options))


def ours(make: Make, precision: Any, **options: Any) -> tuple[dict[str, Any], int]:
    """Returns what a rank sees, and the bytes that it has sent."""
    sent: list[int] = []
    exchange = Ranks.exchange

    def noted(self: Ranks, received: Tensor, memory: Tensor, what: str) -> None:
        sent.append(memory.nbytes)
        exchange(self, received, memory, what)

    strategy = SuperpipelineStrategy(k=1)
    with mock.patch.object(Ranks, "exchange", noted):
        found = seen(fit(make, vectors(8), strategy, devices=RANKS, precision=precision, **options))
    return found, sum(sent)


def compared(make: Make, precision: Any, **options: Any) -> int:
    """Compares each rank with ``ddp``. Returns the bytes that each has sent."""
    reference = in_ranks(RANKS, plain, make, precision, **options)
    outcomes = in_ranks(RANKS, ours, make, precision, **options)
    for index, ((mine, _), theirs) in enumerate(zip(outcomes, reference, strict=True)):
        state = [{**each, "state": {}} for each in theirs["optimizers"]] if index else theirs["optimizers"]
        assert_equal(mine, {**theirs, "optimizers": state}, f"rank {index}")
    (bytes_sent,) = {sent for _, sent in outcomes}
    return bytes_sent


@pytest.mark.long("takes a second or more")
def test_gradients_of_casts_travel_in_16_bits() -> None:
    wide, mixed = (compared(make_alike, precision) for precision in ("32-true", "bf16-mixed"))
    assert wide / 2 <= mixed <= 0.6 * wide, "biases are no masters"


@pytest.mark.long("takes a second or more")
def test_a_layer_that_comes_wide_on_one_rank_is_sent_wide_by_all() -> None:
    alike, twice = (compared(make, "bf16-mixed") for make in (make_alike, make_twice))
    assert twice == alike + one_block_wider(), "the other layers are sent in 16 bits"


def one_block_wider() -> int:
    block, batches = Stack().blocks[2], len(vectors(8)) // RANKS
    return batches * sum(p.numel() * 2 for name, p in block.named_parameters() if name.endswith("weight"))


@pytest.mark.long("takes a second or more")
def test_gradients_of_16_bits_that_come_in_parts_are_added_in_32() -> None:
    compared(make_thrice, "bf16-mixed")


@pytest.mark.long("takes a second or more")
def test_what_is_added_to_a_sum_is_sent_wide() -> None:
    assert compared(make_alike, "bf16-mixed", accumulate_grad_batches=2) > compared(make_alike, "bf16-mixed")
