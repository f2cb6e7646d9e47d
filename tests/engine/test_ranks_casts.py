"""Under mixed precision every rank fetches casts, which the primary makes, and none the masters."""

from __future__ import annotations

from typing import Any

import pytest

from sp_lightning import SuperpipelineStrategy
from tests.equality.cases import CASES
from tests.support.ranks import in_ranks
from tests.support.runs import fit

pytestmark = pytest.mark.rest(
    "runs of two ranks and of one, to count bytes; test_ranks compares values in the first tier"
)


def fetched(ranks: int, overlap: Any) -> tuple[int, int]:
    """Bytes that a rank has fetched in two batches of its own, and those of its window."""
    case = CASES["stack"]
    strategy = SuperpipelineStrategy(k=1, optimizer_overlap=overlap)
    batches = list(case.batches())[:2] * ranks
    fit(case.make, batches, strategy, devices=ranks, precision="bf16-mixed", recorded="losses")
    assert strategy.plan is not None
    return strategy.stats().fetched_bytes, strategy.plan.slot_bytes


@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_every_rank_fetches_what_one_device_fetches(overlap: str) -> None:
    one, window = fetched(1, overlap)
    for each, _ in in_ranks(2, fetched, 2, overlap):
        # Masters have twice the bytes of casts. A run's end finds part of a window on its way.
        assert abs(each - one) <= window < one / 5
