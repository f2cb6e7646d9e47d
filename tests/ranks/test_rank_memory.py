"""Memory of several devices, counted by simulated ones: what sums of gradients take on top is planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan
from tests.support.models import Module
from tests.support.ranks import Number, RanksFailed, devices, in_ranks, rank, total
from tests.support.runs import fit
from tests.support.simdevice import simulated

pytestmark = pytest.mark.rest("runs of several ranks on simulated devices, to count memory")

RANKS, WIDTH, LAYERS = 2, 64, 12
LAYER = WIDTH * WIDTH * 4
ACTIVATIONS = LAYER
"""More than the activations of one row take in all layers."""


class Tower(nn.Module):
    """Equal layers, called in an order that may differ from rank to rank and from batch to batch."""

    def __init__(self, *, shuffles: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self._shuffles = shuffles
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        order = list(range(LAYERS))
        if self._shuffles:
            order = torch.randperm(LAYERS, generator=torch.Generator().manual_seed(self._calls + 100 * rank())).tolist()
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


def train(
    shuffles: bool, budget: int | None, ranks: Number = RANKS, precision: Any = "32-true", **options: Any
) -> tuple[int, int]:
    """Returns the most memory of this rank's device, and what the plan says without activations."""
    batches = [torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(6 * total(ranks))]
    batches = [batch.to(torch.bfloat16) if precision == "bf16-true" else batch for batch in batches]
    with simulated(capacity=2**40) as made:
        strategy = SuperpipelineStrategy(gpu_memory=budget, **options)
        make = lambda: Module(Tower(shuffles=shuffles))  # noqa: E731
        fit(make, batches, strategy, recorded="losses", precision=precision, **devices(ranks))
    return made[0].peak, strategy.plan.peak_device_bytes


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("k_prime", [1, 2])
@pytest.mark.parametrize("shuffles", [False, True], ids=["in order", "out of turn"])
def test_sums_of_gradients_are_in_the_plan(shuffles: bool, k_prime: int) -> None:
    one = make_plan(find_layers(Tower(shuffles=False)), k=1, k_prime=k_prime)
    for peak, planned in in_ranks(RANKS, train, shuffles, None, k=1, k_prime=k_prime):
        assert peak <= planned + ACTIVATIONS
        assert peak > one.peak_device_bytes + ACTIVATIONS, "the plan of one device would not be enough"


@pytest.mark.long("nodes; the second tier has the sums of one")
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("ranks", [(2, 1), (2, 2)], ids=str)
def test_sums_over_nodes_are_in_the_plan(ranks: Number, precision: Any) -> None:
    for peak, planned in in_ranks(ranks, train, False, None, ranks, precision, k=1, k_prime=1):
        assert peak <= planned + ACTIVATIONS


@pytest.mark.long("takes a second or more")
def test_a_budget_without_room_for_sums_is_refused_before_any_batch() -> None:
    budget = make_plan(find_layers(Tower(shuffles=False)), k=1, k_prime=1).peak_device_bytes
    with pytest.raises(RanksFailed, match=r"gpu_memory=.* there are .* The least is"):
        in_ranks(RANKS, train, False, budget)
