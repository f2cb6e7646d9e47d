"""Errors of autograd's own are what they are on plain Lightning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import Module, Stack
from tests.support.moments import At
from tests.support.runs import superpipeline
from tests.support.starts import start


@pytest.mark.rest("takes tenths of a second")
def test_a_weight_written_between_forward_and_backward_is_autograds_own_error() -> None:
    class Writes(Module):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            net: Any = self.net
            with torch.no_grad():
                net.blocks[1].inner.weight.mul_(2)
            return loss

    for strategy in ("auto", superpipeline(), superpipeline(k=99)):
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch\.\w*FloatTensor \[16, 32\]"):
            start(strategy, Writes(Stack()))


class BehindAnEmptyWeight(nn.Module):
    """A weight without elements begins at the same byte as the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.empty, self.weight = nn.Parameter(torch.empty(0)), nn.Parameter(torch.eye(16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.t()) + self.empty.sum()


@pytest.mark.parametrize("strategy", ["auto", "streamed"])
def test_a_weight_behind_an_empty_one_that_is_written_is_autograds_own_error(strategy: str) -> None:
    def write(m: Any) -> None:
        with torch.no_grad():
            m.net[1].weight.mul_(2)

    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch\.\w*FloatTensor \[16, 16\]"):
        start(superpipeline(k=1) if strategy == "streamed" else strategy, At(BehindAnEmptyWeight, after_forward=write))


@pytest.mark.rest("takes tenths of a second")
def test_an_optimizer_step_between_forward_and_backward_is_autograds_own_error() -> None:
    class Steps(Module):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            loss = self.loss(batch)
            self.manual_backward(loss, retain_graph=True)
            optimizer.step()
            self.manual_backward(loss)

    for strategy in ("auto", superpipeline(), superpipeline(k=99)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            start(strategy, Steps(Stack()))


def test_an_activation_written_in_place_is_autograds_own_error() -> None:
    """Where saved-tensor hooks are active autograd leaves the check out; without ours this was silent."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.exp(self.linear(x))
            return y.add_(1).sum()

    for strategy in ("auto", superpipeline()):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            start(strategy, Module(Writes()))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace.*` is deprecated:FutureWarning", "ignore::DeprecationWarning")
def test_a_trace_in_a_run_is_refused() -> None:
    class Traces(Module):
        def on_fit_start(self) -> None:
            torch.jit.trace(self.net, torch.ones(2, 16))

    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace was called during a run.*log_graph=False"):
        start(superpipeline(), Traces(Stack()))
    module = Module(Stack())
    start(superpipeline(), module)
    net, x = module.net.eval(), torch.ones(2, 16)
    assert torch.equal(torch.jit.trace(net, x)(x), net(x))


def test_gradients_with_a_graph_of_their_own() -> None:
    class Graph(Module):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch).backward(create_graph=True)

    with (
        pytest.warns(UserWarning, match="create_graph=True"),
        pytest.raises(RuntimeError, match=r"The gradient of 'net\..*create_graph=True.*torch\.autograd\.grad"),
    ):
        start(superpipeline(), Graph(Stack()))
