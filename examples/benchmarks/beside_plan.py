"""Is what a run takes what its plan says? Peaks beside the plan, copies that computation hides, a window within a budget.

From the root of the repository, on a machine with a GPU, in a minute and a half::

    python -m examples.benchmarks.beside_plan --size 0.1B --tokens 8192 --length 1024 --out runs/benchmarks/

Beside the rows comes ``timeline.png``, a picture of one batch.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from examples.benchmarks import cli, foresight, rows
from examples.benchmarks.foresight import Watch
from examples.benchmarks.workloads import Workload
from sp_lightning import SuperpipelineCallback, SuperpipelineStrategy
from sp_lightning.core.device.timeline import Interval

ALL = 99
"""More layers than any of the models has."""
WINDOWS = ((ALL, 1), (2, 1), (1, 1))


def peaks(workload: Workload, seconds: float) -> Iterator[rows.Row]:
    """Each window's peak beside its plan's. What the largest takes beyond its plan are activations: no window adds any."""
    beyond: int | None = None
    losses: list[float] = []
    for k, k_prime in WINDOWS:
        watch, strategy = _trained(workload, seconds, k=k, k_prime=k_prime)
        planned, (counted, allocated) = strategy.plan.peak_device_bytes, _taken(strategy)
        if beyond is None:
            beyond = max(0, (allocated or counted) - planned)
        losses = losses or _losses(watch)
        both = list(zip(_losses(watch), losses, strict=False))
        yield {
            "what": "peak",
            "k": strategy.plan.k,
            "k_prime": k_prime,
            "planned_peak_bytes": planned,
            "counted_peak_bytes": counted,
            "peak_allocated_bytes": allocated,
            "within": (allocated or counted) <= planned + beyond + 64 * 2**20,
            "same_losses": all(mine == theirs for mine, theirs in both),
            "hidden_share": hidden_share(watch.intervals),
            "stats": vars(strategy.stats()),
        }


def hidden_share(intervals: Sequence[Interval]) -> float | None:
    """The share of the seconds of fetches in which a layer computes. None if nothing was fetched."""
    computing = sorted((each.begin, each.end) for each in intervals if each.kind in ("forward", "backward"))
    fetches = [each for each in intervals if each.kind == "fetch"]
    total = sum(each.end - each.begin for each in fetches)
    hidden = sum(
        max(0.0, min(fetch.end, end) - max(fetch.begin, begin)) for fetch in fetches for begin, end in computing
    )
    return hidden / total if total else None


def window(workload: Workload, seconds: float, budget: int) -> rows.Row:
    """The window that chooses itself, and whether it keeps to its budget."""
    _, strategy = _trained(workload, seconds, gpu_memory=budget)
    counted, allocated = _taken(strategy)
    return {
        "what": "window",
        "budget": budget,
        "k": strategy.plan.k,
        "k_prime": strategy.plan.k_prime,
        "counted_peak_bytes": counted,
        "peak_allocated_bytes": allocated,
        "within": (allocated or counted) <= budget,
    }


def timeline(workload: Workload, seconds: float, folder: Path) -> rows.Row:
    """A picture of one batch, if matplotlib is installed."""
    picture = folder / "timeline.png"
    try:
        callback = SuperpipelineCallback(plot=picture, every_n_steps=10**6)
    except ImportError as error:
        print(f"There is no picture: {error}", flush=True)
        return {"what": "timeline", "picture": False}
    _trained(workload, seconds, callbacks=[callback], k=2, k_prime=1)
    return {"what": "timeline", "picture": picture.is_file()}


def _trained(
    workload: Workload, seconds: float, *, callbacks: Sequence[pl.Callback] = (), **options: Any
) -> tuple[Watch, Any]:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    strategy = SuperpipelineStrategy(optimizer_overlap="off", callback=not callbacks, **options)
    return foresight.fit(workload, strategy, seconds, callbacks), strategy


def _taken(strategy: Any) -> tuple[int, int | None]:
    """What weights and gradients took by the strategy's own count, and everything by torch's; None on a CPU."""
    stats = strategy.stats()
    return stats.peak_device_bytes, stats.peak_allocated_bytes or None


def _losses(watch: Watch) -> list[float]:
    return [float(loss) for loss in watch.losses]


def measure(workload: Workload, seconds: float, folder: Path) -> Iterator[rows.Row]:
    """All of it, a row as soon as it is there. A window that is no part of its plan, or other losses, are failures."""
    taken = []
    for row in peaks(workload, seconds):
        taken.append(max(row["planned_peak_bytes"], row["peak_allocated_bytes"] or 0))
        yield row
    yield window(workload, seconds, (taken[0] + taken[-1]) // 2)
    yield timeline(workload, seconds, folder)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", default="tiny", help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="per step (%(default)s)")
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence (%(default)s)")
    parser.add_argument("--precision", default="bf16-mixed", help="(%(default)s)")
    parser.add_argument("--seconds", type=cli.positive, default=5, help="of measured steps, each time (%(default)s)")
    parser.add_argument(
        "--out", type=cli.rows_folder, default="runs/benchmarks", help="for rows and timeline (%(default)s)"
    )
    options = parser.parse_args(argv)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # losses of all windows are to be the same bits
    torch.use_deterministic_algorithms(True)  # with warn_only, attention's kernels are not deterministic
    workload = Workload("train", "llm", options.size, options.precision, options.tokens, options.length, steps=1000)
    file = options.out / "rows.jsonl"
    try:
        with cli.orderly(file):
            well = _run(workload, options.seconds, file)
    finally:
        torch.use_deterministic_algorithms(False)
    return 0 if well else 1


def _run(workload: Workload, seconds: float, file: Path) -> bool:
    well = True
    for row in measure(workload, seconds, file.parent):
        ok = row.get("within", True) and row.get("same_losses", True)
        well = well and ok
        status = {"kind": "beside-plan", "status": "ok" if ok else "failed", "workload": vars(workload)}
        error = {} if ok else {"error": f"{row['what']}: more memory than planned, or other losses"}
        rows.append(file, {**rows.origin(), **status, **error, **row})
        shown = {name: found for name, found in row.items() if name not in ("what", "stats")}
        print(f"{row['what']}: {status['status']}: {shown}", flush=True)
    return well


if __name__ == "__main__":
    raise SystemExit(main())
