"""The strategy's partner: says what a run will take and what it waited for, lets the next batch's layers come early."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from sp_lightning.device.timeline import Interval, Timeline, chrome_trace
from sp_lightning.observe.messages import say_once
from sp_lightning.observe.plot import draw_timeline, supported_formats
from sp_lightning.observe.stats import Stats
from sp_lightning.observe.summary import bottleneck, counters_line
from sp_lightning.plan.ledger import Ledger
from sp_lightning.plan.plan import Plan
from sp_lightning.trainer.compat import accumulates, attach_callback, logged_step
from sp_lightning.trainer.user_hooks import WRITE_NO_WEIGHTS


class Partner(Protocol):
    """What the callback needs of its strategy."""

    log: logging.Logger

    def remarks(self) -> list[str]:
        """What a user should know beside the plan."""

    @property
    def plan(self) -> Plan:
        """What was decided."""

    @property
    def ledger(self) -> Ledger:
        """The host's memory, in training."""

    def stats(self) -> Stats:
        """The counters."""

    def expect_next_batch(self) -> None:
        """The batch is over."""

    def make_timeline(self) -> Timeline:
        """For this run."""

    def record(self, timeline: Timeline, *, on: bool) -> None:
        """Whether intervals are kept from here on."""


class SuperpipelineCallback(Callback):
    """One line in the log when a run begins, one at its end, prefetches across batches; metrics and a timeline if wanted.

    Attached by the strategy for each run unless ``SuperpipelineStrategy(callback=False)``; training is right without
    it. It keeps no state, so checkpoints are the same with and without.

    Where neither the module nor any callback has a hook between two batches that could write weights, the next
    batch's first layers are fetched while its data loads.

    Args:
        timeline: file for a Chrome trace (JSON) of some training batches: open it in https://ui.perfetto.dev.
        plot: file (PNG, PDF, SVG) for a picture of the last of them; needs matplotlib.
        every_n_steps: how many training batches pass from one that is kept to the next, the first of all not, and from one
            step whose metrics are logged to the next.
        progress_bar: show the share of the time that was waited, and the window, in the progress bar.
        metrics: log the counters to the trainer's loggers, as ``superpipeline/…``.
        verbose: show the plan, the ledger, and why what was decided, too, which are in the log at DEBUG otherwise.

    Raises:
        ValueError, ImportError: an option that cannot be.
    """

    _level: int | None = None  # the log's own, while it is verbose

    def __init__(
        self,
        *,
        timeline: str | Path | None = None,
        plot: str | Path | None = None,
        every_n_steps: int = 50,
        progress_bar: bool = False,
        metrics: bool = False,
        verbose: bool = False,
    ) -> None:
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(f"every_n_steps must be a whole number of at least 1, found {every_n_steps!r}.")
        self._timeline = _writable("timeline", timeline)
        self._plot = _writable("plot", plot)
        if self._plot is not None:
            formats = supported_formats()
            if self._plot.suffix[1:] not in formats:
                raise ValueError(
                    f"plot={str(plot)!r} must end in one of {sorted(formats)}. For example plot='run.png'."
                )
        self._every = every_n_steps
        self._progress_bar = progress_bar
        self._metrics = metrics
        self._verbose = verbose
        self._batches = 0
        self._recording: int | None = None
        self._intervals: Timeline | None = None
        self._steps: dict[int, list[Interval]] = {}
        self._counted = False
        self._began = self._last_time = 0.0
        self._last_stats: Stats | None = None

    # ------------------------------------------------------------------ hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not hasattr(trainer.strategy, "expect_next_batch"):
            raise ValueError(
                f"SuperpipelineCallback works with SuperpipelineStrategy only; the trainer has "
                f'{type(trainer.strategy).__name__}. Use Trainer(strategy="superpipeline"), or remove the callback.'
            )
        self._strategy: Partner = trainer.strategy  # type: ignore[assignment]
        if self._verbose and self._level is None:
            self._level = self._strategy.log.level
            self._strategy.log.setLevel(logging.DEBUG)
        self._intervals = None
        for path in self._files() if stage == "fit" else ():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()  # before any work: the error of a path that cannot be written
        self._counted = False
        self._batches = 0
        self._recording = None
        self._steps.clear()
        self._last_stats = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(training=True)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin()
        self._stop_recording()  # it is no part of the batch before it

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin()

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin()

    def on_train_batch_start(self, trainer: Any, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if self._timeline is None and self._plot is None:
            return
        self._stop_recording()
        self._batches += 1
        if self._batches > 1 and (self._batches - 2) % self._every == 0:
            self._recording = self._batches - 1
            self._intervals = self._intervals or self._strategy.make_timeline()
            self._strategy.record(self._intervals, on=True)

    def on_train_batch_end(
        self, trainer: Any, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._strategy.expect_next_batch()
        waits = pl_module.automatic_optimization and accumulates(trainer)  # its optimizer step is a later batch's
        step = logged_step(trainer)
        due = self._metrics and trainer.loggers and not waits and (step + 1) % self._every == 0
        if not due and not self._progress_bar:
            return
        stats = self._strategy.stats()
        rates = self._rates(stats)
        if due:
            metrics = {f"superpipeline/{name}": float(value) for name, value in {**vars(stats), **rates}.items()}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)
        if self._progress_bar:
            shown = {f"superpipeline/{name}": rates[name] for name in ("stall_fraction", "window")}
            pl_module.log_dict(shown, prog_bar=True, logger=False)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write()
        self._end()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._end()

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end()

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._counted:
            self._write()
        self._be_quiet()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._be_quiet()
        self._intervals = None
        for path in self._files():
            if path.is_file() and not path.stat().st_size:
                path.unlink()  # there was nothing to write

    def _files(self) -> list[Path]:
        return [path for path in (self._timeline, self._plot) if path is not None]

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to a run."""
        return {**vars(self), "_strategy": None, "_intervals": None}

    # ------------------------------------------------------------------ what is shown

    def _begin(self, *, training: bool = False) -> None:
        if self._counted:
            return
        self._counted = True
        self._began = self._last_time = perf_counter()
        plan, log = self._strategy.plan, self._strategy.log
        state = self._strategy.ledger.state if training else None
        line = " ".join([plan.sentence(training=training, state=state), *self._strategy.remarks()])
        say_once(log, line)
        log.debug("\n%s", plan.table(training=training, state=state))

    def _end(self) -> None:
        stats, plan, log = self._strategy.stats(), self._strategy.plan, self._strategy.log
        seconds = perf_counter() - self._began
        self._counted = False
        found = bottleneck(stats, seconds, plan)
        log.debug("%s", counters_line(stats))
        if found:
            log.info(found)

    def _be_quiet(self) -> None:
        if self._level is not None:
            self._strategy.log.setLevel(self._level)
            self._level = None

    def _rates(self, stats: Stats) -> dict[str, float]:
        """Since the last call: the share of the time that was waited, device memory, traffic, the window."""
        now, before = perf_counter(), self._last_stats
        seconds = max(now - self._last_time, 1e-9)
        self._last_time, self._last_stats = now, stats
        waited = stats.waited_seconds - (before.waited_seconds if before else 0.0)
        fetched = stats.fetched_bytes - (before.fetched_bytes if before else 0)
        return {
            "stall_fraction": min(waited / seconds, 1.0),
            "device_bytes": float(self._strategy.plan.peak_device_bytes),
            "fetch_gbps": fetched / seconds / 1e9,
            "window": float(self._strategy.plan.k),
        }

    # ------------------------------------------------------------------ the timeline

    def _stop_recording(self) -> None:
        if self._intervals is None:
            return
        self._strategy.record(self._intervals, on=False)
        if self._recording is not None:
            if self._timeline is None:  # the picture shows the last one only
                self._steps.clear()
            self._steps.setdefault(self._recording, [])
            self._recording = None
        if self._steps:
            # What had not ended when it was looked at last belongs to the last batch that was kept.
            self._steps[max(self._steps)] += self._intervals.take()

    def _write(self) -> None:
        """Checkpoints, and the error that ended a run, must not be lost because a disk is full."""
        self._stop_recording()
        try:
            if self._steps:
                self._write_files()
        except Exception:
            self._strategy.log.exception("Superpipeline: the timeline could not be written.")

    def _write_files(self) -> None:
        plan = self._strategy.plan
        masters = (f"{each.name}, float32" for each in plan.masters)
        names = [*(layer.name for layer in plan.layers), *masters, *(table.name for table in plan.tables)]
        if self._timeline is not None:
            self._timeline.write_text(json.dumps(chrome_trace(self._steps, names)))
            self._strategy.log.info(
                "Superpipeline: %d batches are in %s; open it in https://ui.perfetto.dev.",
                len(self._steps),
                self._timeline,
            )
        if self._plot is not None:
            last = max(self._steps)
            draw_timeline(
                self._steps[last], names, self._plot, f"Training batch {last}, k = {plan.k}, k' = {plan.k_prime}"
            )
        self._steps.clear()


def attach(trainer: Any, kind: type[SuperpipelineCallback]) -> SuperpipelineCallback | None:
    """Gives a trainer the callback that it lacks. Returns it; None if the user has given the trainer one."""
    if any(isinstance(callback, SuperpipelineCallback) for callback in trainer.callbacks):
        return None
    callback = kind()
    attach_callback(trainer, callback)
    return callback


def detach(trainer: Any, attached: SuperpipelineCallback | None) -> None:
    """Leaves a trainer with the callbacks of its user, however the run has ended."""
    if trainer is not None and attached is not None:
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not attached]


def _writable(option: str, path: str | Path | None) -> Path | None:
    if path is None:
        return None
    found = Path(path)
    if found.is_dir():
        raise ValueError(f"{option}={str(path)!r} is a folder; name a file in it.")
    return found


WRITE_NO_WEIGHTS.add(SuperpipelineCallback)
