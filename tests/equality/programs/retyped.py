"""Weights that are given another dtype inside a step (``module.to(dtype)`` in a forward) go on as on plain."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.equality.rows import program, tiers
from tests.support.experts import switch
from tests.support.models import Block, Module, tokens, vectors
from tests.support.nets import Manual

HALF = tiers(
    rest=["bf16-true", "users, k=1, bf16-true, simulated"],
    long=["users, k=all, bf16-true", "offload, k=1, bf16-true", "stays: net.1, bf16-true"]
)  # fmt: skip


def retyped(name: str, variants: Any = HALF, **more: Any) -> Any:
    batches = more.pop("batches", lambda: [batch.to(torch.bfloat16) for batch in vectors(4)])
    return program(f"retyped: {name}", variants, **{"batches": batches, "validated": True, "max_epochs": 2, **more})


class Router(nn.Module):
    """Computes in float32 whatever the model is in, as SwitchTransformers' router does."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(16, 16)
        self.classifier = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.classifier = self.classifier.to(torch.float32)
        return self.classifier(self.before(x).float()).tanh().to(x.dtype)


def routed(kind: Any = Module) -> Any:
    return kind(nn.Sequential(Block(), Router(), Block(), Router()))


def twice(kind: Any = Module) -> Any:
    """One router before and after others: its layer leaves and comes again within a step."""
    router = Router()
    return kind(nn.Sequential(router, Block(), router, Block(), router))


for accumulate in (1, 2):
    for make in (routed, twice):
        variants = HALF if accumulate == 1 else tiers(rest=["users, k=1, bf16-true, simulated"], long=["bf16-true"])
        retyped(f"a router, {make.__name__}, {accumulate} to a step", variants, accumulate_grad_batches=accumulate,
                covers="its layer leaves and comes again")(make)  # fmt: skip
for mode in ("forward", "backward"):
    retyped(f"a router that is updated under {mode}", tiers(rest=[f"{mode}, bf16-true, two epochs"]),
            covers="updates in the background")(routed)  # fmt: skip


@retyped("a weight used before and after", of=lambda block: lambda: Module(nn.Sequential(Block(), block())))
class UsedBefore(nn.Module):
    """One use of the old weight and one of the new one give one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.shift = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) + self.shift
        self.shift.data = self.shift.data.float()
        return torch.tanh(x + self.shift.to(x.dtype))


@retyped("a view that is written late", of=lambda kind: partial(routed, kind))
class WritesLate(Module):
    """It outlives the layer's use."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.training:
            self.net[1].classifier.bias.detach().add_(0.25)
        return loss


@retyped("several steps", of=lambda kind: partial(twice, kind))
class SeveralSteps(Manual):
    """Manual optimization: the optimizer's step, and another forward, come before the next batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        for _ in range(3):
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
        with torch.no_grad():
            self.net(batch)
        return loss


@retyped("a call between two batches", of=lambda kind: partial(routed, kind))
class CallsBetween(Module):
    """Outside of any step, before the next batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.seen = self.net(batch)
        self.net[1].classifier.weight.data.mul_(0.5)


def both_dtypes(ours: Any) -> None:
    assert {value.dtype for value in ours.state.values()} == {torch.bfloat16, torch.float32}


for sanity in (0, 1):
    retyped(
        f"a router of transformers, {sanity} validations before", tiers(long=["users, k=1, bf16-true"]), batches=tokens,
        num_sanity_val_steps=sanity, covers="its router is in float32", also=both_dtypes,
    )(switch)  # fmt: skip
# What a first forward computes in bfloat16 before the exchange the second one would compute in float32.
retyped(
    "a router that is run again", tiers(rest=["recompute, k=1, bf16-true"]), covers="refused by name",
    refused={"recompute, k=1, bf16-true":
             r"Unrepeatable: 'classifier.weight' of 'net.3' has been modified"},
)(routed)  # fmt: skip
