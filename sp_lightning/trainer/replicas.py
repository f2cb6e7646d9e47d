"""What several ranks have beside parameters: buffers, of which the primary's count, as under DistributedDataParallel."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from sp_lightning.device.ranks import Ranks


class Buffers:
    """Sends the primary's buffers to the others when DistributedDataParallel would: before a step, unless the last one was of
    validation; in manual optimization before the first step alone.

    Args:
        ranks: the ranks.
        module: whose buffers they are.
        phase: of the trainer. Outside of training the buffers are sent once.
    """

    def __init__(self, ranks: Ranks, module: pl.LightningModule, phase: TrainerFn | None) -> None:
        self._ranks = ranks
        self._module = module
        self._training = phase == TrainerFn.FITTING
        self._due = self._training
        self.send()

    def send(self) -> None:
        """Overwrites everybody's buffers by the primary's. Collective."""
        self._ranks.broadcast([buffer for buffer in self._module.buffers() if buffer.numel()])

    def step_begins(self) -> None:
        """A step of a loop begins on all ranks."""
        if self._due:
            self.send()
        # In manual optimization Lightning's ddp has them sent once: its forward ends without a backward that sums.
        self._due = self._training and torch.is_grad_enabled() and self._module.automatic_optimization
