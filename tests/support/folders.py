"""Runs that save checkpoints as folders, which all ranks write together."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback

from sp_lightning import SuperpipelineStrategy
from tests.support.models import Module, Stack


def together(**options: Any) -> SuperpipelineStrategy:
    return SuperpipelineStrategy(**{"k": 1, "fused_optimizer": False, "save_distributed_checkpoint": True, **options})


class Net(Module):
    def __init__(self) -> None:
        super().__init__(Stack())


class Saves(Callback):
    """Saves in the midst of training, after so many batches."""

    def __init__(self, *names: str, at: int = 1) -> None:
        self.names = names
        self.at = at

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            for name in self.names:
                trainer.save_checkpoint(name)
