"""Measure everything in one command and write the report.

From the root of the repository::

    python -m examples.benchmarks                          # tiny models, on a CPU, about a minute
    python -m examples.benchmarks --list h200 --minutes 8
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from examples.benchmarks import agenda, cli, contest, report, rows
from examples.benchmarks.workloads import PRECISIONS, SIZES

# With less left of the budget than this many seconds, nothing is begun.
LEAST = 10.0
RESULTS = Path(__file__).with_name("results")
"""Rows that were measured before, by date and machine."""


class Budget:
    """Seconds that are left of a run."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        """Seconds; negative when the run is late."""
        return self._end - time.monotonic()


def run(plan: agenda.Agenda, budget: Budget, seconds: float, out: Path) -> None:
    """All items of the agenda, each with a row in the file; what no longer fits gets one that says so."""
    for item in plan:
        if isinstance(item, agenda.Module):
            _module(item, budget, out)
            continue
        if isinstance(item, agenda.Tests):
            _tests(item, budget, out)
            continue
        for name in item.contestants:
            limits = contest.Limits(seconds, min(item.time_out, budget.left()), item.device_gib)
            if budget.left() < LEAST:
                late = {**contest.describe(item.workload, name, limits), **_late()}
                rows.append(out, {**rows.origin(), **late})
                print(contest.line(late), flush=True)
            else:
                contest.hold(item.workload, [name], limits, out)


def _module(item: agenda.Module, budget: Budget, out: Path) -> None:
    """Run a module; where it does not come to its row, leave one that says why."""
    command = ["-m", f"examples.benchmarks.{item.name}", *item.arguments, "--out", str(out.absolute())]
    row, text = _ran(command, {}, item.time_out, budget)
    if row["status"] == "ok":
        print(text.strip(), flush=True)
        return
    rows.append(out, {**rows.origin(), "kind": item.name, **row})
    print(f"{item.name}: {row['status']}: {row['error']}", flush=True)


def _tests(item: agenda.Tests, budget: Budget, out: Path) -> None:
    """Run tests, none of which begins when their time is over, and leave a row with what they said last."""
    end = time.time() + min(item.time_out, budget.left()) - LEAST
    command = ["-m", "pytest", "-q", "-ra", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short", *item.arguments]
    row, text = _ran(command, {"GPU_TEST_END": str(end)}, item.time_out, budget)
    rows.append(out, {**rows.origin(), "kind": "gpu-tests", "name": item.name, "said": text[-3000:], **row})
    print(f"tests {item.name}: {row['status']}: {text.strip().splitlines()[-1:]}", flush=True)


def _ran(command: Sequence[str], environment: dict[str, str], time_out: float, budget: Budget) -> tuple[rows.Row, str]:
    """How a Python process ended, as a part of a row, and what it printed."""
    if budget.left() < LEAST:
        return _late(), ""
    environment = {**os.environ, rows.RUN: rows.run(), **environment}
    with tempfile.TemporaryFile() as log:
        code = contest.wait([sys.executable, *command], environment, log.fileno(), min(time_out, budget.left()))
        log.seek(0)
        text = log.read().decode(errors="replace")
    if code == 0:
        return {"status": "ok"}, text
    error = "took too long" if code is None else f"its process ended with {contest.how_it_ended(code)}"
    return {"status": "failed", "error": error, "traceback": text[-3000:]}, text


def _late() -> rows.Row:
    return {"status": "skipped", "error": "out of time: raise --minutes"}


def main(argv: Sequence[str] | None = None) -> list[rows.Row]:
    """Run; ``argv`` as on the command line. Returns the run's rows."""
    sizes = sorted({size for family in SIZES.values() for size in family})
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--size", choices=sizes, help="of the models (tiny)")
    add("--precision", choices=PRECISIONS, help="(bf16-mixed)")
    add("--list", choices=list(agenda.LISTS), help="a list with sizes of its own, in place of --size and --precision")
    add("--seconds", type=cli.positive, default=12, help="for a contestant's measured steps (%(default)s)")
    add(
        "--minutes",
        type=cli.positive,
        default=60,
        help="for everything; what does not fit is left out (%(default)s)",
    )
    add("--out", type=cli.rows_folder, default="runs/benchmarks", help="for rows and report (%(default)s)")
    options = parser.parse_args(argv)
    if options.list and (options.size or options.precision):
        parser.error("--list has its own sizes and precisions: leave out --size and --precision")
    size, precision = options.size or "tiny", options.precision or "bf16-mixed"
    plan = agenda.LISTS[options.list]() if options.list else agenda.of_size(size, precision)
    file = options.out / "rows.jsonl"
    if options.list == "next":
        known = [row for path in (*RESULTS.rglob("rows.jsonl"), file) if path.is_file() for row in rows.read(path)]
        plan = [item for item in plan if not agenda.is_done(item, known)]
    found: list[rows.Row] = []
    try:
        with cli.orderly(file):
            run(plan, Budget(options.minutes), options.seconds, file)
    finally:
        if file.is_file():
            found = rows.read(file)
            # Rows of an earlier run, of another commit perhaps, have tables of their own.
            print(f"Report: {report.write(found, options.out, mixed=True)}", flush=True)
    return [row for row in found if row["run"] == rows.run()]


if __name__ == "__main__":
    sys.exit(0 if contest.any_ok(main()) else 1)
