"""The strategy's callback: logs the plan and the longest wait of a run, writes metrics and timelines, and prefetches layers."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from sp_lightning.core.device.timeline import Interval, Timeline, chrome_trace
from sp_lightning.core.observe.messages import say_once
from sp_lightning.core.observe.plot import draw_timeline, supported_formats
from sp_lightning.core.observe.reached import Reached, machine_of, today
from sp_lightning.core.observe.stats import (
    DEFAULT_METRICS,
    METRICS,
    Stats,
    bottleneck,
    counters_line,
    metrics_of,
    over_plan,
    state_line,
)
from sp_lightning.core.plan.host_memory import host_memory
from sp_lightning.trainer.compat import accumulates, logged_step
from sp_lightning.trainer.loops import LoopStrategy
from sp_lightning.trainer.user_hooks import WRITE_NO_WEIGHTS


class SuperpipelineCallback(Callback):
    """Logs one line at the beginning and one at the end of a run, and prefetches the next batch's layers.

    The callback can also write metrics and a timeline. If the trainer has no such callback, the strategy attaches one, except
    with ``SuperpipelineStrategy(callback=False)``. Training is correct without the callback. The callback has no state, so
    checkpoints are the same with and without it.

    If no hook of the module, the data module or a callback could write weights between two batches, the next batch's first layers
    are uploaded while its data loads.

    Args:
        timeline: file for a Chrome trace (JSON) of some training batches. Open it in https://ui.perfetto.dev.
        plot: file (PNG, PDF, SVG) for a picture of the last recorded batch; needs matplotlib. With several devices, ``timeline``
            and ``plot`` show only rank 0, which updates the weights for all ranks of its node. Other ranks write no files.
        every_n_steps: Record every n-th batch, from the second on. Log metrics every n-th step.
        progress_bar: show two metrics in the progress bar: ``waited`` (a share of the time) and ``window`` (k).
        metrics: log these metrics to the trainer's loggers, as ``superpipeline/NAME``: True for ``waited`` and ``window``,
            ``"all"``, or a list of names. The guide on logging has a table of them.
        report: file (JSON) for the measured speed and the settings of the run, written at the end of training.
        verbose: show the plan, the ledger and the reasons of decisions, which are otherwise logged at DEBUG only. Log a line
            about time and memory every ``every_n_steps`` steps.

    With another strategy, the callback warns once and does nothing.

    Raises:
        ValueError, ImportError: an option has a value that is not possible.
    """

    _level: int | None = None  # the log's level before this callback made it verbose

    def __init__(
        self,
        *,
        timeline: str | Path | None = None,
        plot: str | Path | None = None,
        every_n_steps: int = 50,
        progress_bar: bool = False,
        metrics: bool | str | Sequence[str] = False,
        report: str | Path | None = None,
        verbose: bool = False,
    ) -> None:
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(f"every_n_steps must be a whole number of at least 1, found {every_n_steps!r}.")
        self._every = every_n_steps
        self._progress_bar = progress_bar
        self._metrics = _checked_metrics(metrics)
        self._verbose = verbose
        self._timeline = _checked_file("timeline", timeline)
        self._plot = _checked_file("plot", plot)
        self._report = _checked_file("report", report)
        if self._plot is not None and self._plot.suffix[1:] not in (formats := supported_formats()):
            raise ValueError(f"plot={str(plot)!r} must end in one of {sorted(formats)}. For example plot='run.png'.")
        self._active = self._running = self._records = self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the strategy and the timeline of a run."""
        return {**vars(self), "_strategy": None, "_intervals": None}

    # ------------------------------------------------------------------ a run begins

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._running = self._records = False
        self._begun_batches, self._start, self._reached = 0, 0.0, Reached()
        self._intervals: Timeline | None = None
        self._batches: dict[int, list[Interval]] = {}  # the intervals of each recorded batch, by its number
        self._tokens: int | None = 0  # the tokens of this run so far; None if a batch's number of tokens is unknown
        self._last: dict[str, tuple[float, Stats | None, int]] = {}  # time, counters and tokens at the last `_measure`
        self._active = hasattr(trainer.strategy, "_expect_next_batch")
        if not self._active:
            if not self._warned:
                rank_zero_warn(
                    f"SuperpipelineCallback does nothing: the trainer has {type(trainer.strategy).__name__}. Expected "
                    "Trainer(strategy=SuperpipelineStrategy()). Use it, or remove the callback."
                )
            self._warned = True
            return
        self._strategy: LoopStrategy = trainer.strategy  # type: ignore[assignment]
        if self._verbose and trainer.is_global_zero and self._level is None:
            self._level = self._strategy.log.level
            self._strategy.log.setLevel(logging.DEBUG)
        self._records = stage == "fit" and trainer.is_global_zero
        for file in self._files:  # created now, so that an error is raised before training
            file.parent.mkdir(parents=True, exist_ok=True)
            file.open("ab").close()
        if self._report is not None and self._records:
            self._report.parent.mkdir(parents=True, exist_ok=True)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(training=True)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._reached.begins(trainer.global_step)  # only now is a checkpoint's number of steps loaded

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin()
        self._stop_recording()  # validation does not count as part of the batch before it
        self._reached.interrupted()

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin()

    on_predict_start = on_test_start

    def _begin(self, *, training: bool = False) -> None:
        """Logs the plan and starts the clock of the run. No-op for validation within training, whose run has begun already."""
        if self._running or not self._active:
            return
        self._running = True
        self._start = perf_counter()
        plan, log = self._strategy.plan, self._strategy.log
        state = self._strategy.ledger.state if training else None
        device = self._strategy._computing_device
        on_cpu = device is not None and device.computes_on_host
        line = " ".join([plan.sentence(state=state, on_cpu=on_cpu), *self._strategy.remarks()])
        say_once(log, line, self._strategy._said)
        log.debug("\n%s", plan.table(state=state))

    # ------------------------------------------------------------------ training batches

    def on_train_batch_start(self, trainer: Any, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._files:
            return
        self._stop_recording()
        self._begun_batches += 1
        # The first batch of a run is not recorded: it compiles kernels and fills caches.
        if self._begun_batches > 1 and (self._begun_batches - 2) % self._every == 0:
            device = self._strategy._computing_device
            assert device is not None
            if self._timeline is None:  # only the picture needs the batches, and it shows the last one
                self._batches.clear()
            self._batches[self._begun_batches - 1] = []
            self._intervals = self._intervals or device.make_timeline()
            device.timelines.append(self._intervals)

    def on_train_batch_end(
        self, trainer: Any, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._active:
            return
        self._strategy._expect_next_batch()
        if self._report is not None:
            self._reached.batch_ended(perf_counter(), batch, trainer.global_step)
        tokens = _tokens_in(batch)
        self._tokens = None if tokens is None or self._tokens is None else self._tokens + tokens
        has_no_step = pl_module.automatic_optimization and accumulates(trainer)  # a later batch has the optimizer step
        step = logged_step(trainer)
        is_due = not has_no_step and (step + 1) % self._every == 0
        if is_due and (self._verbose or (self._metrics and trainer.loggers)):
            found = self._measure("steps")
            metrics = {f"superpipeline/{name}": found[name] for name in self._metrics if name in found}
            for logger in trainer.loggers if metrics else ():
                logger.log_metrics(metrics, step=step)
            if self._verbose and trainer.is_global_zero:
                self._strategy.log.debug(state_line(step + 1, found, host_memory(), self._strategy._device_memory))
        if self._progress_bar:
            found = self._measure("batches")
            pl_module.log_dict({name: found[name] for name in DEFAULT_METRICS}, prog_bar=True, logger=False)

    def _measure(self, between: str) -> dict[str, float]:
        """Returns all metrics. Rates cover the time since the last call with the same ``between``, which this call records.

        Args:
            between: the kind of moments between which rates are measured: ``"steps"`` or ``"batches"``.
        """
        now, stats = perf_counter(), self._strategy.stats()
        then, before, tokens = self._last.get(between, (self._start, None, 0))
        self._last[between] = now, stats, self._tokens or 0
        tokens_since = None if self._tokens is None else self._tokens - tokens
        return metrics_of(stats, before, now - then, tokens_since, self._strategy.plan)

    # ------------------------------------------------------------------ a run ends

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write_recording()
        self._write_report(trainer)
        self._end()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._end()

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end()

    on_predict_end = on_test_end

    def _end(self) -> None:
        """Ends the run: logs the counters, the longest wait, and advice on optimizer steps."""
        if not self._active:
            return
        stats, plan, log = self._strategy.stats(), self._strategy.plan, self._strategy.log
        seconds = perf_counter() - self._start
        self._running = False
        waited = bottleneck(stats, seconds, plan)
        log.debug("%s", counters_line(stats))
        if over := over_plan(stats, plan):
            log.info(over)
        if waited:
            log.info(" ".join(filter(None, [waited, self._strategy._step_advice()])))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._running:
            self._write_recording()
        self._restore_level()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restores the log's level, and removes files of set-up that are still empty.

        Lightning calls this hook after the strategy's teardown, so the run is over. Lightning does not call it

        - after an error: :meth:`on_exception` has restored the level then;
        - for a callback that the strategy has attached: the strategy's teardown has detached the callback.
        """
        self._restore_level()
        self._intervals = None
        for file in self._files:
            if file.is_file() and not file.stat().st_size:  # no batch was recorded
                file.unlink()

    def _restore_level(self) -> None:
        if self._level is not None:
            self._strategy.log.setLevel(self._level)
            self._level = None

    # ------------------------------------------------------------------ a timeline

    @property
    def _files(self) -> list[Path]:
        """The files that this rank writes in this run."""
        return [file for file in (self._timeline, self._plot) if file is not None and self._records]

    def _stop_recording(self) -> None:
        """Stops recording, and adds the recorded intervals to the last batch. No-op before the first recorded batch."""
        if self._intervals is None:
            return
        device = self._strategy._computing_device  # a new device if the engine was built again in the meantime
        if device is not None and self._intervals in device.timelines:
            device.timelines.remove(self._intervals)
        if self._batches:
            # Intervals that had not ended when an earlier batch was stopped are added to the last recorded batch as well.
            self._batches[max(self._batches)] += self._intervals.take()

    def _write_recording(self) -> None:
        """Stops recording, and writes the timeline and the picture. An error is only logged.

        If the disk is full, for example, checkpoints must not be lost, and the error that ended a run must not be hidden.
        """
        self._stop_recording()
        try:
            if self._batches:
                self._write_files()
        except Exception:
            self._strategy.log.exception("Superpipeline: the timeline could not be written.")

    def _write_report(self, trainer: pl.Trainer) -> None:
        """Writes the report. An OSError is only logged, for example if the disk is full."""
        if self._report is None or not self._records:
            return
        log, device = self._strategy.log, self._strategy._computing_device
        assert device is not None
        found = self._reached.as_dict(trainer.accumulate_grad_batches)
        if not found:
            log.warning(
                "Superpipeline: %s was not written: it needs two training batches in succession, from the third step on.",
                self._report,
            )
            return
        place, overlap = self._strategy._stepping
        plan, module = self._strategy.plan, trainer.lightning_module
        modes = set(self._strategy.activations.values())
        counts = [(weight.numel(), weight.requires_grad) for weight in module.parameters()]
        waited = {name: value for name, value in vars(self._strategy.stats()).items() if name.endswith("seconds")}
        found |= {
            "kind": "report", "date": today(), "machine": machine_of(device),
            "model": type(module).__name__, "parameters": sum(count for count, _ in counts),
            "trained": sum(count for count, trains in counts if trains),
            "devices": plan.ranks * plan.nodes, "precision": str(trainer.precision),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "k": plan.k, "k_prime": plan.k_prime, "activations": modes.pop() if len(modes) == 1 else "auto",
            "optimizer_overlap": overlap, "optimizer_on": place, "gpu_layers": len(plan.stay),
            "device_bytes": self._strategy.stats().peak_allocated_bytes,
            "waited": waited,
        }  # fmt: skip
        try:
            self._report.write_text(json.dumps(found, indent=1), encoding="utf-8")
        except OSError:
            log.exception("Superpipeline: the report could not be written.")

    def _write_files(self) -> None:
        """Writes the timeline and the picture of the recorded batches, and then drops the batches."""
        plan = self._strategy.plan
        masters = (f"{layer.name}, float32" for layer in plan.masters)
        rows = [*(layer.name for layer in plan.layers), *masters, *(table.name for table in plan.tables)]
        if self._timeline is not None:
            process = None if plan.alone else f"rank 0 of {plan.ranks * plan.nodes}"
            self._timeline.write_text(json.dumps(chrome_trace(self._batches, rows, process)))
            self._strategy.log.info(
                "Superpipeline: %d batches are in %s; open it in https://ui.perfetto.dev.",
                len(self._batches),
                self._timeline,
            )
        if self._plot is not None:
            last = max(self._batches)
            title = f"Training batch {last}, k = {plan.k}, k' = {plan.k_prime}"
            if not plan.alone:
                title += f", rank 0 of {plan.ranks * plan.nodes}"
            draw_timeline(self._batches[last], rows, self._plot, title)
        self._batches.clear()


WRITE_NO_WEIGHTS.add(SuperpipelineCallback)


def _checked_metrics(metrics: Any) -> tuple[str, ...]:
    """Returns the names of the metrics that ``metrics=`` stands for. Raises a ValueError for an unknown name."""
    if isinstance(metrics, bool):
        return DEFAULT_METRICS if metrics else ()
    if metrics == "all":
        return METRICS
    names = tuple(metrics) if isinstance(metrics, (list, tuple)) else (metrics,)
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ValueError(
            f'metrics= takes True, False, "all" or a list of names, found {unknown[0]!r}. The names are {", ".join(METRICS)}.'
        )
    return names


def _tokens_in(batch: Any) -> int | None:
    """Returns the number of tokens of a batch, which is the number of elements of its ``input_ids``; None without them."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return ids.numel() if isinstance(ids, Tensor) else None


def _checked_file(option: str, path: str | Path | None) -> Path | None:
    """Returns the path of an option. Raises a ValueError if it is a folder."""
    if path is None:
        return None
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{option}={str(path)!r} is a folder; name a file in it.")
    return file
