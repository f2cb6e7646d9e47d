"""PEFT's adapters on stacked experts and routers (``target_parameters``): still only the experts that tokens are routed to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sp_lightning.capabilities.experts.stacks import adapting_modules, stacked_rows
from sp_lightning.core import messages
from sp_lightning.trainer.compile import compile_blocks
from tests.support import stacked
from tests.support.poison import poisoned
from tests.support.runs import assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.tiers import first


def both(make: Any, strategy: Any, **options: Any) -> int:
    """Trains on plain Lightning and streamed, with other values in all experts that were not uploaded.

    Returns:
        The uploaded bytes of experts.
    """
    with poisoned():
        ours = fit(make, stacked.tokens(), strategy, **options)
    assert_same(ours, fit(make, stacked.tokens(), **options))
    found: int = strategy.stats().expert_bytes
    return found


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize(
    ("name", "implementation"),
    first(
        [("qwen3", "grouped_mm"), ("gpt-oss", "grouped_mm"), ("qwen3", "batched_mm"), ("gpt-oss", "batched_mm")],
        ("qwen3", "grouped_mm"),
        why="other models and implementations",
    ),
)
def test_few_experts_are_uploaded(name: str, implementation: str, activations: Any, packed: bool) -> None:
    strategy = superpipeline(k=1, activations=activations)
    sent = both(stacked.adapted(name, implementation, packed=packed), strategy)
    uses = 2 * 3 if activations == "recompute" else 3  # backward needs no stack
    assert 0 < sent < 0.8 * uses * strategy.plan.stack_bytes


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_mixed_precision_and_recompute(packed: bool, dtype: torch.dtype) -> None:
    """Code reads adapters whole in mixed precision, so the second run finds float32 weights on the device."""
    both(
        stacked.adapted(packed=packed, dtype=dtype), superpipeline(k=1, activations="recompute"), precision="bf16-mixed"
    )


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_adapters_on_routers(activations: Any) -> None:
    """``target_parameters`` of any parameter raised an error with "recompute"."""
    strategy = superpipeline(k=1, activations=activations)
    sent = both(stacked.adapted(targets=("mlp.gate.weight",)), strategy)
    assert 0 < sent < 6 * strategy.plan.stack_bytes


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(("implementation", "adapters"), [("eager", 1), ("grouped_mm", 2)])
def test_all_experts_are_uploaded_where_the_result_is_not_known_to_be_read_by_experts(
    implementation: str, adapters: int, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_SAID", set())
    caplog.set_level("INFO", "lightning.pytorch")
    strategy = superpipeline(k=1)
    sent = both(stacked.adapted(implementation=implementation, adapters=adapters), strategy)
    assert sent >= 3 * strategy.plan.stack_bytes
    said = [record.message for record in caplog.records if "all experts of" in record.message]
    assert len(said) == 1, "once for all layers"
    assert ("target_parameters" in said[0]) == (adapters == 1)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("around", [True, False])
def test_a_hook_that_may_route_otherwise_is_noticed_on_any_of_the_modules(around: bool) -> None:
    def make() -> Any:
        module = stacked.adapted()()
        for experts, outer in adapting_modules(module).items():
            (outer if around else experts).register_forward_pre_hook(lambda _, args: args)
        return module

    strategy = superpipeline(k=1)
    assert both(make, strategy) >= 3 * strategy.plan.stack_bytes


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("where", ["experts", "between", "outermost"])
def test_a_forward_hook_may_read_all_experts(where: str) -> None:
    """Inside PEFT's modules, it finds the stack with its adapter, in which other experts than those of the tokens were zero."""

    def make() -> Any:
        module = stacked.adapted()()
        for experts, outer in adapting_modules(module).items():

            def read(module: Any, args: Any, output: torch.Tensor, experts: Any = experts) -> torch.Tensor:
                return output + 0.01 * (experts.gate_up_proj.square().mean() + experts.down_proj.square().mean())

            on: Any = {"experts": experts, "between": outer.base_layer, "outermost": outer}[where]
            on.register_forward_hook(read)
        return module

    both(make, superpipeline(k=1))


@pytest.mark.long("takes a second or more")
def test_a_forward_hook_on_all_modules_may_read_all_experts() -> None:
    def read(module: Any, args: Any, output: Any) -> Any:
        return output + 0.01 * module.gate_up_proj.square().mean() if "MoeExperts" in type(module).__name__ else None

    handle = nn.modules.module.register_module_forward_hook(read)
    try:
        both(stacked.adapted(), superpipeline(k=1))
    finally:
        handle.remove()


@stacked.of_transformers
class AddsToAll(stacked.Stack):
    """Adds to all experts what PEFT adds to them, and uses all of them."""

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        more = torch.baddbmm(self.inner, torch.ones(len(self.inner), 16, 1), torch.ones(len(self.inner), 1, 16))
        return super().forward(x, indices, weights) + more.mean()


class Adding(stacked.Router):
    stack = AddsToAll


def test_experts_of_a_users_own_that_all_are_used() -> None:
    """All are in the slot since the first batch, so the operation runs although few rows are routed to."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(size, 16, generator=generator) for size in (9, 1, 1, 1)]

    def predictions(strategy: Any) -> Any:
        torch.manual_seed(5)
        return trainer_for(strategy).predict(stacked.own(Adding), loader(batches))

    assert_equal(predictions(superpipeline(k=8)), predictions("auto"), "predictions")


def test_the_outermost_module_is_found() -> None:
    module = stacked.adapted()()
    found = adapting_modules(module)
    assert [stacked_rows(each) for each in found] == [stacked.EXPERTS] * 2
    names = {each: name for name, each in module.named_modules()}
    assert [names[outer].removeprefix("net.base_model.model.model.") for outer in found.values()] == [
        "layers.0.mlp.experts", "layers.1.mlp.experts"
    ]  # fmt: skip
    assert adapting_modules(nn.Linear(2, 2)) == {}


def test_adapters_of_stacked_experts_are_not_compiled() -> None:
    """They are not called: PEFT reads their weights."""
    names = compile_blocks(stacked.adapted()(), backend="aot_eager")
    assert {name.rpartition("layers.")[2][2:] for name in names} == {
        "self_attn",
        "mlp.gate",
        "input_layernorm",
        "post_attention_layernorm",
    }
