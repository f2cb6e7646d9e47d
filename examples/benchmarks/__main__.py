"""Measure everything in one command and write the report.

From the root of the repository::

    python -m examples.benchmarks                          # tiny models, on a CPU, about a minute
    python -m examples.benchmarks --list now --dry-run
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from examples.benchmarks import agenda, contest, report, rows
from examples.benchmarks.workloads import PRECISIONS, SIZES
from sp_lightning.core.messages import about_gpu
from sp_lightning.core.plan.window import about_others

RESULTS = rows.REPOSITORY / "examples" / "results"
"""Folders of rows that were measured before, by date and machine."""
# Tests keep what has passed when their time is over, so they are begun with at least so many seconds.
LEAST_FOR_TESTS = 45.0
PROCESSES = 12
CLOSING = 10.0  # no test begins with less; the last one has to end
FIRST_CALL = 540.0  # seconds of the first call at most, with the machine's start
OF_OTHERS = 0.1  # share of the GPU's memory that other programs may hold
MACHINE = 75.0  # seconds in which a machine with a GPU starts and imports torch: a guess


class Budget:
    """Seconds that are left of a run."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        """Seconds; negative when the run is late."""
        return self._end - time.monotonic()


def run(plan: agenda.Agenda, budget: Budget, seconds: float, out: Path, known: Sequence[rows.Row] = ()) -> None:
    """All items of the agenda, each with a row in the file when it ends, also one that no longer fits.

    Args:
        seconds: of a contestant's measured steps.
        known: rows of earlier runs, which tell how long an item takes, and which tests have passed.
    """
    here = agenda.on_accelerator(known)
    for item in plan:
        begun, left, expected = time.monotonic(), budget.left(), agenda.expected(item, here)
        if isinstance(item, agenda.Contest):
            ended = _contest(item, budget, seconds, out, here)
        elif left < (min(expected, LEAST_FOR_TESTS) if isinstance(item, agenda.Tests) else expected):
            ended = late(expected, left)
        elif isinstance(item, agenda.Tests):
            ended = _tests(item, left, known)
        else:
            ended = _module(item, expected, left, out)
        taken = time.monotonic() - begun
        row = {"kind": "item", "item": item.name, "digest": rows.digest(agenda.paths(item)), "seconds": taken, **ended}
        rows.append(out, {**rows.origin(), **row})
        print(f"== {item.name}: {row['status']}, {taken:.0f} s. {row.get('error', '')}", flush=True)


def _contest(item: agenda.Contest, budget: Budget, seconds: float, out: Path, known: Sequence[rows.Row]) -> rows.Row:
    """Let the contestants that fit run, each with a row of its own."""
    lacking = {}
    for name in item.contestants:
        expected, left = agenda.expected_of(item, name, known), budget.left()
        if left < expected:
            lacking[name] = late(expected, left)["error"]
            continue
        limits = contest.Limits(seconds, min(limit(expected), left), item.device_gib)
        (row,) = contest.hold(item.workload, [name], limits, out)
        if row["status"] not in ("ok", "missing"):
            lacking[name] = row["error"]
    if not lacking:
        return {"status": "ok"}
    ran = len(lacking) < len(item.contestants)
    return {
        "status": "failed" if ran else "skipped",
        "error": "; ".join(f"{name}: {why}" for name, why in lacking.items()),
    }


def _module(item: agenda.Module, expected: float, left: float, out: Path) -> rows.Row:
    """Run a module, and keep the end of what it says."""
    folder = ["--out", f"{out.parent.absolute()}/"] if item.writes else []
    arguments = [each.format(out=out.parent) for each in item.arguments]
    ended, text = _ran(["-m", item.module, *arguments, *folder], {}, min(limit(expected), left))
    print(text.strip(), flush=True)
    return {**ended, "said": text[-3000:]}


def _tests(item: agenda.Tests, left: float, known: Sequence[rows.Row]) -> rows.Row:
    """Run the tests that have not passed yet, none of which begins when their time is over, and keep which have passed."""
    missing = [each for each in item.needs if rows.installed(each) is None]
    if missing and len(missing) == len(item.needs):
        return {"status": "missing", "error": f"not installed: {', '.join(missing)}. Put their wheels into wheels/."}
    before = agenda.passed_before(item, known)
    number = str(min(PROCESSES, len(os.sched_getaffinity(0))))
    processes = ["-n", number, "--dist=worksteal", "-p", "no:benchmark"] if rows.installed("pytest-xdist") else []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "passed").write_text("\n".join(before))
        environment = {"OMP_NUM_THREADS": "1", "GPU_TEST_THREADS": "1"}
        environment |= {"GPU_TEST_FOLDER": folder, "GPU_TEST_END": str(time.time() + left - CLOSING)}
        command = [
            "-m",
            "pytest",
            "-q",
            "-ra",
            "-o",
            "addopts=",
            "-m",
            "not long",
            "-p",
            "no:cacheprovider",
            "--tb=short",
        ]
        tests = [f"tests/gpu/{each}" for each in item.tests]
        ended, text = _ran([*command, *processes, *tests], environment, left, fine=(0, 5))  # 5: all were left out
        results = Path(folder, "results")
        outcomes = dict(json.loads(line) for line in results.read_text().splitlines()) if results.is_file() else {}
    print(text.strip(), flush=True)
    by_file = defaultdict[str, list[str]](list)
    for test, outcome in outcomes.items():
        if outcome == "passed":
            by_file[Path(test.partition("::")[0]).name].append(test)
    present = agenda.digests(item)
    over = [test for test, outcome in outcomes.items() if outcome == "late"]
    if over and ended["status"] == "ok":
        ended = {"status": "skipped", "error": f"the time was over: {len(over)} tests have not run"}
    counts = {"tests": dict(Counter(outcomes.values())), "left_out": len(before), "missing": missing}
    passed = {name: (present[name], tests) for name, tests in by_file.items()}
    return {**ended, "passed": passed, **counts, "said": text[-3000:]}


def _ran(
    command: Sequence[str], environment: dict[str, str], time_out: float, fine: Sequence[int] = (0,)
) -> tuple[rows.Row, str]:
    """How a Python process ended, as a part of a row, and what it printed."""
    environment = {**os.environ, rows.RUN: rows.run(), **environment}
    with tempfile.TemporaryFile() as log:
        code = contest.wait([sys.executable, *command], environment, log.fileno(), time_out)
        log.seek(0)
        text = log.read().decode(errors="replace")
    if code in fine:
        return {"status": "ok"}, text
    error = "took too long" if code is None else f"its process ended with {contest.how_it_ended(code)}"
    return {"status": "failed", "error": error}, text


def limit(expected: float) -> float:
    """Seconds after which something hangs."""
    return 2 * expected + 30


def late(expected: float, left: float) -> rows.Row:
    return {
        "status": "skipped",
        "error": f"needs about {expected:.0f} s, {max(left, 0):.0f} s are left: raise --minutes",
    }


def dry_run(plan: agenda.Agenda, first: agenda.Agenda, known: Sequence[rows.Row]) -> bool:
    """Print the order and expected seconds. Returns whether the first call fits."""
    here, at, of_first = agenda.on_accelerator(known), MACHINE, 0.0
    print(f"{'ends at':>7}  {'takes':>5}  item\n{at:7.0f}  {at:5.0f}  the machine's start (a guess)")
    for item in plan:
        done = agenda.is_done(item, known)
        taken = 0.0 if done else agenda.expected(item, here)
        at += taken
        print(f"{at:7.0f}  {taken:5.0f}  {item.name}{' (done)' if done else ''}")
        if item == first[-1]:
            of_first = at
            print(f"------- the first call ends here, after {at:.0f} s of at most {FIRST_CALL:.0f}")
    return of_first <= FIRST_CALL


def obstacle() -> str | None:
    """Why nothing can be measured on this machine's GPU, and the next step; None if it can."""
    try:
        torch.cuda.init()
        free, total = torch.cuda.mem_get_info()
    except (AssertionError, RuntimeError) as error:  # torch was built without CUDA: the first of them
        return f"No GPU can be used: {str(error).splitlines()[0]}\n{about_gpu(error)}"
    if total - free > OF_OTHERS * total:
        return about_others(total - free, total)
    return None


def main(argv: Sequence[str] | None = None) -> list[rows.Row]:
    """Run; ``argv`` as on the command line. Returns the run's rows."""
    sizes = sorted({size for family in SIZES.values() for size in family})
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--size", choices=sizes, help="of the models (tiny)")
    add("--precision", choices=PRECISIONS, help="(bf16-mixed)")
    add("--list", choices=list(agenda.LISTS), help="a list with sizes of its own, in place of --size and --precision")
    add("--seconds", type=rows.positive, default=12, help="for a contestant's measured steps (%(default)s)")
    add(
        "--minutes",
        type=rows.positive,
        default=60,
        help="for everything; what does not fit is left out (%(default)s)",
    )
    add("--dry-run", action="store_true", help="of the list now, print order and expected seconds, and run nothing")
    add("--out", type=rows.rows_folder, default="runs/benchmarks", help="for rows and report (%(default)s)")
    options = parser.parse_args(argv)
    if options.list and (options.size or options.precision):
        parser.error("--list has its own sizes and precisions: leave out --size and --precision")
    size, precision = options.size or "tiny", options.precision or "bf16-mixed"
    plan = agenda.LISTS[options.list]() if options.list else agenda.of_size(size, precision)
    file = options.out / "rows.jsonl"
    known = [row for path in (*RESULTS.rglob("rows.jsonl"), file) if path.is_file() for row in rows.read(path)]
    if options.list == "now":
        if options.dry_run:
            parser.exit(0 if dry_run(plan, agenda.first_call(), known) else 1)
        if why := obstacle():
            parser.exit(1, f"{why}\n")
        plan = [item for item in plan if not agenda.is_done(item, known)]
    found: list[rows.Row] = []
    try:
        with rows.orderly(file):
            run(plan, Budget(options.minutes), options.seconds, file, known)
    finally:
        if file.is_file():
            found = rows.read(file)
            # Rows of an earlier run, of another commit perhaps, have tables of their own.
            print(f"Report: {report.write(found, options.out, mixed=True)}", flush=True)
    return [row for row in found if row["run"] == rows.run()]


if __name__ == "__main__":
    sys.exit(0 if contest.any_ok(main()) else 1)
