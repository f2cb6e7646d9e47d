"""The strategy's partner: shows the plan, logs the counters, and lets the next batch's layers come early."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from sp_lightning.plan import Plan, human_bytes
from sp_lightning.quiet import WRITE_NO_WEIGHTS
from sp_lightning.streamer import Stats

# A child of Lightning's own logger: shown where its messages are shown.
log = logging.getLogger("lightning.pytorch.superpipeline")


class Partner(Protocol):
    """What the callback needs of its strategy."""

    @property
    def plan(self) -> Plan:
        """What was decided."""

    def stats(self) -> Stats:
        """The counters."""

    def expect_next_batch(self) -> None:
        """The batch is over."""


class SuperpipelineCallback(Callback):
    """Shows the plan as a table at the start and the counters at the end, logs them, and prefetches across batches.

    Attached by the strategy unless ``SuperpipelineStrategy(callback=False)``; training is right without it. It keeps
    no state, so checkpoints are the same with and without.

    Where neither the module nor any callback has a hook between two batches that could write weights, the next
    batch's first layers are fetched while its data loads.
    """

    _shown: Plan | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not hasattr(trainer.strategy, "expect_next_batch"):
            raise ValueError(
                f"SuperpipelineCallback works with SuperpipelineStrategy only; the trainer has "
                f'{type(trainer.strategy).__name__}. Use Trainer(strategy="superpipeline"), or remove the callback.'
            )
        self._strategy: Partner = trainer.strategy  # type: ignore[assignment]
        self._counted = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show_plan()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show_plan()

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show_plan()

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show_plan()

    def on_train_batch_end(
        self, trainer: Any, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._strategy.expect_next_batch()
        if trainer.loggers and (trainer.global_step + 1) % max(trainer.log_every_n_steps, 1) == 0:
            metrics = {f"superpipeline/{name}": float(value) for name, value in vars(self._strategy.stats()).items()}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._counted:
            log.info(counters_line(self._strategy.stats()))
            self._counted = False

    def _show_plan(self) -> None:
        self._counted = True
        if self._shown != self._strategy.plan:
            self._shown = self._strategy.plan
            log.info("\n%s", self._shown)


def counters_line(stats: Stats) -> str:
    """The counters as one sentence."""
    return (
        f"Superpipeline: {stats.fetched_layers} layers fetched ({human_bytes(stats.fetched_bytes)}) in {stats.transfers} "
        f"transfers, {stats.demand_fetches} on demand, {stats.extra_slots} extra slots; {human_bytes(stats.drained_bytes)} of "
        f"gradients drained; peak of weights and gradients {human_bytes(stats.peak_device_bytes)}; waited "
        f"{stats.stall_seconds:.2f} s for fetches, {stats.drain_stall_seconds:.2f} s for gradients, "
        f"{stats.update_stall_seconds:.2f} s for updates."
    )


WRITE_NO_WEIGHTS.add(SuperpipelineCallback)
