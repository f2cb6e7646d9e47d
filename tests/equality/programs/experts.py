"""Experts of which only those come that something is routed to: unusual routing, adapters, graphs of an earlier step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import Tensor

from tests.equality.rows import program, tiers
from tests.support import experts, stacked
from tests.support.models import Module
from tests.support.runs import Outcome
from tests.support.stacked import Router, Routers

FIRST = tiers("k=1")
"""Experts that were not uploaded are NaN there."""


def uploads(most: float) -> Callable[[Outcome], None]:
    """Asserts that at most ``most`` times the bytes of all experts are uploaded."""

    def also(ours: Outcome) -> None:
        strategy: Any = ours.trainer.strategy
        assert strategy.stats().expert_bytes < most * strategy.plan.stack_bytes

    return also


@program("experts: a graph of the step before", FIRST, batches=lambda: [*stacked.rows(), *stacked.rows()])
class Remembers(Module):
    """The graph of the first call is kept for the next step's loss, and is routed otherwise."""

    def __init__(self) -> None:
        super().__init__(Routers(stacked.Few))
        self.automatic_optimization = False
        self.kept: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = self.net(batch).square().mean()
        held, self.kept = self.kept, loss if batch_idx % 2 == 0 else None
        if batch_idx % 2 == 0:
            for layer in self.net.layers:
                layer.gate.weight.requires_grad_(False)
            return loss.detach()
        optimizer.zero_grad()
        self.manual_backward(loss + held)
        return loss.detach()


def one_large() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, 16, generator=generator) for size in (1, 400, 400, 1, 1, 1)]


program(
    "experts: gradients of whole layers and of rows", tiers(rest=["k=1"]), batches=one_large, accumulate_grad_batches=2,
    covers="a large batch and a small one give one sum, of which all rows are to be seen",
)(stacked.own)  # fmt: skip


def routed(change: Callable[[Tensor], Tensor]) -> type[Router]:
    class Changed(Router):
        def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
            indices, weights = super().route(x)
            return change(indices), weights

    return Changed


class NothingRouted(Router):
    """No token comes to the experts."""

    def forward(self, x: Tensor) -> Tensor:
        indices, weights = self.route(x)
        return torch.tanh(self.before(x)) + self.experts(x[:0], indices[:0], weights[:0]).sum() + 0 * weights.sum()


def misses(most: int) -> Callable[[Outcome], None]:
    """Asserts that at most ``most`` experts are uploaded for each use."""

    def also(ours: Outcome) -> None:
        strategy: Any = ours.trainer.strategy
        uses = (
            2 * len(stacked.rows()) * sum(layer.rows > 0 for layer in strategy.plan.layers)
        )  # in forward and backward
        assert strategy.stats().expert_misses <= uses * most

    return also


for name, block, most in (
    ("all to one", routed(torch.zeros_like), 1),
    ("twice to the same", routed(lambda indices: indices[:, :1].expand(-1, 2)), 2),
    ("by int32", routed(lambda indices: indices.int()), 4),
    ("nothing", NothingRouted, 0),
):
    program(
        f"experts: routing, {name}", FIRST, batches=stacked.rows, also=misses(most), covers="an extreme of routing"
    )(lambda block=block: stacked.own(block))  # fmt: skip


@program("experts: adapters beside frozen ones", FIRST, batches=stacked.tokens, also=uploads(6))
def beside() -> Any:
    """Adapters of attention bring no experts."""
    module = stacked.transformer("qwen3")
    module.net = peft.get_peft_model(module.net, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return module


class WithReference(stacked.Transformer):
    """The loss of the adapted model beside that of the same one without adapters, as in preference tuning."""

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad(), self.net.disable_adapter():
            reference = super().loss(batch)
        return super().loss(batch) - 0.1 * reference


def with_reference(implementation: str) -> Any:
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=targets, init_lora_weights=False)
    return WithReference(peft.get_peft_model(stacked.transformer("qwen3", implementation).net, config))


for implementation in ("eager", "batched_mm", "grouped_mm"):
    program(
        f"experts: adapters disabled for one forward, {implementation}", {"k=1": 1 if implementation == "grouped_mm" else 2},
        batches=stacked.tokens, also=uploads(2 * 3), covers="the reference needs no others",
    )(lambda implementation=implementation: with_reference(implementation))  # fmt: skip


def nothing_on_demand(ours: Outcome) -> None:
    strategy: Any = ours.trainer.strategy
    stats = strategy.stats()
    assert not strategy.plan.experts
    assert stats.demand_fetches == stats.extra_slots == 0
    assert stats.peak_device_bytes <= strategy.plan.peak_device_bytes


mixture, batches = experts.CASES["mixture"]
for activations in ("recompute", {"net.layers.0": "recompute", "**": "keep"}):
    program(
        f"experts: activations={activations}", tiers("recompute, k=1"), batches=batches, strategy={"activations": activations},
        also=nothing_on_demand,
        covers="blocks that are recomputed move whole: their second forward holds all their experts at once",
    )(mixture)  # fmt: skip
