"""Under mixed precision every rank fetches casts, which owners make, and none the masters."""

from __future__ import annotations

from typing import Any

import pytest

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.layout import total_bytes
from tests.equality.cases import CASES
from tests.support.ranks import in_ranks
from tests.support.runs import fit

pytestmark = pytest.mark.rest(
    "runs of two ranks and of one, to count bytes; test_ranks compares values in the first tier"
)


def fetched(ranks: int, overlap: Any) -> tuple[dict[str, int], int, int]:
    """How often a rank has fetched each layer in two batches of its own, the bytes of that, and those if all were casts."""
    case = CASES["stack"]
    strategy = SuperpipelineStrategy(k=1, optimizer_overlap=overlap)
    batches = list(case.batches())[:2] * ranks
    fit(case.make, batches, strategy, devices=ranks, precision="bf16-mixed", recorded="losses")
    assert strategy.plan is not None
    counts = strategy.fetches()
    casts = sum(counts[layer.name] * total_bytes(layer.casts) for layer in strategy.plan.layers)
    return counts, strategy.stats().fetched_bytes, casts


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_every_rank_fetches_what_one_device_fetches(overlap: str) -> None:
    one, nbytes, casts = fetched(1, overlap)
    assert nbytes == casts
    for counts, nbytes, casts in in_ranks(2, fetched, 2, overlap):
        assert nbytes == casts, "masters have twice the bytes"
        # A run's end finds layers on their way, k + k' at most, of each rank others.
        assert sum(abs(counts[name] - one[name]) for name in one) <= 2
