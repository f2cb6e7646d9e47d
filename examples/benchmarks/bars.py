"""Draws the picture of README: GPU memory and step time of each contestant, as bars.

``python -m examples.benchmarks.bars`` reads the rows of a run on a GPU and writes ``examples/results/2026-11-26-h100.png``.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from matplotlib import pyplot

from examples.benchmarks.pictures import GIB, OURS, PLAIN

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "examples/benchmarks/results/2026-11-26-h100"
PICTURE = ROOT / "examples/results/2026-11-26-h100.png"
RIVAL = "#c4632b"


class Bar(NamedTuple):
    """One contestant of a model: the folder of its rows, its name there, its label and colour."""

    folder: Path
    contestant: str
    label: str
    colour: str


BARS = {
    "Llama 1.5B, bf16-mixed": ("1.5B", [
        Bar(ROWS, "plain", "plain Lightning", PLAIN),
        Bar(ROWS, "superpipeline-2:1-backward", "superpipeline", OURS),
        Bar(ROWS / "before", "fsdp2", "FSDP2, CPU offload", RIVAL),
    ]),
    "Llama 8B, bf16-true": ("8B", [
        Bar(ROWS, "plain", "plain Lightning", PLAIN),
        Bar(ROWS, "superpipeline-2:1-backward", "superpipeline", OURS),
    ]),
}  # fmt: skip


def measured(bar: Bar, size: str) -> tuple[float, float]:
    """The GiB of GPU memory and the seconds of a step that were measured for a bar."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in (bar.folder / "rows.jsonl").read_text().splitlines()]
    (row,) = [
        each
        for each in rows
        if each.get("contestant") == bar.contestant and each["workload"]["size"] == size and each["status"] == "ok"
    ]
    return row["peak_allocated_bytes"] / GIB, median(row["step_seconds"])


def main() -> None:
    """Draws the picture."""
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 2.9), height_ratios=[3, 2], layout="constrained")
    for line, (model, (size, bars)) in zip(axes, BARS.items(), strict=True):
        found = [measured(bar, size) for bar in bars]
        for axis, values, unit in zip(line, zip(*found, strict=True), ("GiB", "s"), strict=True):
            drawn = axis.barh([bar.label for bar in bars], values, color=[bar.colour for bar in bars])
            axis.bar_label(drawn, [f"{value:.3g} {unit}" for value in values], padding=3, fontsize=8)
            axis.invert_yaxis()
            axis.margins(x=0.18)
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
        line[0].set_title(f"{model}: GPU memory", fontsize=9, loc="left")
        line[1].set_title(f"{model}: time of a step", fontsize=9, loc="left")
        line[1].set_yticklabels([])
    figure.savefig(PICTURE, dpi=150)


if __name__ == "__main__":
    main()
