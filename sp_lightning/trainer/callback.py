"""The strategy's callback: logs the plan and the longest wait of a run, writes metrics, a picture and a report, and prefetches
layers."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from sp_lightning.core.device.stats import Stats
from sp_lightning.core.device.timeline import Interval, Timeline
from sp_lightning.core.messages import say_once
from sp_lightning.core.model.wrapped import parts
from sp_lightning.trainer.compat import accumulates, logged_step
from sp_lightning.trainer.host_memory import host_memory, peak_bytes
from sp_lightning.trainer.loops import LoopStrategy
from sp_lightning.trainer.metrics import (
    DEFAULT_METRICS,
    METRICS,
    bottleneck,
    counters_line,
    metrics_of,
    over_plan,
    state_line,
)
from sp_lightning.trainer.plot import draw_timeline, supported_formats
from sp_lightning.trainer.user_hooks import WRITE_NO_WEIGHTS


class SuperpipelineCallback(Callback):
    """Logs one line at the beginning and one at the end of a run, and prefetches the next batch's layers.

    The callback can also write metrics and a picture. If the trainer has no such callback, the strategy attaches one, except
    with ``SuperpipelineStrategy(callback=False)``. Training is correct without the callback. The callback has no state, so
    checkpoints are the same with and without it.

    If no hook of the module, the data module or a callback could write weights between two batches, the next batch's first layers
    are uploaded while its data loads.

    Args:
        plot: file (PNG, PDF, SVG) for a picture of the last recorded batch; needs matplotlib. With several devices, it shows
            only rank 0. Other ranks write no file.
        every_n_steps: Record every n-th batch, from the second on. Log metrics every n-th step.
        progress_bar: show two metrics in the progress bar: ``waited`` (a share of the time) and ``window`` (k).
        metrics: log these metrics to the trainer's loggers, as ``superpipeline/NAME``: True for ``waited`` and ``window``,
            ``"all"``, or a list of names. The guide on logging has a table of them.
        verbose: show the plan, the ledger and the reasons of decisions, which are otherwise logged at DEBUG only. Log a line
            about time and memory every ``every_n_steps`` steps.
        report: file to which each run appends one line of JSON when it has ended: ``run`` (fit, validate, test or predict),
            ``seconds``, ``steps``, ``loss`` (of the last training batch; None if ``training_step`` returned none),
            ``peak_host_bytes`` (with mapped files; None if the system is not Linux), ``weights`` (SHA-256 of all parameters and
            buffers, which are read once for it), and all metrics. A run that an error ends appends nothing. With several
            devices, only rank 0 writes.

    With another strategy, the callback warns once and does nothing.

    Raises:
        ValueError, ImportError: an option has a value that is not possible.
    """

    _level: int | None = None  # the log's level before this callback made it verbose

    def __init__(
        self,
        *,
        plot: str | Path | None = None,
        every_n_steps: int = 50,
        progress_bar: bool = False,
        metrics: bool | str | Sequence[str] = False,
        verbose: bool = False,
        report: str | Path | None = None,
    ) -> None:
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(f"every_n_steps must be a whole number of at least 1, found {every_n_steps!r}.")
        self._every = every_n_steps
        self._progress_bar = progress_bar
        self._metrics = _checked_metrics(metrics)
        self._verbose = verbose
        self._plot = _checked_picture(plot)
        self._report = _checked_report(report)
        self._active = self._running = self._records = self._reports = self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the strategy and the timeline of a run."""
        return {**vars(self), "_strategy": None, "_intervals": None}

    # ------------------------------------------------------------------ a run begins

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._running = self._records = self._reports = False
        self._begun_batches, self._start = 0, 0.0
        self._intervals: Timeline | None = None
        self._loss: Tensor | None = None  # of the last training batch, if a report is written
        self._found: dict[str, Any] | None = None  # the report of a run that has ended, without its weights
        self._recorded = 0  # the number of the last recorded batch; 0 before the first
        self._batch: list[Interval] = []  # the intervals of this batch
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
        self._reports = self._report is not None and trainer.is_global_zero
        for file in self._files:  # created now, so that an error is raised before training
            file.parent.mkdir(parents=True, exist_ok=True)
            file.open("ab").close()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin()
        self._stop_recording()  # validation does not count as part of the batch before it

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin()

    on_predict_start = on_test_start

    def _begin(self) -> None:
        """Logs the plan and starts the clock of the run. No-op for validation within training, whose run has begun already."""
        if self._running or not self._active:
            return
        self._running = True
        self._start = perf_counter()
        line, table = self._strategy._describe()
        say_once(self._strategy.log, line, self._strategy._said)
        self._strategy.log.debug("\n%s", table)

    # ------------------------------------------------------------------ training batches

    def on_train_batch_start(self, trainer: Any, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if self._file is None:
            return
        self._stop_recording()
        self._begun_batches += 1
        # The first batch of a run is not recorded: it compiles kernels and fills caches.
        if self._begun_batches > 1 and (self._begun_batches - 2) % self._every == 0:
            device = self._strategy._computing_device
            assert device is not None
            self._recorded, self._batch = self._begun_batches - 1, []
            self._intervals = self._intervals or device.make_timeline()
            device.timelines.append(self._intervals)

    def on_train_batch_end(
        self, trainer: Any, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._active:
            return
        self._strategy._expect_next_batch()
        if self._reports:
            self._loss = _loss_in(outputs)
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
        self._end(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._end(trainer)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(trainer)

    on_predict_end = on_test_end

    def _end(self, trainer: pl.Trainer) -> None:
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
            log.info(" ".join(filter(None, [waited, self._strategy._step_advice(seconds)])))
        if self._reports:
            loss, self._loss = self._loss, None
            self._found = {
                "run": trainer.state.fn.value if trainer.state.fn else None,
                "seconds": seconds,
                "steps": trainer.global_step,
                # Lightning has divided the loss by the batches of a step.
                "loss": None if loss is None else float(loss) * trainer.accumulate_grad_batches,
                "peak_host_bytes": peak_bytes(),
                **metrics_of(stats, None, seconds, self._tokens, plan),
            }

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._running:
            self._write_recording()
        self._restore_level()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restores the log's level, writes the report, and removes files of set-up that are still empty.

        Lightning calls this hook after the strategy's teardown, so the run is over, and all hooks that may write weights have
        run. Lightning does not call it

        - after an error: :meth:`on_exception` has restored the level then;
        - for a callback that the strategy has attached: the strategy's teardown has detached the callback.
        """
        self._restore_level()
        self._intervals = None
        self._write_report(pl_module)
        for file in self._files:
            if file.is_file() and not file.stat().st_size:  # no batch was recorded, or no run ended
                file.unlink()

    def _restore_level(self) -> None:
        if self._level is not None:
            self._strategy.log.setLevel(self._level)
            self._level = None

    # ------------------------------------------------------------------ files

    @property
    def _files(self) -> list[Path]:
        """The files that this rank writes in this run."""
        return [file for file in (self._file, self._report if self._reports else None) if file is not None]

    def _write_report(self, module: pl.LightningModule) -> None:
        """Appends the report of a run that has ended. An error is only logged, as for a picture."""
        found, self._found = self._found, None
        if found is None or self._report is None:
            return
        try:
            with self._report.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found | {"weights": _digest(module)}) + "\n")
        except Exception:
            self._strategy.log.exception("Superpipeline: the report could not be written.")

    @property
    def _file(self) -> Path | None:
        """The picture that this rank draws in this run; None without one."""
        return self._plot if self._records else None

    def _stop_recording(self) -> None:
        """Stops recording, and adds the recorded intervals to the last batch. No-op before the first recorded batch."""
        if self._intervals is None:
            return
        device = self._strategy._computing_device  # a new device if the engine was built again in the meantime
        if device is not None and self._intervals in device.timelines:
            device.timelines.remove(self._intervals)
        # Intervals that had not ended when an earlier batch was stopped are added to the last recorded batch as well.
        self._batch += self._intervals.take()

    def _write_recording(self) -> None:
        """Stops recording, and draws the picture. An error is only logged.

        If the disk is full, for example, checkpoints must not be lost, and the error that ended a run must not be hidden.
        """
        self._stop_recording()
        try:
            if self._recorded:
                self._draw()
        except Exception:
            self._strategy.log.exception("Superpipeline: the picture could not be drawn.")

    def _draw(self) -> None:
        """Draws the last recorded batch, and then drops it."""
        plan, device = self._strategy.plan, self._strategy._computing_device
        title = f"Training batch {self._recorded}, k = {plan.k}, k' = {plan.k_prime}"
        if not plan.alone:
            title += f", rank 0 of {plan.ranks * plan.nodes}"
        assert self._file is not None
        assert device is not None
        draw_timeline(self._batch, device.layer_names, self._file, title)
        self._recorded, self._batch = 0, []


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


def _loss_in(outputs: Any) -> Tensor | None:
    """Returns the loss in what Lightning hands to callbacks after a training batch; None without a loss."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _digest(module: torch.nn.Module) -> str:
    """Returns the SHA-256 of the names, dtypes and bytes of all parameters and buffers, in the module's order."""
    digest = hashlib.sha256()
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        for part, tensor in parts(name, value.detach()):
            digest.update(f"{part} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _tokens_in(batch: Any) -> int | None:
    """Returns the number of tokens of a batch, which is the number of elements of its ``input_ids``; None without them."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return ids.numel() if isinstance(ids, Tensor) else None


def _checked_report(path: str | Path | None) -> Path | None:
    """Returns the path of ``report=``. Raises a ValueError for a folder."""
    if path is not None and Path(path).is_dir():
        raise ValueError(f"report={str(path)!r} is a folder; name a file in it.")
    return None if path is None else Path(path)


def _checked_picture(path: str | Path | None) -> Path | None:
    """Returns the path of ``plot=``. Raises a ValueError for a folder, or an extension that matplotlib cannot write."""
    if path is None:
        return None
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"plot={str(path)!r} is a folder; name a file in it.")
    if file.suffix[1:] not in (formats := supported_formats()):
        raise ValueError(f"plot={str(path)!r} must end in one of {sorted(formats)}. For example plot='run.png'.")
    return file
