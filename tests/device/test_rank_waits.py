"""The waits of several devices on the simulated device: leave each out, and a rank then reads or writes too early."""

from __future__ import annotations

from typing import Any

import pytest

from sp_lightning import SuperpipelineStrategy
from sp_lightning.device.waits import Wait
from tests.equality.cases import CASES
from tests.equality.on_ranks import seen
from tests.support.ranks import RanksFailed, in_ranks
from tests.support.runs import assert_equal, fit
from tests.support.simdevice import simulated
from tests.support.wait_scenarios import OF_RANKS, left_out

RANKS = 2


def train(simulate: bool, omit: str | None = None) -> tuple[dict[str, Any], set[str]]:
    """Accumulates in a model with residents, so that gradients come to ``param.grad`` twice."""
    case = CASES["vit"]

    def run() -> dict[str, Any]:
        strategy = SuperpipelineStrategy(k=1, fused_optimizer=False)
        return seen(fit(case.make, list(case.batches()) * RANKS, strategy, devices=RANKS, accumulate_grad_batches=2))

    if not simulate:
        return run(), set()
    with left_out(), simulated(None if omit is None else Wait[omit]) as made:
        outcome = run()
    return outcome, {wait.name for wait in made[0].waits}


@pytest.mark.parametrize("wait", OF_RANKS, ids=lambda wait: wait.name)
def test_every_wait_between_devices_is_needed(wait: Wait) -> None:
    plain = in_ranks(RANKS, train, False)
    ours = in_ranks(RANKS, train, True)
    for (mine, waits), (theirs, _) in zip(ours, plain, strict=True):
        assert wait.name in waits
        assert_equal(mine, theirs, "rank")
    with pytest.raises(RanksFailed, match=r"Race|Mixed"):
        in_ranks(RANKS, train, True, wait.name)
