"""What an optimizer's step takes on the host, measured in a run."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models import Module, Stack, vectors
from tests.support.runs import loader, superpipeline, trainer_for
from tests.support.simdevice import simulated

STEP = 0.05  # seconds


class Slow(torch.optim.SGD):
    """An optimizer that is heavy on the host."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        time.sleep(STEP)
        return loss


class Automatic(Module):
    def configure_optimizers(self) -> Any:
        return Slow(self.parameters(), lr=0.1)


class Manual(Automatic):
    def __init__(self, net: Any) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        time.sleep(STEP)  # forward and backward are no part of the step
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("kind", [Automatic, Manual])
def test_steps_are_timed_where_the_device_waits_for_them(kind: Any) -> None:
    strategy = superpipeline(k=1)
    with simulated():
        trainer_for(strategy).fit(kind(Stack()), loader(vectors(3)))
    assert strategy.stats().step_seconds >= 3 * STEP
    assert strategy.stats().step_seconds <= strategy.stats().waited_seconds
    strategy = superpipeline(k=1)
    trainer_for(strategy).fit(kind(Stack()), loader(vectors(3)))
    assert strategy.stats().step_seconds == 0, "where the model computes on the host, nobody waits"
