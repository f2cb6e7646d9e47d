"""Slots of layers that graphs keep. ``tests/equality/programs/repeated.py`` has layers that are called several times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from tests.equality.programs.repeated import WIDTH, Kept
from tests.support.engine import engine_of
from tests.support.models import Module
from tests.support.runs import fit, superpipeline

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")


@pytest.mark.rest("takes tenths of a second")
def test_weights_that_graphs_keep_are_let_go() -> None:
    """While a graph keeps them as they are they hold their slots; afterwards nobody does."""
    strategy = superpipeline(k=1, k_prime=1)
    held: list[int] = []

    class Looks(Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            held.append(sum(slot.extra for slot in engine_of(strategy).slots.all))

        def on_train_batch_end(self, *arguments: Any) -> None:
            held.append(sum(slot.extra for slot in engine_of(strategy).slots.all))

    net = [Kept() for _ in range(6)]
    fit(lambda: Module(nn.Sequential(*net)), list(torch.randn(2, 3, 6, WIDTH)), strategy, callbacks=[Looks()])
    assert held[0] == held[2] > 2
    assert held[1] == held[3] == 0
