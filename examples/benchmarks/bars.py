"""Draws the picture of README: GPU memory and step time of each contestant, as bars.

``python -m examples.benchmarks.bars`` reads the rows of a run on a GPU and writes ``examples/results/2026-11-26-h100.png``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import pyplot

from examples.benchmarks.pictures import GIB, OURS, PLAIN

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "examples/results/2026-11-26-h100"
PICTURE = ROOT / "examples/results/2026-11-26-h100.png"
RIVAL = "#c4632b"
TITLE = (
    "One NVIDIA H100 80GB, 2026-11-26, commit 075779b (FSDP2: another such machine, commit 9f2299d).\n"
    "AdamW, 4 × 4,096 tokens per step, gradient checkpointing, no gradient clipping."
)


class Bar(NamedTuple):
    """One contestant of a model: the folder of its rows, its name there, its label and colour."""

    folder: Path
    contestant: str
    label: str
    colour: str


BARS = {
    "Llama 1.5B, bf16-mixed": ("1.5B", [
        Bar(ROWS, "plain", "plain Lightning", PLAIN),
        Bar(ROWS, "superpipeline-2:1-backward", 'superpipeline, "backward"', OURS),
        Bar(ROWS, "superpipeline-2:1", 'superpipeline, "forward"', OURS),
        Bar(ROWS / "before", "fsdp2", "FSDP2, CPU offload\n(the rest in 16 bits)", RIVAL),
    ]),
    "Llama 8B, bf16-true": ("8B", [
        Bar(ROWS, "plain", "plain Lightning", PLAIN),
        Bar(ROWS, "superpipeline-2:1-backward", 'superpipeline, "backward"', OURS),
    ]),
}  # fmt: skip
"""FSDP2 keeps what lies between blocks in 16 bits, the others in 32."""


def measured(bar: Bar, size: str) -> tuple[float, float]:
    """The GiB of GPU memory and the seconds of a step that were measured for a bar."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in (bar.folder / "rows.jsonl").read_text().splitlines()]
    (row,) = [
        each
        for each in rows
        if each.get("contestant") == bar.contestant and each["workload"]["size"] == size and each["status"] == "ok"
    ]
    return row["peak_allocated_bytes"] / GIB, row["median_step_seconds"]


def main() -> None:
    """Draws the picture."""
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 3.9), height_ratios=[4, 2], layout="constrained")
    for line, (model, (size, bars)) in zip(axes, BARS.items(), strict=True):
        found = [measured(bar, size) for bar in bars]
        units = ("GPU memory, GiB", ".1f"), ("time of a step, seconds", ".3f")
        for axis, values, (unit, form) in zip(line, zip(*found, strict=True), units, strict=True):
            drawn = axis.barh([bar.label for bar in bars], values, color=[bar.colour for bar in bars])
            axis.bar_label(drawn, [f"{value:{form}}" for value in values], padding=3, fontsize=8)
            axis.invert_yaxis()
            axis.margins(x=0.18)
            axis.tick_params(labelsize=8)
            axis.set_xlabel(unit, fontsize=8)
            axis.spines[["top", "right"]].set_visible(False)
        line[0].set_title(model, fontsize=9, loc="left")
        line[1].set_yticklabels([])
    figure.suptitle(TITLE, fontsize=8, x=0.01, ha="left")
    figure.savefig(PICTURE, dpi=150)


if __name__ == "__main__":
    main()
