"""The benchmark of a disk: its options reach the measurement."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks import disk


def test_options_reach_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ended with an AttributeError before it measured anything: an option had a new name in one place only."""
    measured: list[dict[str, Any]] = []
    monkeypatch.setattr(disk, "_training", lambda base, out: measured.append(base))
    options = ["--folder", str(tmp_path), "--parts", "train", "--optimizer-overlap", "forward"]
    monkeypatch.setattr(sys, "argv", ["disk", *options])
    disk.main()
    assert [base["overlap"] for base in measured] == ["forward"]
