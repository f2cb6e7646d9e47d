"""A clock for Lightning's timer that stands still until a test moves it, so that no test depends on how fast the machine is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import model_checkpoint, timer

from examples.demos import cram_llm


class Killed(Exception):
    pass


class Ticks:
    """A clock that goes on by so much in each training batch of the recipe, and ends the run after so many.

    Attributes:
        rates: the learning rate of the optimizer in each batch.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tick: float, batches: int | None = None) -> None:
        self.time, self.rates = 1000.0, list[float]()
        training_step = cram_llm.Crammed.training_step

        def step(module: Any, *batch: Any) -> Any:
            if len(self.rates) == batches:
                raise Killed
            self.time += tick
            self.rates.append(module.trainer.optimizers[0].param_groups[0]["lr"])
            return training_step(module, *batch)

        monkeypatch.setattr(cram_llm.Crammed, "training_step", step)
        for module in (timer, model_checkpoint):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.time))
