"""Threads that look at a module while it is trained, as a notebook, a dashboard or a checkpoint in the background does."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tests.support.models import Module, Stack, vectors

Look = Callable[[pl.LightningModule, pl.Trainer], Any]


def _state(module: pl.LightningModule, trainer: pl.Trainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _without_graph(module: pl.LightningModule, trainer: pl.Trainer) -> list[float]:
    with torch.no_grad():
        return [float((p * 2).norm()) for p in module.parameters()]


def _call(module: Any, trainer: pl.Trainer) -> float:
    with torch.no_grad():
        return float(module.net(vectors(1)[0].to(module.device)).sum())


def _saved(module: pl.LightningModule, trainer: pl.Trainer) -> Any:
    return trainer.strategy.lightning_module_state_dict()


def _optimizers(module: pl.LightningModule, trainer: pl.Trainer) -> list[Any]:
    return [each.state_dict() for each in trainer.optimizers]


def _counters(module: pl.LightningModule, trainer: Any) -> Any:
    return trainer.strategy.plan, trainer.strategy.stats(), trainer.strategy.fetches()


LOOKS: dict[str, Look] = {
    "state_dict": _state,
    "one weight": lambda module, _: float(next(module.parameters()).detach().sum()),
    "norms": lambda module, _: [float(p.detach().norm()) for p in module.parameters()],
    "norms with a graph": lambda module, _: sum(p.norm() for p in module.parameters()).item(),  # type: ignore[union-attr]
    "data": lambda module, _: [float(p.data.norm()) for p in module.parameters()],
    "without a graph": _without_graph,
    "forward": _call,
    "forward with a graph": lambda module, _: module.net(vectors(1)[0].to(module.device)).sum().item(),  # type: ignore[operator]
    "copy": lambda module, _: copy.deepcopy(module.net),
    "checkpoint": _saved,
    "optimizers": _optimizers,
    "counters": _counters,
}
"""Ways of looking at a module and its trainer. None of them writes anything."""

MAY_FAIL = {"forward", "forward with a graph", "checkpoint", "optimizers", "counters"}
"""Those which may get an error, because no whole state is there to be looked at."""


class Watched(Module):
    """A small module that is trained while it is looked at. It draws no random numbers, and nor do those who call it then."""

    def __init__(self) -> None:
        super().__init__(Stack())
        for block in self.net.blocks:  # type: ignore[union-attr]
            block.drop.p = 0.0


class Reader(Callback):
    """Looks at the module at random times, in a thread of its own, from before set-up until :meth:`end`.

    Args:
        looks: names of :data:`LOOKS`, of which one is chosen each time.
        seed: of the times and choices.
        pause: the longest time between two looks, in seconds.

    Attributes:
        looked: how often each look has succeeded.
        errors: those that a look has raised, with its name.
    """

    def __init__(self, looks: Sequence[str], seed: int, pause: float = 0.003) -> None:
        self.looked = dict.fromkeys(looks, 0)
        self.errors: list[tuple[str, Exception]] = []
        self._random = random.Random(seed)
        self._pause = pause
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._thread = threading.Thread(target=self._read, args=(pl_module, trainer), name="reader", daemon=True)
        self._thread.start()

    def _read(self, module: pl.LightningModule, trainer: pl.Trainer) -> None:
        while not self._over.is_set():
            name = self._random.choice(list(self.looked))
            try:
                LOOKS[name](module, trainer)
                self.looked[name] += 1
            except Exception as error:
                self.errors.append((name, error))
            time.sleep(self._random.random() * self._pause)

    def end(self) -> None:
        """Ends the thread."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(60)
            assert not self._thread.is_alive(), "the reader hangs"


@contextmanager
def reading(looks: Sequence[str], seed: int, **options: Any) -> Iterator[Reader]:
    """A reader for one run, as a callback of its trainer."""
    reader = Reader(looks, seed, **options)
    try:
        yield reader
    finally:
        reader.end()


def elsewhere(work: Callable[[], Any], seconds: float = 20) -> Any:
    """What a function returns in a thread of its own, or the exception that it raises there."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "the thread hangs"
    return found[0]
