"""Pictures: a batch as it went over time, layer by layer, and what k costs and brings. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sp_lightning.timeline import Interval, Kind, name_of

COLORS: dict[Kind, str] = {
    "fetch": "#0b6e99",
    "forward": "#3f8f4f",
    "backward": "#c4632b",
    "between": "#9aa3ab",
    "drain": "#7a4fa3",
    "update": "#b8860b",
    "store": "#d4a5c9",
    "return": "#8fc1d4",
}
# A layer has three lanes, so that what happens at once does not hide each other.
_LANE: dict[Kind, float] = {
    "fetch": -0.3, "return": -0.3, "forward": 0.0, "backward": 0.0, "between": 0.0, "drain": 0.3, "update": 0.3,
    "store": 0.3,
}  # fmt: skip
# So many layers have their names beside the axis.
_MOST_NAMES = 40


def require_matplotlib() -> Any:
    """``matplotlib.pyplot``, drawing to files.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError('Pictures need matplotlib: pip install "sp_lightning[plot]".') from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def supported_formats() -> set[str]:
    """Endings of files that can be drawn to, without the dot.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    return set(FigureCanvasBase.get_supported_filetypes())


def draw_timeline(intervals: Sequence[Interval], names: Sequence[str], path: Path, title: str) -> None:
    """One batch: time to the right, layers downwards, a bar for each interval.

    Args:
        intervals: of the batch.
        names: of the layers; the residents follow them.
        path: of the PNG, PDF or SVG.
        title: above the picture.
    """
    pyplot = require_matplotlib()
    rows = sorted({each.layer for each in intervals if each.layer is not None})
    row_of: dict[int | None, int] = {layer: row for row, layer in enumerate(rows)}
    row_of[None] = len(rows)
    zero = min((each.begin for each in intervals), default=0.0)
    figure, axes = pyplot.subplots(figsize=(11, min(16.0, 2.0 + 0.28 * len(row_of))), layout="constrained")
    for kind, color in COLORS.items():
        bars = [each for each in intervals if each.kind == kind]
        if bars:
            axes.barh(
                [row_of[each.layer] + _LANE[kind] for each in bars],
                [1e3 * (each.end - each.begin) for each in bars],
                left=[1e3 * (each.begin - zero) for each in bars],
                height=0.3, color=color, label=kind,
            )  # fmt: skip
    step = max(1, len(rows) // _MOST_NAMES)
    shown = [(row_of[layer], name_of(layer, names)) for layer in rows[::step]] + [(len(rows), "between layers")]
    axes.set_yticks([row for row, _ in shown], [name for _, name in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=len(COLORS), loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_windows(points: Sequence[tuple[str, float, float]], limit: float | None, path: Path, title: str) -> None:
    """Predicted seconds against device memory, for a range of k and k'.

    Args:
        points: label (``"2:1"``), bytes on the device, seconds per batch.
        limit: bytes that the device has.
        path: of the PNG, PDF or SVG.
        title: above the picture.
    """
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    gib = [nbytes / 2**30 for _, nbytes, _ in points]
    axes.plot(gib, [seconds for *_, seconds in points], "o", color=COLORS["fetch"], alpha=0.7)
    for x, (label, _, seconds) in zip(gib, points, strict=True):
        above = label.endswith(":1")  # neighbours differ in k'
        offset, vertical = ((0, 7), "bottom") if above else ((0, -7), "top")
        axes.annotate(label, (x, seconds), offset, textcoords="offset points", ha="center", va=vertical, fontsize=8)
    if limit is not None:
        axes.axvline(limit / 2**30, color=COLORS["backward"], linestyle="--", label="device memory")
        axes.legend(frameon=False)
    axes.set_xlabel("device memory, GiB (k:k')")
    axes.set_ylabel("predicted seconds per batch")
    axes.set_ylim(0, 1.15 * max(seconds for *_, seconds in points))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
