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


def fetched(ranks: int, overlap: Any) -> int:
    """Bytes that a rank has fetched in two batches of its own."""
    case = CASES["stack"]
    strategy = SuperpipelineStrategy(k=1, optimizer_overlap=overlap)
    batches = list(case.batches())[:2] * ranks
    fit(case.make, batches, strategy, devices=ranks, precision="bf16-mixed", recorded="losses")
    return strategy.stats().fetched_bytes


@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_every_rank_fetches_what_one_device_fetches(overlap: str) -> None:
    one = fetched(1, overlap)
    for each in in_ranks(2, fetched, 2, overlap):
        # Masters have twice the bytes of casts. A run's end finds one layer more or less on its way.
        assert one / 1.1 < each < 1.1 * one
