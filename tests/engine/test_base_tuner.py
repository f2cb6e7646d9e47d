"""Without the folder ``tuning`` the first plan stays, and a run still makes room after the device has run out of memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from sp_lightning import registry
from sp_lightning.core.device.device import Device
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
