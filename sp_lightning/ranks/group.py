"""The group of several devices: implements the interface of ``trainer.group`` with :class:`~sp_lightning.ranks.ranks.Ranks`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from sp_lightning.engine.placement import Placement
from sp_lightning.engine.streamer import Streamer
from sp_lightning.ranks.agreement import (
    compare_batches,
    compare_models,
    compare_optimizers,
    compare_weights,
    refuse_on_ranks,
)
from sp_lightning.ranks.placement import RankPlacement
from sp_lightning.ranks.rank_steps import RankSteps
from sp_lightning.ranks.ranks import Ranks
from sp_lightning.trainer.group import Group
from sp_lightning.trainer.options import Options


class RankGroup(Group):
    """The processes of several devices.

    Args:
        ranks: the connected processes.
    """

    alone = False

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.size = ranks.size
        self.nodes = ranks.nodes
        self.primary = ranks.primary
        self.first = ranks.first

    @property
    def closed(self) -> bool:
        return self.ranks.closed

    @property
    def failure(self) -> str:
        return self.ranks.failure

    def check_model(self, module: pl.LightningModule, options: Options, plugin: Any) -> None:
        refuse_on_ranks(module, options, plugin)
        compare_models(self.ranks, module, options)

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        compare_optimizers(self.ranks, optimizers)

    def check_batches(self, trainer: pl.Trainer) -> None:
        compare_batches(self.ranks, trainer)

    def check_weights(self, module: pl.LightningModule, when: str, optimizers: Sequence[Optimizer]) -> None:
        compare_weights(self.ranks, module, when, optimizers)

    def placement(self) -> Placement:
        return RankPlacement(self.ranks)

    def steps(self, engine: Callable[[], Streamer]) -> RankSteps:
        return RankSteps(engine)

    def note_place(self, place: str) -> None:
        self.ranks.place = place

    def barrier(self, what: str) -> None:
        self.ranks.barrier(what)

    def gather(self, number: int, what: str) -> list[int]:
        return self.ranks.of_node(number, what)

    def send_buffers(self, module: pl.LightningModule) -> None:
        self.ranks.broadcast([buffer for buffer in module.buffers() if buffer.numel()])

    def fail(self, error: BaseException) -> None:
        self.ranks.fail(error)
