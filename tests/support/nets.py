"""Modules and callbacks with which Lightning's features are tried."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tests.support.models import Stack
from tests.support.ways import Net


def middle(module: Any) -> Tensor:
    """A weight of a layer that is streamed, as it is now."""
    return module.net.blocks[1].inner.weight.detach().clone()


@contextlib.contextmanager
def clock(module: Any, *names: str) -> Iterator[None]:
    """Time passes in a module of Lightning's by one second with each look at it."""
    seconds = itertools.count().__next__
    with mock.patch.object(module, "time", SimpleNamespace(**dict.fromkeys(names, lambda: float(seconds())))):
        yield


@contextlib.contextmanager
def fails(where: str) -> Iterator[None]:
    """Lightning ends the program after an interrupt."""
    with pytest.raises(SystemExit if where == "interrupt" else KeyError, match=None if where == "interrupt" else where):
        yield


class Does(Callback):
    """Calls functions from hooks: ``Does(on_train_batch_end=f)``; they get the trainer, the module, and the rest."""

    def __init__(self, **hooks: Callable[..., None]) -> None:
        for name, hook in hooks.items():
            setattr(self, name, hook)


class Fails(Callback):
    """Raises somewhere in the fourth batch."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._fail("before", batch_idx)
        self._fail("interrupt", batch_idx)
        if self.where == "forward" and batch_idx == 3:
            pl_module.net.blocks[2].register_forward_hook(lambda *_: self._fail("forward", 3))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._fail("after", batch_idx)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._fail("validation", 3)

    def _fail(self, where: str, batch_idx: int) -> None:
        if where == self.where and batch_idx == 3:
            raise (KeyboardInterrupt if where == "interrupt" else KeyError)(where)


class WithExtras(Net):
    """Saves more, and hyperparameters."""

    def __init__(self, depth: int = 3, rate: float = 1e-2) -> None:
        super().__init__(Stack(depth), rate)
        self.save_hyperparameters()
        self.seen = torch.zeros(16)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch.mean(0)
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen.clone()
        checkpoint["norm"] = sum(value.norm() for value in checkpoint["state_dict"].values())
        checkpoint["weight"] = self.net.blocks[0].inner.weight.detach().clone()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]
        checkpoint["state_dict"]["net.head.bias"] = checkpoint["state_dict"]["net.head.bias"] + 1


class Scheduled(Net):
    """Schedulers by name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedulers = torch.optim.lr_scheduler
        chosen: dict[str, Any] = {
            "epoch": lambda: schedulers.StepLR(optimizer, 1, 0.5),
            "step": lambda: {"scheduler": schedulers.ExponentialLR(optimizer, 0.8), "interval": "step", "frequency": 2},
            "plateau": lambda: {
                "scheduler": schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9), "monitor": "val_loss",
            },
            "plateau, step": lambda: {
                "scheduler": schedulers.ReduceLROnPlateau(optimizer, patience=1, threshold=0.9),
                "monitor": "train_loss_step", "interval": "step",
            },
            "one cycle": lambda: {
                "scheduler": schedulers.OneCycleLR(optimizer, 0.1, total_steps=20), "interval": "step", "name": "cycle",
            },
            "sequential": lambda: {
                "scheduler": schedulers.SequentialLR(
                    optimizer,
                    [schedulers.LinearLR(optimizer, 0.1, total_iters=3), schedulers.CosineAnnealingLR(optimizer, 9)],
                    [3],
                ),
                "interval": "step",
            },
        }  # fmt: skip
        return {"optimizer": optimizer, "lr_scheduler": chosen[self.kind]()}


class Summarized(Net):
    example_input_array = torch.ones(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def assert_changing(values: Sequence[Tensor]) -> None:
    """A sequence that stays as it is would be equal for the wrong reason."""
    assert len(values) > 2
    assert len({bytes(value.flatten().view(torch.uint8).tolist()) for value in values}) > 2
