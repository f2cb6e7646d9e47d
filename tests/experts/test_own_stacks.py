"""Experts that a user's own module stacks in one parameter: they are uploaded together, and the log names what uploads less."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.core.model.find import find_layers
from tests.support import stacked
from tests.support.models import Module, vectors
from tests.support.runs import assert_same, fit, superpipeline

EXPERTS, WIDTH = 4, 64


class Block(nn.Module):
    """A linear layer, a router, and experts, of which each batch uses the one that its first row chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        with torch.no_grad():
            self.gate.bias[1] += 4  # the router has a favourite

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        scores = self.gate(x).softmax(-1)
        chosen = int(scores[0].argmax())
        return x + scores[:, chosen, None] * self.expert(x, chosen)

    def expert(self, x: Tensor, chosen: int) -> Tensor:
        raise NotImplementedError


class Stacked(Block):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 8)

    def expert(self, x: Tensor, chosen: int) -> Tensor:
        return torch.tanh(x @ self.inner[chosen])


class Apart(Block):
    """The stack is in a module of its own, whose name says what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Weights()

    def expert(self, x: Tensor, chosen: int) -> Tensor:
        return self.experts(x, chosen)


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        return torch.tanh(x @ self.weight[chosen])


class Listed(Block):
    """As the log says."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))

    def expert(self, x: Tensor, chosen: int) -> Tensor:
        return torch.tanh(self.experts[chosen](x))


class Heads(nn.Module):
    """An attention with its heads in one parameter, beside a linear layer of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(8, WIDTH, WIDTH // 8))
        self.out = nn.Linear(WIDTH, WIDTH)


class Net(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def make_module(block: type[nn.Module]) -> Module:
    return Module(Net(block))


ADVICE = (
    "The 4 experts in 'net.blocks.0.{}' … are uploaded together. In a list, only those that a batch uses are uploaded: "
    "self.experts = nn.ModuleList(Expert() for _ in range(4))."
)


def advice(net: nn.Module, **options: Any) -> tuple[str, ...]:
    return find_layers(Module(net), **options).advice


def test_stacks_that_are_uploaded_whole() -> None:
    assert advice(Net(Stacked)) == (ADVICE.format("inner"),)
    assert advice(Net(Apart)) == (ADVICE.format("experts.weight"),)


def test_no_advice_that_would_not_help() -> None:
    assert advice(Net(Listed)) == ()
    assert advice(Net(Heads)) == (), "not experts"
    assert advice(nn.Sequential(*(nn.Conv1d(4, 4, 4) for _ in range(4)), nn.Linear(4, 4))) == (), "torch's own"
    assert advice(Net(Stacked), layers=["net.blocks.*"]) == (), "the user's choice"
    assert advice(stacked.Routers()) == (), "by rows"


@pytest.mark.rest("two trainings")
def test_the_list_uploads_less(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning.pytorch.superpipeline")
    uploaded = {}
    for block in (Stacked, Listed):
        make, strategy = partial(make_module, block), superpipeline(k=1)
        assert_same(fit(make, vectors(8), strategy), fit(make, vectors(8)))
        uploaded[block] = strategy.stats().fetched_bytes
    assert uploaded[Listed] < 0.6 * uploaded[Stacked]
    first_lines = [line for line in caplog.messages if " k = 1, k' = " in line]
    assert [ADVICE.format("inner") in line for line in first_lines] == [True, False]
