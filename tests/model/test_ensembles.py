"""A list of separate networks: large ones are divided. Small ones are one layer each, and the log names smaller layers."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan
from tests.support.models import Block, Module, vectors
from tests.support.runs import assert_same, fit, superpipeline

WIDTH, DEPTH = 16, 8


def mlp() -> nn.Sequential:
    return nn.Sequential(*(each for _ in range(DEPTH) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))


class Flat(nn.Module):
    """A network whose parts have names of their own."""

    def __init__(self) -> None:
        super().__init__()
        for part in ("first", "second", "third", "fourth"):
            self.add_module(part, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = torch.tanh(part(x))
        return x


class Ensemble(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], count: int = 2) -> None:
        super().__init__()
        self.models = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([model(x) for model in self.models]).mean(0)


MANY = 7
"""If an ensemble has many networks, two of them have less than a third of all weights."""


def advice(net: nn.Module, **options: Any) -> tuple[str, ...]:
    return find_layers(Module(net), **options).advice


@pytest.mark.parametrize(
    ("make", "layers"),
    [
        (mlp, '"net.models.*.*"'),
        (WithHead, '["net.models.*.head", "net.models.*.net.*"]'),
        (Flat, '"net.models.*.*"'),
    ],
)
def test_the_pattern_that_helps(make: Callable[[], nn.Module], layers: str) -> None:
    module = Module(Ensemble(make, MANY))
    whole = find_layers(module)
    assert [layer.name for layer in whole.layers] == [f"net.models.{index}" for index in range(MANY)]
    assert whole.advice == (
        f"Each of the {MANY} networks in 'net.models' is one layer: layers= can name smaller ones.",
    )
    smaller = find_layers(module, layers=re.findall(r'"([^"]+)"', layers))
    peaks = [make_plan(found, k=1, k_prime=1).peak_device_bytes for found in (smaller, whole)]
    assert peaks[0] < 0.6 * peaks[1]
    assert smaller.advice == ()


def test_no_advice_for_blocks() -> None:
    assert advice(Ensemble(mlp, count=1)) == (), "one network is divided"
    assert advice(Ensemble(Block, MANY)) == (), "few parts"
    with_stem = Ensemble(Flat)
    with_stem.stem = nn.Linear(WIDTH, WIDTH)
    assert advice(with_stem) == ()
    assert advice(Ensemble(lambda: nn.Sequential(*(Block() for _ in range(4))))) == (), "networks with blocks"


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (mlp, [str(2 * index) for index in range(DEPTH)]),
        (WithHead, [*(f"net.{2 * index}" for index in range(DEPTH)), "head"]),
        (Flat, ["first", "second", "third", "fourth"]),
    ],
)
@pytest.mark.parametrize("count", [2, 5])
def test_networks_with_much_of_the_weights_are_divided(
    make: Callable[[], nn.Module], parts: list[str], count: int
) -> None:
    found = find_layers(Module(Ensemble(make, count)))
    assert [layer.name for layer in found.layers] == [
        f"net.models.{index}.{part}" for index in range(count) for part in parts
    ]
    assert found.advice == ()


def test_two_blocks_beside_a_stem_are_no_ensemble() -> None:
    with_stem = Ensemble(Flat)
    with_stem.stem = nn.Linear(WIDTH, WIDTH)
    assert [layer.name for layer in find_layers(Module(with_stem)).layers] == [
        "net.models.0",
        "net.models.1",
        "net.stem",
    ]
    of_two_classes = nn.ModuleList([WithHead(), WithHead(), Flat()])
    assert [layer.name for layer in find_layers(of_two_classes).layers] == ["0", "1", "2"]


@pytest.mark.rest("three trainings")
def test_the_line_of_the_run_names_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning.pytorch.superpipeline")
    plain, peaks = fit(lambda: Module(Ensemble(mlp, MANY)), vectors()), []
    for options in ({}, {"layers": "net.models.*.*"}):
        caplog.clear()
        strategy = superpipeline(k=1, k_prime=1, **options)
        assert_same(fit(lambda: Module(Ensemble(mlp, MANY)), vectors(), strategy), plain)
        peaks.append(strategy.stats().peak_device_bytes)
        (line,) = [each for each in caplog.messages if "k = 1, k' = 1" in each]
        assert ("layers= can name smaller ones" in line) == (not options)
    assert peaks[1] < 0.5 * peaks[0]
