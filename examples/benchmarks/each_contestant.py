"""Run each contestant of the list ``now`` once, with tiny models: whether it works. One row for each; the figures say nothing.

All run in this process, because starting one takes longer than training a tiny model. From the root of the repository::

    python -m examples.benchmarks.each_contestant
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from examples.benchmarks import agenda, contest, contestants, measure, rows
from examples.benchmarks.workloads import Workload

Pair = tuple[Workload, str]

SECONDS = 0.01
"""Of measured steps. There are three steps at least."""


def pairs() -> list[Pair]:
    """Each contestant by its name, once for each task and family of models in which it competes, with a tiny workload."""
    found: dict[tuple[str, str, str], Pair] = {}
    for item in agenda.now():
        if isinstance(item, agenda.Contest):
            tiny = replace(item.workload, size="tiny", precision="bf16-mixed", items=32, length=32, steps=3)
            for name in item.contestants:
                found.setdefault((tiny.task, tiny.family, name), (tiny, name))
    # FSDP2 starts a process group, which stays, and which strategies of others would find.
    return sorted(found.values(), key=lambda pair: pair[1].startswith("fsdp"))


def run(workload: Workload, name: str) -> rows.Row:
    """Returns a contestant's row: its measurements, or the reason why it cannot run here."""
    contestant = contestants.by_name(name)
    return contest.obstacle(workload, contestant, contest.Limits()) or measure.measure(
        workload, contestant, seconds=SECONDS
    )


def works(row: rows.Row) -> bool:
    """Returns False if a contestant has failed. A missing package or GPU does not count as a failure."""
    return row["status"] in ("ok", "missing") or "needs a CUDA device" in row["error"]


def main(argv: Sequence[str] | None = None) -> bool:
    """Runs the command with the arguments ``argv``. Returns True if all contestants work."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=rows.rows_file, default="runs/benchmarks/rows.jsonl", help="(%(default)s)")
    options = parser.parse_args(argv)
    all_work = True
    with rows.orderly(options.out):
        for workload, name in pairs():
            try:
                row = run(workload, name)
            except Exception as error:  # the others are still of interest
                row = measure.failure(error)
            all_work = all_work and works(row)
            row = {**rows.origin(), **contest.describe(workload, name, contest.Limits()), **row}
            rows.append(options.out, row)
            print(contest.line(row), flush=True)
    return all_work


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
