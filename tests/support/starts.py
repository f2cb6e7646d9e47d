"""The beginning of a run, for what is refused there."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from tests.support.models import Module, Stack, vectors
from tests.support.runs import loader, trainer_for


def start(strategy: Any, module: pl.LightningModule | None = None, **options: Any) -> None:
    trainer_for(strategy, **options).fit(module or Module(Stack()), loader(vectors()))
