"""Is the predicted step time the measured one? A batch is timed with one window, and every other window's predicted from it.

From the root of the repository::

    python -m examples.benchmarks.foresight --size 0.1B --tokens 256 --length 64 --windows 1:1 2:1 2:2 6:1 --seconds 8
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch

from examples.benchmarks import cli, meter, rows
from examples.benchmarks.workloads import PRECISIONS, WARM_UP, Task, Workload, build_batches, build_net
from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.timeline import Interval, Kind
from sp_lightning.tools.planner.prediction.simulator import Walk
from sp_lightning.tools.planner.prediction.visits import RESOURCES, Rates, Visit
from sp_lightning.trainer.user_hooks import WRITE_NO_WEIGHTS


def measured(intervals: Iterable[Interval], layers: int, *, synchronous: bool) -> tuple[list[Visit], Rates]:
    """Reads the visits of one batch, and the speed of the machine, from its timeline.

    Args:
        intervals: the timeline, ordered by the begin of the intervals.
        layers: the number of layers of the plan. Layers with a higher index are uploaded on demand; their computation
            counts as computation between layers.
        synchronous: whether nothing else runs during a copy, as on the CPU.

    Returns:
        The visits and the rates. Host memory counts as unlimited, because a timeline does not contain it. The host's own
        time is part of the visits: the device waits for the host inside of them.
    """
    by_kind: defaultdict[Kind, list[Interval]] = defaultdict(list)
    visits: list[Visit] = []
    enclosing: list[tuple[float, int]] = []  # the enclosing calls: their end, and their index in visits
    for interval in intervals:
        by_kind[interval.kind].append(interval)
        if interval.kind in RESOURCES["compute"]:
            seconds = interval.end - interval.begin
            while enclosing and enclosing[-1][0] < interval.end:
                enclosing.pop()
            if enclosing:  # an expert inside its block: its time does not count for the block
                outer = enclosing[-1][1]
                visits[outer] = replace(visits[outer], seconds=visits[outer].seconds - seconds)
            enclosing.append((interval.end, len(visits)))
            used = () if interval.layer is None or interval.layer >= layers else (interval.layer,)
            visits.append(Visit(used, seconds, interval.kind == "backward", used))
    with_backward = {layer for visit in visits if visit.backward for layer in visit.layers}
    known = {layer for visit in visits for layer in visit.layers}
    # The backward of an embedding needs no weights, so the timeline contains only the copy of its gradients.
    for drain in by_kind["drain"]:
        if drain.layer in known and drain.layer not in with_backward and drain.layer is not None:
            visits.append(Visit((drain.layer,), 0.0, backward=True))
            with_backward.add(drain.layer)
    upload, download, update = (_rate(by_kind, RESOURCES[kind]) for kind in ("fetch", "drain", "optimizer"))
    return visits, Rates(upload, download, update, math.inf, visit_seconds=0.0, synchronous=synchronous)


def _rate(by_kind: Mapping[Kind, Sequence[Interval]], kinds: Sequence[Kind]) -> float:
    """Bytes per second in intervals of these kinds; infinite if no bytes were copied."""
    seconds = sum(copy.end - copy.begin for kind in kinds for copy in by_kind[kind])
    nbytes = sum(copy.nbytes for kind in kinds for copy in by_kind[kind])
    return nbytes / seconds if nbytes and seconds else math.inf


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
