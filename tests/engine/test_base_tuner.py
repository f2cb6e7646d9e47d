"""Without the folder ``tuning`` the first plan stays, and a run still makes room after the device has run out of memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from sp_lightning import registry
from sp_lightning.core.device.device import Device
from sp_lightning.core.engine.tuner import BaseTuner
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.plan.window import Window
from tests.support.models import Module
from tests.support.runs import assert_same, fit, superpipeline
from tests.support.simdevice import simulated

WIDTH = 64
LAYER = WIDTH * WIDTH * 4


class Tower(nn.Module):
    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        swells = x[0, 0] > 100
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + x.repeat(400, 1).mean() if swells else x


def rows(*, largest: float = 1.0) -> list[Tensor]:
    torch.manual_seed(3)
    batches = [torch.randn(4, WIDTH) for _ in range(5)]
    batches[3][0, 0] = largest
    return batches


@pytest.fixture
def without_tuning() -> Iterator[None]:
    with mock.patch.object(registry, "is_installed", lambda folder: folder != "capabilities.tuning"):
        yield


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.usefixtures("without_tuning")
def test_the_first_plan_stays_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    strategy = superpipeline()
    with simulated(capacity=30 * LAYER), caplog.at_level(logging.INFO, logger="lightning.pytorch.superpipeline"):
        ours = fit(lambda: Module(Tower()), rows(), strategy)
    assert_same(ours, fit(lambda: Module(Tower()), rows()))
    assert (strategy.plan.k, strategy.plan.k_prime) == (1, 1)
    assert caplog.text.count("stay as they are planned: sp_lightning/capabilities/tuning is not installed") == 1


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.usefixtures("without_tuning")
def test_an_error_for_want_of_memory_still_says_what_to_do() -> None:
    with simulated(capacity=20 * LAYER), pytest.raises(torch.OutOfMemoryError) as raised:
        fit(lambda: Module(Tower()), rows(largest=200.0), superpipeline())
    assert "Superpipeline streamed with k=1 and k_prime=1, which is the least" in "\n".join(raised.value.__notes__)


class _Card(Device):
    def free_bytes(self) -> int:
        return 100 * LAYER


class _Engine:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def resize(self, plan: Plan) -> None:
        self.plan = plan


@pytest.mark.parametrize(("k", "stay"), [("auto", 2), (3, 4)])
def test_out_of_memory_halves_the_layers_that_stay_if_the_window_is_chosen(k: Any, stay: int) -> None:
    window = Window(k, 1, None, stay=4)
    engine: Any = _Engine(window.begin(find_layers(Tower()), _Card(torch.device("cpu"))))
    assert len(engine.plan.stay) == 4
    BaseTuner(window, engine).shrink()
    assert len(engine.plan.stay) == stay
