"""Draws the losses of a fine-tuning run: superpipeline's as dots on plain Lightning's line.

``python -m examples.benchmarks.curves`` reads the metrics of both runs and writes ``examples/results/2026-11-27-loss-curve.svg``.
"""

from __future__ import annotations

import csv
from pathlib import Path

from matplotlib import pyplot

from examples.benchmarks.pictures import OURS, PLAIN

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "examples/results/2026-11-27-loss-curve"
PICTURE = ROOT / "examples/results/2026-11-27-loss-curve.svg"
CURVES = {"loss": ("training loss", "-"), "val_loss": ("validation loss", "--")}


def points(metrics: Path, name: str) -> tuple[list[int], list[float]]:
    """The optimizer steps at which Lightning's CSVLogger has a metric, and its values there."""
    with metrics.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row[name]]
    return [int(row["step"]) + 1 for row in rows], [float(row[name]) for row in rows]


def main() -> None:
    """Draws the picture."""
    # Letters stay text, which keeps the file small, and a second run writes the same file.
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "curves"})
    figure, axes = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    for name, (label, style) in CURVES.items():
        axes.plot(
            *points(ROWS / "plain.csv", name), style, color=PLAIN, linewidth=1.2, label=f"plain Lightning, {label}"
        )
    for name, marker in zip(CURVES, ("o", "s"), strict=True):
        ours = points(ROWS / "superpipeline.csv", name)
        axes.plot(*ours, marker, color=OURS, markersize=4.5, label=f"superpipeline, {CURVES[name][0]}")
    axes.set_xlabel("optimizer steps", fontsize=11)
    axes.set_ylabel("loss", fontsize=11)
    axes.grid(color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=11)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
