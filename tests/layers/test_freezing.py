"""Weights that the user freezes and unfreezes inside a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import Block, Module, Stack, vectors
from tests.support.runs import assert_same, fit, superpipeline
from tests.support.simdevice import simulated
from tests.support.tiers import first


class Freezes(Module):
    """Everything is trained at the start of each batch, and a part is frozen later."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.captured: list[nn.Parameter] = list(self.part.parameters())

    @property
    def part(self) -> Any:
        return self.net.blocks[2].outer  # type: ignore[index, union-attr]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.requires_grad_(True)


class FreezesBeforeBackward(Freezes):
    def on_before_backward(self, loss: Tensor) -> None:
        self.part.requires_grad_(False)


class UnfreezesBeforeBackward(Freezes):
    """Plain autograd gives no gradient to what was frozen in the forward."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.part.requires_grad_(False)

    def on_before_backward(self, loss: Tensor) -> None:
        self.part.requires_grad_(True)


class FreezesInBackward(Freezes):
    """When backward has come to the output of one of the blocks."""

    at = 2

    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        x = net.stem(batch)
        for index, block in enumerate(net.blocks):
            x = block(x)
            if index == self.at and x.requires_grad:
                x.register_hook(self.freeze)
        return net.head(x).square().mean()

    def freeze(self, gradient: Tensor) -> None:
        self.part.requires_grad_(False)


class FreezesAfterTheGradient(FreezesInBackward):
    """Plain autograd has put the gradient into ``param.grad`` by then, where it stays."""

    at = 0


class FreezesByReference(FreezesInBackward):
    """By references that were taken before the step: the host's parameters."""

    def freeze(self, gradient: Tensor) -> None:
        for parameter in self.captured:
            parameter.requires_grad_(False)


class FreezesByReferenceAfterTheGradient(FreezesByReference):
    at = 0


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "mode", first(["keep", "offload", "recompute"], "recompute", why="as where they are computed again")
)
@pytest.mark.parametrize(
    "make",
    [
        FreezesBeforeBackward, UnfreezesBeforeBackward, FreezesInBackward, FreezesAfterTheGradient, FreezesByReference,
        FreezesByReferenceAfterTheGradient,
    ],
)  # fmt: skip
def test_weights_are_frozen_inside_a_step(make: Callable[[], Module], mode: Any) -> None:
    plain = fit(make, vectors(4))
    for world in (nullcontext, simulated):
        with world():
            assert_same(fit(make, vectors(4), superpipeline(k=1, activations=mode)), plain)


class AsksForUnused(Module):
    """Asks for gradients of a block that no forward has called since it was unfrozen."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.unused = Block().requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.unused.requires_grad_(self.current_epoch == 1)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        blocks: Any = self.net.blocks
        wanted = [p for block in (blocks[1], self.unused) for p in block.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
        return loss + sum(gradient.square().sum() for gradient in gradients if gradient is not None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_are_asked_for_what_was_unfrozen_and_not_used(precision: Any) -> None:
    options: dict[str, Any] = {"max_epochs": 2, "precision": precision}
    assert_same(fit(AsksForUnused, vectors(), superpipeline(k=1), **options), fit(AsksForUnused, vectors(), **options))
