"""A copy of a module that has the attributes of the module itself, the forward of a unit among them, and other weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import Module, Stack, vectors
from tests.support.runs import assert_equal, assert_same, fit, superpipeline

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")


def cloned(module: nn.Module) -> Any:
    """As learn2learn's ``clone_module``: another object with the same attributes, but for the weights and the modules."""
    clone: Any = module.__new__(type(module))
    clone.__dict__ = module.__dict__.copy()
    clone._parameters = {name: p.clone() for name, p in module._parameters.items() if p is not None}
    clone._modules = {name: cloned(child) for name, child in module._modules.items() if child is not None}
    return clone


def copied(module: nn.Module) -> Any:
    """A shallow copy of each module, with weights of its own."""
    copies: dict[nn.Module, Any] = {child: copy.copy(child) for child in module.modules()}
    for child, mine in copies.items():
        mine._parameters = {name: p.clone() for name, p in child._parameters.items() if p is not None}
        mine._modules = {name: copies[inner] for name, inner in child._modules.items() if inner is not None}
    return copies[module]


class Adapted(Module):
    """The loss of a copy whose weights have made a step of their own (MAML), and the copy once more after the step."""

    def __init__(self, clone: Callable[[nn.Module], Any]) -> None:
        super().__init__(Stack())
        self.clone = clone
        self.kept: list[Any] = []

    def loss(self, batch: Any) -> Tensor:
        clone = self.clone(self.net)
        weights = list(clone.parameters())
        gradients = torch.autograd.grad(clone(batch).square().mean(), weights, create_graph=True)
        stepped = {id(w): w - 0.5 * g for w, g in zip(weights, gradients, strict=True)}
        for module in clone.modules():
            module._parameters = {name: stepped[id(p)] for name, p in module._parameters.items()}
        self.kept = [clone]
        return super().loss(batch) + clone(batch).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        clone = self.kept.pop()
        for module in clone.modules():
            module._parameters = {name: torch.full_like(p, 0.1) for name, p in module._parameters.items()}
        self.log("after", clone(batch).square().mean())


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("clone", [cloned, copied])
@pytest.mark.parametrize("mode", ["recompute", "offload"])
def test_a_shallow_copy_runs_its_own_forward(mode: Any, clone: Any) -> None:
    """The copy's layers ran the forwards of the original, with the original's weights: nothing was adapted."""
    ours = fit(lambda: Adapted(clone), vectors(), superpipeline(k=1, activations=mode))
    plain = fit(lambda: Adapted(clone), vectors())
    assert_same(ours, plain)
    assert_equal(ours.trainer.callback_metrics["after"], plain.trainer.callback_metrics["after"], "after the step")
