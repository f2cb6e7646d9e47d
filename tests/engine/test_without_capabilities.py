"""Without a capability's folder its default is there, and one line says so when it matters."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from sp_lightning import registry
from tests.support.models import Module
from tests.support.runs import assert_same, fit, superpipeline
from tests.support.saving import Saves, rows, saving
from tests.support.simdevice import simulated

LAYER = 64 * 64 * 4


def without(folder: str) -> AbstractContextManager[object]:
    return mock.patch.object(registry, "is_installed", lambda each: each != f"capabilities.{folder}")


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        swells = x[0, 0] > 100
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + x.repeat(400, 1).mean() if swells else x


def batches(*, largest: float = 1.0) -> list[Tensor]:
    found = [torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    found[3][0, 0] = largest
    return found


@pytest.mark.rest("takes tenths of a second")
def test_auto_keeps_all_activations_and_says_so_if_memory_ends(caplog: pytest.LogCaptureFixture) -> None:
    train: Callable[[], object] = lambda: fit(lambda: saving([1] * 8), rows(), superpipeline(k=1, k_prime=1))  # noqa: E731
    with caplog.at_level(logging.INFO, "lightning.pytorch"), without("activations"):
        with simulated(capacity=2**40):
            train()
        assert "is not installed" not in caplog.text
        with simulated(capacity=4 * Saves.SIZE + 24_000), pytest.raises(torch.OutOfMemoryError):
            train()
    assert caplog.text.count('activations="auto" keeps all activations on the GPU') == 1


@pytest.mark.rest("takes tenths of a second")
def test_the_first_window_stays(caplog: pytest.LogCaptureFixture) -> None:
    strategy = superpipeline()
    with (
        without("tuning"),
        simulated(capacity=30 * LAYER),
        caplog.at_level(logging.INFO, "lightning.pytorch.superpipeline"),
    ):
        ours = fit(lambda: Module(Tower()), batches(), strategy)
    assert_same(ours, fit(lambda: Module(Tower()), batches()))
    assert (strategy.plan.k, strategy.plan.k_prime) == (1, 1)
    assert caplog.text.count("stay as they are planned: sp_lightning/capabilities/tuning is not installed") == 1


@pytest.mark.rest("takes tenths of a second")
def test_an_error_for_want_of_memory_still_says_what_to_do() -> None:
    with without("tuning"), simulated(capacity=20 * LAYER), pytest.raises(torch.OutOfMemoryError) as raised:
        fit(lambda: Module(Tower()), batches(largest=200.0), superpipeline())
    assert "Superpipeline streamed with k=1 and k_prime=1: weights, gradients" in "\n".join(raised.value.__notes__)
