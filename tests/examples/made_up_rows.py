"""Rows of benchmarks that nobody has measured, and a row of a report."""

from __future__ import annotations

from typing import Any

from examples.benchmarks import (
    contest,
    report,
    rows,
)
from examples.benchmarks.workloads import Workload

# ---------------------------------------------------------------------- the report, from made-up rows

GIB = 2**30


def made_up(
    name: str, seconds: float = 0.0, gib: float = 0.0, *, device_gib: float | None = None, **more: Any
) -> rows.Row:
    """A row of a 3B model at 8192 tokens per step."""
    workload = Workload("train", "llm", "3B", "bf16-mixed", 8192, 4096)
    row = {**rows.origin(), **contest.describe(workload, name, contest.Limits(device_gib=device_gib))}
    if not seconds:
        return {**row, "status": "failed", "error": "OutOfMemoryError: no | room", **more}
    return {
        **row,
        "status": "ok",
        "step_seconds": [seconds, 0.9 * seconds, 1.2 * seconds],
        "median_step_seconds": seconds,
        "items_per_second": 8192 / seconds,
        "losses": [11.0, 10.5],
        "peak_allocated_bytes": gib * GIB,
        "peak_reserved_bytes": gib * GIB,
        "peak_host_bytes": 2 * GIB,
        "pinned_bytes": GIB,
        "optimizer_seconds": [0.3, 0.1, 0.2],
        "stats": [dict(zip(report.STALLS, (0.05, 0.01, 0.03, 0.04), strict=True))] if "superpipeline" in name else None,
        **more,
    }


def cells(text: str, label: str) -> list[str]:
    """The first table line about a contestant."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in line.strip("|").split(" | ")]
