"""Packed experts with adapters, on several devices: equal to plain Lightning with gradients that are averaged after backward."""

from __future__ import annotations

from typing import Any

import pytest

from sp_lightning import SuperpipelineStrategy
from tests.equality.on_ranks import Averages, seen
from tests.support import stacked
from tests.support.ranks import in_ranks
from tests.support.runs import assert_equal, fit

pytestmark = pytest.mark.rest("runs of two ranks")


def train(strategy: type[Any], **options: Any) -> dict[str, Any]:
    make = stacked.adapted(packed=True)
    return seen(fit(make, stacked.tokens(count=4), strategy(**options), devices=2, precision="bf16-mixed"))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("options", [{}, {"activations": "recompute"}], ids=str)
def test_packed_experts_on_two_devices(options: dict[str, Any]) -> None:
    """The reference is not ``ddp``, which cannot broadcast tensor subclasses."""
    reference = in_ranks(2, train, Averages)
    ours = in_ranks(2, train, SuperpipelineStrategy, k=1, **options)
    for index, (mine, theirs) in enumerate(zip(ours, reference, strict=True)):
        state = [{**each, "state": {}} for each in theirs["optimizers"]] if index else theirs["optimizers"]
        assert_equal(mine, {**theirs, "optimizers": state}, f"rank {index}")
