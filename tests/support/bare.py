"""Runs without callbacks of the tests': the path that users take, with copies kept and the next batch's layers fetched early."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from torch import nn

from tests.support.models import (
    Module,
    Stack,
    vectors,
)
from tests.support.runs import assert_equal, loader, superpipeline, trainer_for


def bare(make: Callable[[], pl.LightningModule], strategy: Any, batches: Any = None, **options: Any) -> list[Any]:
    """Train without callbacks; what is left, and what the module noted in ``seen``."""
    pl.seed_everything(7, verbose=False)
    module = make()
    trainer = trainer_for(strategy, **options)
    trainer.fit(module, loader(vectors() if batches is None else batches))
    optimizers = [copy.deepcopy(each.state_dict()) for each in trainer.optimizers]
    return [dict(module.state_dict()), optimizers, getattr(module, "seen", None)]


def assert_like_plain(make: Callable[[], pl.LightningModule], batches: Any = None, **options: Any) -> None:
    plain = bare(make, "auto", batches, **options)
    for k, k_prime in ((1, 1), (2, 2), (99, 1)):
        assert_equal(bare(make, superpipeline(k=k, k_prime=k_prime), batches, **options), plain, f"k={k}")


class Manual(Module):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net or Stack(4))
        self.automatic_optimization = False
        self.seen: list[Any] = []
