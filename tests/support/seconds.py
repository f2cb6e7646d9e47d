"""Tests that take long run a tier later. Which do is in ``tests/seconds.txt``; after a run with ``--durations=0`` make it anew::

python -m pytest -m "not long" --durations=0 > log.txt; python -m tests.support.seconds log.txt
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "seconds.txt"
LATER = {"": {"rest": 0.1, "long": 1.0}, "rest": {"long": 0.5}}
"""By the tier of a test (its mark): the later tiers, and from how many seconds on it runs in each."""
STAY = (
    "test_gpu_script.py::test_what_has_run",
    "test_gpu_script.py::test_tests_on_the_list",
    "test_fuzz.py::",
    "test_deletion.py::test_the_core_works_without[capabilities.kernels]",
)
"""These stay in their tier: a dry run of the GPU script, the fuzz test, which the gate runs again, and one deletion test."""
_HEAD = "# Seconds of tests that run a tier later than their marks say: tests/support/seconds.py\n"


def measured() -> dict[str, float]:
    """The seconds of the tests in the file, by their ids."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    pairs = (line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(seconds) for seconds, name in pairs}


gone: list[str] = []
"""Tests in the file that this run has not found. A test fails if there are any."""


def move_down(items: Sequence[pytest.Item], *, whole: bool) -> None:
    """Marks slow tests, and notes tests of the file that do not exist.

    Args:
        items: the collected tests.
        whole: True if all tests of their files were collected.
    """
    seconds, seen = measured(), set[str]()
    for item in items:
        if (took := seconds.get(item.nodeid)) is not None:
            seen.add(item.nodeid)
            tier = "long" if item.get_closest_marker("long") else "rest" if item.get_closest_marker("rest") else ""
            later = [mark for mark, least in LATER.get(tier, {}).items() if took >= least]
            if later:
                item.add_marker(getattr(pytest.mark, later[-1])(f"takes {took:g} seconds"))
    collected = {item.nodeid.split("::")[0] for item in items}
    missing = ((name, name.split("::")[0]) for name in seconds.keys() - seen)
    gone[:] = sorted(name for name, file in missing if (whole and file in collected) or not (ROOT / file).exists())


def read(logs: Iterable[str], tiers: Mapping[str, str], before: Mapping[str, float]) -> dict[str, float]:
    """The tests in the logs of runs that take so long that they move, with their seconds.

    Args:
        logs: what pytest has printed with ``--durations=0``.
        tiers: the tests' tiers by their own marks.
        before: the file so far. It keeps its seconds of tests that no log has: those of a later tier did not run.
    """
    found = defaultdict[str, float](float)
    for log in logs:
        for seconds, name in re.findall(r"^([\d.]+)s (?:call|setup|teardown) +(\S.*)$", log, re.MULTILINE):
            found[name] += float(seconds)
    for name in tiers.keys() & before.keys() - found.keys():
        found[name] = before[name]

    def moves(name: str) -> bool:
        least = min(LATER.get(tiers.get(name, "long"), {}).values(), default=float("inf"))
        return found[name] >= least and not any(stays in name for stays in STAY)

    return {name: found[name] for name in sorted(found) if moves(name)}


def main(logs: Sequence[str]) -> None:
    """Writes the file."""
    tiers: dict[str, str] = {}

    class Collected:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            for item in session.items:
                own = [mark.name for mark in item.iter_markers() if mark.name in ("rest", "long")]
                moved = [
                    mark.args[0].startswith("takes ") for mark in item.iter_markers() if mark.name in ("rest", "long")
                ]
                kept = [name for name, later in zip(own, moved, strict=True) if not later]
                tiers[item.nodeid] = "long" if "long" in kept else "rest" if "rest" in kept else ""

    pytest.main(["--collect-only", "-q", "-q", "-n", "0", "-m", ""], plugins=[Collected()])
    found = read([Path(log).read_text(encoding="utf-8") for log in logs], tiers, measured())
    FILE.write_text(_HEAD + "".join(f"{seconds:.2f} {name}\n" for name, seconds in found.items()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
