"""The group of several devices: :class:`~sp_lightning.experimental.ranks.ranks.Ranks` with the interface of ``trainer.group``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from sp_lightning.core.engine.placement import Placement
from sp_lightning.core.engine.streamer import Streamer
from sp_lightning.experimental.ranks.agreement import (
    compare_batches,
    compare_models,
    compare_optimizers,
    compare_weights,
    refuse_on_ranks,
)
from sp_lightning.experimental.ranks.placement import RankPlacement
from sp_lightning.experimental.ranks.rank_steps import RankSteps
from sp_lightning.experimental.ranks.ranks import Ranks
from sp_lightning.trainer.group import Group
from sp_lightning.trainer.options import Options


class RankGroup(Ranks, Group):
    """The processes of several devices, as the interface of the trainer has them. The arguments are those of ``Ranks``."""

    alone = False

    def check_model(self, module: pl.LightningModule, options: Options, plugin: Any) -> None:
        refuse_on_ranks(module, options, plugin)
        compare_models(self, module, options)

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        compare_optimizers(self, optimizers)

    def check_batches(self, trainer: pl.Trainer) -> None:
        compare_batches(self, trainer)

    def check_weights(self, module: pl.LightningModule, when: str) -> None:
        compare_weights(self, module, when)

    def placement(self) -> Placement:
        return RankPlacement(self)

    def steps(self, engine: Callable[[], Streamer]) -> RankSteps:
        return RankSteps(engine)

    def note_place(self, place: str) -> None:
        self.place = place

    def gather(self, number: int, what: str) -> list[int]:
        first = self.node * self.size
        return [int(each) for each in self.barrier(what, number)[first : first + self.size]]

    def send_buffers(self, module: pl.LightningModule) -> None:
        self.broadcast([buffer for buffer in module.buffers() if buffer.numel()])
