"""The ledger of several devices: one store for the node, whichever rank is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sp_lightning import SuperpipelineStrategy
from tests.support.models import Module
from tests.support.ranks import in_ranks
from tests.support.runs import fit

pytestmark = pytest.mark.rest("a run of several ranks, to count memory")

RANKS, WIDTH, DEPTH = 2, 64, 6
COUNT = WIDTH * WIDTH * DEPTH


class Wide(Module):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def train(**options: Any) -> dict[str, Any]:
    """Returns what a rank says at the end."""
    strategy = SuperpipelineStrategy(k=1)
    fit(Wide, [torch.ones(2, WIDTH)] * 8, strategy, devices=RANKS, recorded="losses", **options)
    ledger = strategy.ledger
    return {
        "bytes": (ledger.weights, ledger.gradients, ledger.state),
        "said": str(ledger),
        "stats": strategy.stats(),
        "planned": strategy.plan.peak_device_bytes,
    }


@pytest.mark.long("takes a second or more")
def test_every_rank_counts_the_nodes_memory() -> None:
    for found in in_ranks(RANKS, train, precision="bf16-mixed"):
        weights, gradients, state = found["bytes"]
        assert (weights, gradients, state) == (6 * COUNT, 4 * COUNT, 8 * COUNT), (
            "gradients have their parameters' dtype"
        )
        assert f"of the node's {RANKS} devices together" in found["said"]


def test_every_rank_has_counters_of_its_own() -> None:
    for found in in_ranks(RANKS, train):
        stats = found["stats"]
        assert stats.fetched_layers >= 4 * DEPTH
        assert 4 * 4 * COUNT // RANKS <= stats.offloaded_gradient_bytes <= 1.1 * 4 * 4 * COUNT // RANKS
        assert 0 < stats.peak_device_bytes <= found["planned"]
