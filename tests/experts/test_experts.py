"""Experts that are modules are layers of their own, and come only when something is routed to them."""

from __future__ import annotations

import operator as operators
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from sp_lightning.core.device.timeline import Interval
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan
from tests.support.engine import Slots
from tests.support.experts import EXPERTS, Mixture, Routed
from tests.support.models import Block, Module, vectors
from tests.support.planner import measured
from tests.support.runs import Batches, assert_equal, assert_same, fit, loader, superpipeline, trainer_for


def fetched(strategy: Any, *, predict: bool, batches: Batches) -> set[int]:
    """Which layers were fetched at all."""
    seen: list[int] = []
    fetch = Slots.fetch

    def watched(self: Slots, transfer: Any) -> None:
        seen.extend(layer.index for layer, *_ in transfer)
        fetch(self, transfer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slots, "fetch", watched)
        if predict:
            trainer_for(strategy).predict(Module(Mixture(only=1)), loader(batches))
        else:
            fit(lambda: Module(Mixture(only=1)), batches, strategy)
    return set(seen)


@pytest.mark.parametrize("predict", [True, False])
def test_only_experts_that_were_routed_to_are_fetched(predict: bool) -> None:
    strategy = superpipeline(k=1)
    layers = fetched(strategy, predict=predict, batches=vectors())
    names = {strategy.plan.layers[index].name for index in layers}
    assert names == {name for name, count in strategy.fetches().items() if count}
    assert sum(strategy.fetches().values()) == strategy.stats().fetched_layers
    assert names == {f"net.layers.{block}{part}" for block in range(3) for part in ("", ".experts.1")}


@pytest.mark.rest("takes tenths of a second")
def test_in_prediction_experts_are_not_guessed() -> None:
    """Where routing changes from batch to batch, what the last one used would come for nothing."""

    class RankTurns(Mixture):
        def forward(self, x: Tensor) -> Tensor:
            self.only = int(x[0, 0] > 0)
            return super().forward(x)

    batches = [torch.full((4, 16), (-1.0) ** number) for number in range(6)]
    strategy = superpipeline(k=1)
    trainer_for(strategy).predict(Module(RankTurns()), loader(batches))
    fetched = {name: count for name, count in strategy.fetches().items() if ".experts." in name}
    assert sum(fetched.values()) <= 3 * len(batches), "one in each block for each batch"


def test_in_training_those_of_the_last_batch_come_ahead() -> None:
    demanded = []
    for count in (1, 4):
        strategy = superpipeline(k=1)
        fetched(strategy, predict=False, batches=vectors(count))
        demanded.append(strategy.stats().demand_fetches)
    assert 0 < demanded[0] == demanded[1], "the first batch's experts alone"


def test_each_expert_is_a_layer_beside_its_block() -> None:
    found = find_layers(Mixture())
    names = [layer.name for layer in found.layers]
    block = ["layers.0", *(f"layers.0.experts.{number}" for number in range(EXPERTS))]
    assert names[:5] == block
    assert {names[index] for index in found.experts} == {name for name in names if ".experts." in name}
    assert [name for name, _ in found.layers[0].parameters] == [
        f"layers.0.{name}" for name in ("before.weight", "before.bias", "gate.weight", "gate.bias")
    ]
    assert set(found.units) == {"layers.0", "layers.1", "layers.2"}, "an expert's activations are its block's"
    assert "12 experts are layers of their own" in str(make_plan(found, k=1, k_prime=1))


def test_chosen_blocks_move_whole() -> None:
    found = find_layers(Mixture(), layers="layers.*")
    assert not found.experts
    assert len(found.layers) == 3


def test_an_experts_time_is_not_its_blocks() -> None:
    intervals = [
        Interval("forward", 0, 0.0, 5.0, 0),
        Interval("forward", 1, 1.0, 2.0, 0),
        Interval("forward", 2, 2.0, 4.0, 0),
        Interval("forward", 3, 5.0, 6.0, 0),
    ]
    visits, _ = measured(intervals, 4, synchronous=False)
    assert [visit.seconds for visit in visits] == [2.0, 1.0, 2.0, 1.0]


def test_predictions_are_bitwise_equal() -> None:
    def results(strategy: Any) -> Any:
        torch.manual_seed(5)
        return trainer_for(strategy).predict(Module(Mixture()), loader(vectors()))

    assert_equal(results(superpipeline(k=1)), results("auto"), "predictions")


class Inner(nn.Module):
    """Experts below a part of the block that is compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(16, 16)
        self.moe = nn.Module()
        self.moe.experts = nn.ModuleList(Block() for _ in range(2))
        self.moe.forward = lambda x: sum(expert(x) for expert in self.moe.experts)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(torch.tanh(self.before(x)))


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_layers_inside_a_graph() -> None:
    def make() -> Module:
        net = nn.Module()
        net.layers = nn.ModuleList(Inner() for _ in range(3))
        net.forward = lambda x: net.layers[2](net.layers[1](net.layers[0](x)))  # type: ignore[method-assign]
        for layer in net.layers:
            layer.moe.compile(backend="aot_eager")
        return Module(net)

    torch._dynamo.reset()
    strategy = superpipeline(k=1)
    ours = fit(make, vectors(), strategy)
    torch._dynamo.reset()
    assert_same(ours, fit(make, vectors()))
    assert not strategy.plan.experts


def of_scripts(x: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
    return torch.tanh(x @ inner.t()) @ outer.t()


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_blocks_that_hand_weights_to_scripts_move_whole() -> None:
    vars(operators)["of_scripts"] = torch.jit.script(of_scripts)

    class Scripted(Routed):
        def forward(self, x: Tensor, only: int | None = None) -> Tensor:
            return x + sum(operators.of_scripts(x, each.inner.weight, each.outer.weight) for each in self.experts)

    net = nn.Sequential(*(Scripted() for _ in range(3)))
    assert not find_layers(net).experts
