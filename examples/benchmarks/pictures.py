"""Pictures that are drawn from rows: the report's, and README's bars (``python -m examples.benchmarks.pictures``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

try:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
except ImportError:  # a machine with a GPU may have none, and what it measures is worth more than its pictures
    matplotlib = None  # type: ignore[assignment]

from examples.benchmarks.rows import REPOSITORY, Row, read

GIB = 2**30
OURS, PLAIN = "#0b6e99", "#222222"
# Shape and colour of each rival, by the order in which they come.
RIVALS = (("s", "#c4632b"), ("D", "#7a4fa3"), ("v", "#3f8f4f"), ("^", "#b8860b"), ("P", "#b03060"), ("X", "#5f6b7a"))
CLEAR = 0.65  # of markers, so that one shows under another

# Where a label may be, in points from its marker; the first that has room, otherwise the one with most.
SIDES = ((0, 12), (0, -12), (18, 0), (-18, 0), (15, 10), (15, -10), (-15, 10), (-15, -10))
ROOM = 11

Picture = tuple[Path, str]  # and its caption


def draw(groups: Sequence[Sequence[Row]], folder: Path) -> Picture | None:
    """The report's picture, if the rows are enough for it."""
    if matplotlib is None:
        return None
    done = [[row for row in group if row["status"] == "ok"] for group in groups]
    return memory(done, folder / "step-time-against-memory.png")


def memory(groups: Sequence[Sequence[Row]], path: Path) -> Picture | None:
    """Step time against peak device memory of the training workload that most contestants finished."""
    measured = [[row for row in group if row["peak_allocated_bytes"] and row["kind"] == "train"] for group in groups]
    group = max(measured, key=len, default=[])
    if len(group) < 2:
        return None
    figure, axes = _canvas()
    ours = sorted((row for row in group if is_ours(row)), key=_gib)
    if ours:
        axes.plot(*_points(ours), "o-", color=OURS, markersize=7, alpha=CLEAR, label="superpipeline, k:k'")
    others = [row for row in group if not is_ours(row)]
    for label, (shape, color) in _marks(others).items():
        rest = [row for row in others if row["label"] == label]
        axes.plot(*_points(rest), shape, color=color, markersize=8, alpha=CLEAR, label=label)
    axes.set(xlabel="peak device memory, GiB", ylabel="seconds per step", title=group[0]["workload"]["name"])
    axes.set_xlim(0, max(map(_gib, group)) * 1.12)
    axes.set_ylim(0, max(map(_seconds, group)) * 1.12)
    _legend(axes)
    figure.draw_without_rendering()
    _annotate(axes, ours, others)
    return _save(figure, path), (
        f"Step time against peak device memory: {_of(group[0])}, the training workload that most contestants finished."
    )


def _canvas() -> tuple[Any, Any]:
    figure, axes = pyplot.subplots(figsize=(8.4, 4.8), dpi=150, layout="constrained")
    axes.grid(color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(axes: Any) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)
    return path


def _annotate(axes: Any, ours: Sequence[Row], others: Sequence[Row]) -> None:
    """k:k' at each of our points, clear of markers and labels where there is room."""
    points = [axes.transData.transform((_gib(row), _seconds(row))) * 72 / axes.figure.dpi for row in (*ours, *others)]

    def room(place: Any) -> float:  # a label is wider than high
        return min(ROOM, *(math.hypot((x - place[0]) / 1.6, y - place[1]) for x, y in points))

    style = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": 9, "color": OURS}
    for row, point in zip(ours, points[: len(ours)], strict=True):
        place = max((point + side for side in SIDES), key=room)
        points.append(place)
        axes.annotate(row["label"].split()[-1], (_gib(row), _seconds(row)), xytext=tuple(place - point), **style)


def _of(row: Row) -> str:
    """Which workload and run, for a caption."""
    return f"{row['workload']['name']} (run {row['run']})"


def _marks(others: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """Shape and colour by label; plain Lightning's are its own."""
    rivals = list(dict.fromkeys(row["label"] for row in others if row["contestant"] != "plain"))
    plain = {row["label"]: ("o", PLAIN) for row in others if row["contestant"] == "plain"}
    return plain | {label: RIVALS[number % len(RIVALS)] for number, label in enumerate(rivals)}


def _points(group: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [_gib(row) for row in group], [_seconds(row) for row in group]


def _seconds(row: Row) -> float:
    return row["median_step_seconds"]


def _gib(row: Row) -> float:
    return row["peak_allocated_bytes"] / GIB


def is_ours(row: Row) -> bool:
    """Whether the row is this project's."""
    return row["contestant"].startswith("superpipeline")


# ---------------------------------------------------------------------- README's picture

ROWS = REPOSITORY / "examples/results/2026-11-26-h100"
PICTURE = REPOSITORY / "examples/results/2026-11-26-h100.png"
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
    (row,) = [
        each
        for each in read(bar.folder / "rows.jsonl")
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
