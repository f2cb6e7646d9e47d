"""The benchmark of several devices: every way trains, memory is everybody's together, and the report tells both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.benchmarks import ranks, rows


@pytest.mark.long("processes that measure for seconds")
def test_ways_do_the_same_and_are_measured(tmp_path: Path) -> None:
    small = ["--ranks", "1", "2", "--steps", "2", "--width", "32", "--layers", "2", "--tokens", "8"]
    command = [sys.executable, "-m", ranks.__name__, *small, "--out", str(tmp_path / "rows.jsonl")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    found = rows.read(tmp_path / "rows.jsonl")
    assert {row["status"] for row in found} == {"ok"}
    of_two = {row["way"]: row for row in found if row["ranks"] == 2}
    assert set(of_two) == set(ranks.WAYS) - {"plain"}
    assert {row["way"] for row in found if row["ranks"] == 1} == {"plain", "superpipeline", "superpipeline-meta"}
    assert len({row["loss"] for row in of_two.values()}) == 1
    assert all(len(row["step_seconds"]) == 2 for row in found)


@pytest.mark.rest("takes tenths of a second")
def test_pages_that_processes_share_count_once() -> None:
    alone = ranks.pss([os.getpid()])
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        os.waitpid(child, os.WUNTRACED)
        together = ranks.pss([os.getpid(), child])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert together < 1.5 * alone
