"""Experts that are stacked in one parameter come by rows: what is not routed to does not travel."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from sp_lightning.capabilities.experts.stacks import StackReading, how_it_reads
from sp_lightning.core import messages
from sp_lightning.core.device.device import Device
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan
from sp_lightning.core.plan.rings import Ring
from tests.support import stacked
from tests.support.engine import events, step, streamed
from tests.support.models import Module
from tests.support.poison import poisoned
from tests.support.runs import assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.stacked import EXPERTS, Router, Routers, Stack
from tests.support.tiers import first

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")


@pytest.mark.parametrize("name", first(stacked.CONFIGS, "qwen3", "mixtral", "gpt-oss", why="named like these"))
def test_stacks_that_something_is_routed_to_are_experts(name: str) -> None:
    found = find_layers(stacked.transformer(name).net)
    assert [layer.rows for layer in found.layers if layer.rows] == [EXPERTS] * 2


def test_only_a_plan_for_predictions_has_slots_for_layers_on_demand() -> None:
    found = find_layers(Routers())
    training, predicting = (make_plan(found, k=4, k_prime=1, training=training) for training in (True, False))
    stacks = [layer for layer in predicting.layers if layer.rows]
    assert {predicting.rings[layer.ring] for layer in stacks} == {Ring(2, stacks[0].nbytes)}
    assert {training.rings[layer.ring].slots for layer in training.layers if layer.rows} == {3}
    assert predicting.slot_bytes < training.slot_bytes


def predictions(make: Any, strategy: Any = "auto", precision: Any = "32-true") -> Any:
    torch.manual_seed(5)
    return trainer_for(strategy, precision=precision).predict(make(), loader(stacked.tokens()))


@pytest.mark.parametrize("precision", first(["32-true", "bf16-true"], "32-true", why="the same rows in another dtype"))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "name", first(stacked.CONFIGS, "qwen3", "gpt-oss", why="other models with the same kind of experts")
)
def test_predictions_are_bitwise_equal_and_few_rows_come(name: str, implementation: str, precision: Any) -> None:
    strategy = superpipeline(k=1)
    with poisoned():
        ours = predictions(lambda: stacked.transformer(name, implementation), strategy, precision)
    assert_equal(ours, predictions(lambda: stacked.transformer(name, implementation), precision=precision), name)
    stacks = [layer for layer in strategy.plan.layers if layer.rows]
    rest = sum(layer.nbytes for layer in strategy.plan.layers if not layer.rows)
    beside = sum(span.nbytes for each in stacks for i, span in enumerate(each.spans) if i not in each.stacks)
    batches, tokens, of_each = 3, 2, 2
    stats = strategy.stats()
    if implementation == "grouped_mm" and stacked.READS_ADDRESSES:
        return
    assert stats.expert_misses <= batches * tokens * of_each * len(stacks)
    (row_bytes,) = {layer.row_bytes for layer in stacks}
    assert stats.expert_bytes == stats.expert_misses * row_bytes + batches * beside
    # After the last batch the first layers of a next one have come.
    ahead = sum(layer.nbytes for layer in [each for each in strategy.plan.layers if not each.rows][:2])
    assert stats.fetched_bytes - stats.expert_bytes == batches * rest + ahead


def test_an_expert_comes_alone_and_its_gradient_goes_alone() -> None:
    strategy = superpipeline(k=1)
    make, batches = stacked.CASES["few"]
    with poisoned():
        ours = fit(make, batches(), strategy)
    assert_same(ours, fit(make, batches()))
    stacks = [layer for layer in strategy.plan.layers if layer.rows]
    assert len(stacks) == 3
    drained = strategy.stats().offloaded_gradient_bytes
    whole = sum(parameter.nbytes for parameter in ours.module.parameters())
    unrouted = sum((EXPERTS - 2) * layer.row_bytes for layer in stacks)
    assert drained == len(batches()) * (whole - unrouted)
    assert strategy.stats().expert_misses <= len(batches()) * len(stacks) * 2 * 2, "two experts, forward and backward"


def test_gradients_of_which_few_rows_left_are_gone_as_a_whole() -> None:
    strategy = superpipeline(k=1, k_prime=1)
    fit(lambda: stacked.transformer("qwen3", num_hidden_layers=6), stacked.tokens(1), strategy)
    assert strategy.stats().peak_device_bytes <= strategy.plan.peak_device_bytes


def test_the_plan_says_what_it_found() -> None:
    found = find_layers(stacked.transformer("mixtral").net)
    plan = make_plan(found, k=1, k_prime=1)
    stacks = [layer for layer in plan.layers if layer.rows]
    assert [layer.name for layer in stacks] == [f"model.layers.{number}.mlp.experts" for number in range(2)]
    assert all(layer.rows == EXPERTS and layer.row_bytes * EXPERTS == layer.nbytes for layer in stacks)
    assert "experts are stacked in 2 modules, and only experts that tokens are routed to are uploaded" in str(plan)


def test_the_user_decides() -> None:
    net = Routers()
    assert not any(layer.rows for layer in find_layers(net, layers="layers.*").layers)
    kept = find_layers(net, keep_on_gpu=["layers.0.experts.inner"])
    assert [layer.rows for layer in kept.layers if "experts" in layer.name] == [0, EXPERTS, EXPERTS]
    assert "experts are stacked in 3 modules that are uploaded whole" in str(
        make_plan(find_layers(net, layers="layers.*"), k=1, k_prime=1)
    )


def test_a_stack_that_another_module_has_as_well_moves_whole() -> None:
    net = Routers()
    first_experts, second_experts = (net.get_submodule(f"layers.{number}.experts") for number in range(2))
    first_experts.outer = second_experts.outer
    assert [layer.rows for layer in find_layers(net).layers if "experts" in layer.name] == [0, EXPERTS, EXPERTS]


# ---------------------------------------------------------------------- what comes whole, and why


class OutOfRange(Router):
    """What nothing is routed to has a number of its own, as with expert parallelism."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        indices, weights = super().route(x)
        return torch.cat([indices, torch.full_like(indices[:, :1], -1)], 1), torch.cat([weights, weights[:, :1]], 1)


class ByScript(Stack):
    """A user's own class. It has a kernel that torch sees nothing of."""

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return stacked.kernel(super().forward(x, indices, weights), self.inner)


class Unseen(Router):
    stack = ByScript


class AllKept(Router):
    """Too many indices to wait for."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        indices, weights = super().route(x)
        return indices.repeat(1, 20 * EXPERTS), weights.repeat(1, 20 * EXPERTS)


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (OutOfRange, f"it is given the index -1, which is not one of its {EXPERTS} experts"),
        (Unseen, "it is not known how its forward reads them"),
        (stacked.Dense, "an operation reads all of them (einsum)"),
        (AllKept, ""),
    ],
)
def test_what_is_not_certain_comes_whole_and_is_said(
    block: type[Router], why: str, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_SAID", set())
    caplog.set_level("INFO", "lightning.pytorch")
    strategy = superpipeline(k=1)

    def results(strategy: Any) -> Any:
        torch.manual_seed(5)
        return trainer_for(strategy).predict(Module(Routers(block)), loader(stacked.rows()))

    with poisoned():
        ours = results(strategy)
    assert_equal(ours, results("auto"), "predictions")
    said = [record.message for record in caplog.records if "are uploaded for each call" in record.message]
    assert len(said) == bool(why), "once for all layers"
    assert all(why in line for line in said)
    assert strategy.stats().fetched_bytes >= 3 * sum(layer.nbytes for layer in strategy.plan.layers)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_hook_that_routes_otherwise_is_heeded(implementation: str, everywhere: bool) -> None:
    def otherwise(module: nn.Module, args: Any) -> Any:
        return (args[0], (args[1] + 3) % EXPERTS, args[2]) if type(module).__name__ == "Qwen3MoeExperts" else None

    def make() -> Any:
        module = stacked.transformer("qwen3", implementation)
        for layer in module.net.model.layers if not everywhere else ():
            layer.mlp.experts.register_forward_pre_hook(otherwise)
        return module

    handle = register_module_forward_pre_hook(otherwise) if everywhere else None
    with poisoned():
        ours = predictions(make, superpipeline(k=1))
    assert_equal(ours, predictions(make), "predictions")
    if handle is not None:
        handle.remove()


@pytest.mark.parametrize("where", ["mlp.experts", "mlp"])
def test_a_hook_that_may_route_otherwise_is_named(where: str, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_SAID", set())
    caplog.set_level("INFO", "lightning.pytorch")

    def make() -> Any:
        module = stacked.transformer("qwen3", "grouped_mm")
        for layer in module.net.model.layers:
            layer.get_submodule(where).register_forward_pre_hook(lambda *_: None)
        return module

    strategy = superpipeline(k=1)
    with poisoned():
        ours = predictions(make, strategy)
    assert_equal(ours, predictions(make), "predictions")
    said = [record.message for record in caplog.records if "are uploaded for each call" in record.message]
    assert len(said) == (where == "mlp.experts"), "not where the message says that the hook should be"
    assert all("a forward pre-hook" in line and "put the hook on the block" in line for line in said)
    assert bool(said) == (strategy.stats().expert_bytes >= 3 * strategy.plan.stack_bytes)


def test_what_is_known_of_forwards() -> None:
    experts = stacked.transformer("qwen3", "grouped_mm").net.model.layers[0].mlp.experts
    assert how_it_reads(experts) is StackReading.ROUTED_ROWS
    experts.config._experts_implementation = "eager"
    assert how_it_reads(experts) is StackReading.BY_TORCH
    for kernels in ("sonicmoe", "deepgemm"):
        experts.config._experts_implementation = kernels
        assert how_it_reads(experts) is StackReading.UNKNOWN
    assert how_it_reads(Stack()) is StackReading.BY_TORCH, "a class of transformers without its decorator"
    assert how_it_reads(ByScript()) is StackReading.UNKNOWN, "a user's own"
    exchanged = Stack()
    vars(exchanged)["forward"] = lambda *args: args[0]
    assert how_it_reads(exchanged) is StackReading.UNKNOWN


# ---------------------------------------------------------------------- generation


class Generates(stacked.Transformer):
    """Generates some tokens for each batch."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net.generate(batch["input_ids"], max_new_tokens=6, do_sample=False, use_cache=True)


@pytest.mark.long("takes a second or more")
def test_windows_of_generation() -> None:
    """A larger window holds other layers. If it holds all layers, each stack has a slot, in which used experts stay."""

    def generated(strategy: Any) -> Any:
        torch.manual_seed(5)
        module = Generates(stacked.transformer("qwen3").net)
        return trainer_for(strategy).predict(module, loader(stacked.tokens(6)))

    plain, slots, experts, others = generated("auto"), [], [], []
    for k in (1, 3, 64):
        strategy = superpipeline(k=k, k_prime=1)
        assert_equal(generated(strategy), plain, "tokens")
        plan, stats = strategy.plan, strategy.stats()
        slots.append({plan.rings[layer.ring].slots for layer in plan.layers if layer.rows})
        experts.append(stats.expert_bytes)
        others.append(stats.fetched_bytes - stats.expert_bytes)
    assert max(*slots[0], *slots[1]) == 2
    assert others[1] < others[0]
    assert experts[2] <= strategy.plan.stack_bytes < experts[0]


# ---------------------------------------------------------------------- gradients by rows


def test_merged_adapters_on_experts_need_no_others() -> None:
    def make() -> Any:
        module = stacked.transformer("qwen3")
        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = peft.LoraConfig(r=2, target_modules=[], target_parameters=targets, init_lora_weights=False)
        module.net = peft.get_peft_model(module.net, config)
        module.net.merge_adapter()
        return module

    strategy = superpipeline(k=1)
    with poisoned():
        ours = predictions(make, strategy)
    assert_equal(ours, predictions(make), "predictions")
    assert strategy.stats().expert_bytes < 3 * strategy.plan.stack_bytes


# ---------------------------------------------------------------------- what something is routed to


class _AndOthers(nn.Module):
    """Blocks of experts, and two linear layers after them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stack() for _ in range(4))
        self.others = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, torch.randperm(EXPERTS)[None, :2].expand(len(x), 2), torch.full((len(x), 2), 0.5))
        return self.others(x)


@pytest.mark.parametrize(("k", "k_prime"), [(1, 1), (2, 1), (1, 2)])
def test_what_comes_ahead_leaves_a_slot_to_experts_on_demand(k: int, k_prime: int) -> None:
    """Without it, a layer behind the experts is overwritten by each of their blocks, and fetched again after it."""
    torch.manual_seed(0)
    module, x = _AndOthers(), torch.randn(2, 16)
    with streamed(module, Device(torch.device("cpu")), k=k, k_prime=k_prime) as engine, torch.inference_mode():
        for number in range(4):
            with events() as happened:
                step(engine, lambda: module(x), training=False, quiet=number > 0)
        names = [engine.layers[int(i)].name for e in happened if e.startswith("fetch") for i in e[6:].split("+")]
    assert sorted(names) == sorted(set(names))
    assert "others.1" in names
