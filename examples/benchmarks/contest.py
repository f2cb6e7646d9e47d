"""Train or predict one workload with several contestants, each in a fresh process: a row for each.

From the root of the repository::

    python -m examples.benchmarks.contest train --size tiny
    python -m examples.benchmarks.contest predict --size 7B --precision bf16-true
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from examples.benchmarks import contestants, rows, workloads
from examples.benchmarks.contestants import Contestant
from examples.benchmarks.workloads import Workload

GIB = 2**30
# Python, torch, the device's context.
PROCESS_BYTES = 2 * GIB
DEFAULT_PAIRS = ((2, 1), (4, 1), (4, 2), (8, 2), (8, 4))


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a contestant may take.

    Attributes:
        seconds: of measured steps.
        time_out: seconds of its process, set-up included.
        device_gib: GiB of device memory, None for all there is.
        host_gib: GiB of host memory, None for what is free.
    """

    seconds: float = 30.0
    time_out: float = 600.0
    device_gib: float | None = None
    host_gib: float | None = None


def hold(workload: Workload, names: Sequence[str], limits: Limits, out: Path) -> list[rows.Row]:
    """Run the contestants one after the other; each row is in the file before the next begins."""
    done = []
    for name in names:
        begun = time.monotonic()
        row = {**rows.origin(), **describe(workload, name, limits), **compete(workload, name, limits)}
        row["process_seconds"] = time.monotonic() - begun
        rows.append(out, row)
        print(line(row), flush=True)
        done.append(row)
    return done


def describe(workload: Workload, name: str, limits: Limits) -> rows.Row:
    """What a row says whatever comes out."""
    contestant = contestants.by_name(name)
    return {
        "kind": workload.task,
        "workload": {"name": workload.name, "unit": workload.unit, **dataclasses.asdict(workload)},
        "parameters": workloads.parameter_count(workload.family, workload.size),
        "contestant": contestant.name,
        "label": contestant.label,
        "limits": dataclasses.asdict(limits),
    }


def compete(workload: Workload, name: str, limits: Limits) -> rows.Row:
    """What one contestant came to."""
    contestant = contestants.by_name(name)
    return obstacle(workload, contestant, limits) or _run(workload, contestant, limits)


def obstacle(workload: Workload, contestant: Contestant, limits: Limits) -> rows.Row | None:
    """Why it need not even start, or None."""
    missing = [each for each in contestant.distributions if rows.installed(each) is None]
    if missing:
        return {"status": "missing", "error": f"not installed: {', '.join(missing)} (pip install {' '.join(missing)})"}
    if workload.task not in contestant.host_copies:
        return _skipped(f"{contestant.label} is no contestant for {workload.task}")
    if contestant.device == "cuda" and not torch.cuda.is_available():
        return _skipped(f"{contestant.label} needs a CUDA device, found none")
    if contestant.precisions and workload.precision not in contestant.precisions:
        return _skipped(f"{contestant.label} does {', '.join(contestant.precisions)}, not {workload.precision}")
    needed, found = host_bytes_needed(workload, contestant), rows.host_bytes_free()
    if limits.host_gib is not None:
        found = min(found, int(limits.host_gib * GIB))
    if needed > found:
        return _skipped(
            f"needs about {needed / GIB:.1f} GiB of host memory, found {found / GIB:.1f}: "
            "try --precision bf16-true or a smaller --size"
        )
    return None


def host_bytes_needed(workload: Workload, contestant: Contestant) -> int:
    """An estimate from above, in bytes: what the contestant keeps on the host and the process itself."""
    weights = workloads.parameter_count(workload.family, workload.size) * workload.weight_bytes
    return int(weights * contestant.host_copies[workload.task]) + PROCESS_BYTES


def _skipped(why: str) -> rows.Row:
    return {"status": "skipped", "error": why}


def _run(workload: Workload, contestant: Contestant, limits: Limits) -> rows.Row:
    """The child's row, or a row about the child."""
    job = {
        "workload": dataclasses.asdict(workload),
        "contestant": contestant.name,
        "seconds": limits.seconds,
        "device_gib": limits.device_gib,
    }
    with tempfile.TemporaryDirectory() as folder:
        row, log = Path(folder) / "row.json", Path(folder) / "log"
        command = [sys.executable, "-m", "examples.benchmarks.measure", "--row", str(row), "--job", json.dumps(job)]
        with log.open("wb") as file:
            code = wait(command, {**os.environ, **contestant.environment}, file.fileno(), limits.time_out)
        if row.is_file():
            return json.loads(row.read_text(encoding="utf-8"))
        ended = (
            f"took more than {limits.time_out:.0f} s"
            if code is None
            else f"its process ended with {how_it_ended(code)}"
        )
        return {"status": "failed", "error": ended, "traceback": log.read_text(errors="replace")[-3000:]}


def wait(command: Sequence[str], environment: dict[str, str], log: int, seconds: float) -> int | None:
    """Exit code, or None after a time-out. The child leads a session, so that what it started ends with it."""
    child = subprocess.Popen(
        command, cwd=rows.REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    killed = signal.Signals(-code).name
    return f"{killed}, as when memory runs out" if killed == "SIGKILL" else killed


def line(row: rows.Row) -> str:
    """A row on one line."""
    head = f"{row['workload']['name']}: {row['label']}"
    if row["status"] != "ok":
        return f"{head}: {row['status']}: {row['error'][:200]}"
    speed = f"{row['median_step_seconds']:.4g} s per step, {row['items_per_second']:,.0f} {row['workload']['unit']}/s"
    return f"{head}: {speed}, loss {row['losses'][-1]:.4f}"


# ---------------------------------------------------------------------- the command line


def main(argv: Sequence[str] | None = None) -> list[rows.Row]:
    """Run what the command line says."""
    parser = make_parser()
    options = parser.parse_args(argv)
    task = options.task
    if task == "predict" and options.gradient_checkpointing:
        parser.error("--gradient-checkpointing: found predict, which has no backward; expected train")
    try:
        pairs = [contestants.parse_pair(text) for text in options.k_and_k_prime]
        field = contestants.known(pairs)
        names = options.contestants or [name for name, each in field.items() if task in each.host_copies]
        names = [each for name in names for each in (_ours(pairs) if name == "superpipeline" else [name])]
        for name in names:
            contestants.by_name(name)
        workload = chosen(options)
    except ValueError as error:
        parser.error(str(error))
    limits = Limits(options.seconds, options.time_out, options.device_gib, options.host_gib)
    with rows.orderly(options.out):
        done = hold(workload, names, limits, options.out)
    print(f"Report: {rows.report_command(options.out)}", flush=True)
    return done


def any_ok(found: Sequence[rows.Row]) -> bool:
    """Whether anything was measured at all."""
    return any(row["status"] == "ok" for row in found)


def _ours(pairs: Sequence[tuple[int, int]]) -> list[str]:
    return [contestants.superpipeline(*pair).name for pair in pairs]


def chosen(options: argparse.Namespace) -> Workload:
    """The workload of the options."""
    tiny = options.size == "tiny"
    length = options.length or (64 if tiny else 4096)
    usual = {"vision": 8 if tiny else 64}.get(options.family, 2 * length)
    return Workload(
        options.task,
        options.family,
        options.size,
        options.precision,
        usual if options.tokens is None else options.tokens,
        length,
        options.gradient_checkpointing,
        options.steps,
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("task", choices=["train", "predict"])
    pairs = [f"{k}:{k_prime}" for k, k_prime in DEFAULT_PAIRS]
    add("--family", choices=list(workloads.SIZES), default="llm", help="(%(default)s)")
    add("--size", default="tiny", help=f"by family: {workloads.SIZES} (%(default)s)")
    add("--tokens", type=int, help="tokens per step, for vision images per step (default: two sequences, 64 images)")
    add("--precision", choices=workloads.PRECISIONS, default="bf16-mixed", help="(%(default)s)")
    add("--gradient-checkpointing", action="store_true", help="activations are computed again in backward; train only")
    add(
        "--contestants",
        nargs="+",
        help="by name; superpipeline stands for all its pairs, superpipeline-2:1-off for one optimizer_overlap (default: all)",
    )
    add("--k-and-k-prime", nargs="+", default=pairs, metavar="K:K'", help="superpipeline's pairs (%(default)s)")
    add("--length", type=int, help="tokens per sequence (64 for the size tiny, else 4096)")
    add("--steps", type=int, default=12, help="at most, two to warm up included (%(default)s)")
    add("--seconds", type=rows.positive, default=30, help="for a contestant's measured steps (%(default)s)")
    add("--time-out", type=rows.positive, default=600, help="seconds for a contestant's process (%(default)s)")
    add("--device-gib", type=rows.positive, help="device memory that a contestant may take, in GiB (default: all)")
    add("--host-gib", type=rows.positive, help="host memory that a contestant may take, in GiB (default: what is free)")
    add("--out", type=rows.rows_file, default="runs/benchmarks/rows.jsonl", help="rows are appended (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(0 if any_ok(main()) else 1)
