"""Is the predicted step time the measured one? A batch is timed with one window, and every other window's predicted from it.

From the root of the repository::

    python -m examples.benchmarks.foresight --size 0.1B --tokens 256 --length 64 --windows 1:1 2:1 2:2 6:1 --seconds 8
"""

from __future__ import annotations

import argparse
import logging
import statistics
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from examples.benchmarks import cli, meter, rows
from examples.benchmarks.workloads import PRECISIONS, WARM_UP, Task, Workload, build_batches, build_net
from sp_lightning import SuperpipelineStrategy
from sp_lightning.capabilities.tuning.simulator import Walk
from sp_lightning.capabilities.tuning.visits import measured
from sp_lightning.core.device.timeline import Interval
from sp_lightning.trainer.user_hooks import WRITE_NO_WEIGHTS


class Watch(meter.Meter):
    """Also keeps the intervals of one batch, the first after warm-up, which is not counted."""

    def __init__(self, clock: meter.Clock) -> None:
        super().__init__(clock)
        self.intervals: list[Interval] = []
        self._batches = 0

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self._batches == WARM_UP:
            device = trainer.strategy._computing_device
            self._timeline = device.make_timeline()
            device.timelines.append(self._timeline)
        elif self._batches == WARM_UP + 1:
            trainer.strategy._computing_device.timelines.remove(self._timeline)
        self._batches += 1
        super().on_train_batch_start(trainer)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        super().on_train_end(trainer)
        self.intervals = self._timeline.take()


WRITE_NO_WEIGHTS.add(Watch)


def train(workload: Workload, k: int, k_prime: int, seconds: float) -> tuple[Watch, Any]:
    """One window, in this process."""
    strategy = SuperpipelineStrategy(k=k, k_prime=k_prime, optimizer_overlap="off", callback=True)
    return fit(workload, strategy, seconds), strategy


def fit(workload: Workload, strategy: Any, seconds: float, callbacks: Sequence[pl.Callback] = ()) -> Watch:
    """Trains in this process, for so many seconds."""
    pl.seed_everything(0, verbose=False)
    clock = meter.Clock(WARM_UP + 1, seconds)
    watch = Watch(clock)
    trainer = pl.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu", devices=1, max_epochs=1, callbacks=[watch, *callbacks],
        precision=workload.precision, logger=False, enable_checkpointing=False, enable_progress_bar=False,  # type: ignore[arg-type]
        enable_model_summary=False, strategy=strategy,
    )  # fmt: skip
    trainer.fit(Task(build_net(workload)), build_batches(workload, clock.is_over))
    return watch


def measure(workload: Workload, windows: Sequence[tuple[int, int]], seconds: float) -> Iterator[rows.Row]:
    """Time one window after the other, each with its row at once, and predict all of them from the first. Seconds."""
    known: Any = None
    for k, k_prime in windows:
        watch, strategy = train(workload, k, k_prime, seconds)
        if known is None:
            layers, update = len(strategy.plan.layers), statistics.median(watch.update_seconds[WARM_UP + 1 :])
            known = (*measured(watch.intervals, layers, synchronous=not torch.cuda.is_available()), update)
        visits, rates, update = known
        yield {
            "kind": "foresight", "status": "ok", "workload": vars(workload), "k": k, "k_prime": k_prime,
            "measured": statistics.median(watch.clock.step_seconds()),
            "predicted": Walk(strategy.plan, visits, rates).predict().seconds + update,
        }  # fmt: skip


def line(row: rows.Row) -> str:
    """A row on one line."""
    ratio = row["predicted"] / row["measured"]
    seconds = f"{row['measured']:.3f} s measured, {row['predicted']:.3f} s predicted, ratio {ratio:.2f}"
    return f"k = {row['k']}, k' = {row['k_prime']}: {seconds}"


def _window(text: str) -> tuple[int, int]:
    k, _, k_prime = text.partition(":")
    if not (k.isdecimal() and k_prime.isdecimal() and int(k) and int(k_prime)):
        raise argparse.ArgumentTypeError(f"{text!r} is no k:k', for example 2:1")
    return int(k), int(k_prime)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--family", choices=("llm", "vision", "vlm"), default="llm", help="(%(default)s)")
    parser.add_argument("--size", default="tiny", help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="or images per step (%(default)s)")
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence (%(default)s)")
    parser.add_argument("--precision", choices=PRECISIONS, default="32-true", help="(%(default)s)")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument(
        "--windows", type=_window, nargs="+", default=[(1, 1), (2, 1), (2, 2)], help="k:k' (1:1 2:1 2:2)"
    )
    parser.add_argument(
        "--seconds", type=cli.positive, default=5, help="of measured steps, for each window (%(default)s)"
    )
    parser.add_argument("--out", type=cli.rows_file, default="runs/benchmarks/rows.jsonl", help="(%(default)s)")
    options = parser.parse_args(argv)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        workload = Workload(
            "train", options.family, options.size, options.precision, options.tokens, options.length,
            checkpointing=options.gradient_checkpointing, steps=1000,
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    with cli.orderly(options.out):
        for row in measure(workload, options.windows, options.seconds):
            rows.append(options.out, {**rows.origin(), **row})
            print(line(row), flush=True)


if __name__ == "__main__":
    main()
