"""Draws pictures with matplotlib: the timeline of a batch by layer, and time against memory for a range of windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sp_lightning.core.device.timeline import LABELS, Interval, Kind, name_of

COLORS: dict[Kind, str] = {
    "fetch": "#0b6e99",
    "forward": "#3f8f4f",
    "backward": "#c4632b",
    "between": "#9aa3ab",
    "reduce": "#d1495b",
    "network": "#a11d33",
    "read": "#8d99ae",
    "write": "#5c677d",
    "drain": "#7a4fa3",
    "update": "#b8860b",
    "store": "#d4a5c9",
    "return": "#8fc1d4",
    "bring": "#6a8d73",
    "take": "#c9ada7",
}
# A layer has three lanes, so that intervals at the same time do not hide each other.
_LANE: dict[Kind, float] = {
    "fetch": -0.3, "return": -0.3, "forward": 0.0, "backward": 0.0, "between": 0.0, "reduce": 0.3,
    "network": 0.3, "drain": 0.3, "update": 0.3, "store": 0.3, "read": -0.3, "write": 0.3,
    "bring": -0.3, "take": 0.3,
}  # fmt: skip
_PARTS = (12, 100)
"""The fewest and the most parts into which a batch is divided. The right panel enlarges one part, about the time of a layer."""
_MOST_NAMES = 40
"""About the highest number of layers whose names are shown beside the axis."""


class DialPoint(NamedTuple):
    """Device memory (bytes) and time (seconds per batch) of one measured run, with the run's name."""

    name: str
    nbytes: float
    seconds: float


def require_matplotlib() -> Any:
    """Returns ``matplotlib.pyplot``, set to draw to files.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("Pictures need matplotlib: pip install matplotlib.") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def supported_formats() -> set[str]:
    """Returns the supported file name extensions, without the dot.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    return set(FigureCanvasBase.get_supported_filetypes())


def draw_timeline(intervals: Sequence[Interval], names: Sequence[str], path: Path, title: str) -> None:
    """Draws one batch: time to the right, layers downwards, a bar for each interval.

    Args:
        intervals: the intervals of the batch.
        names: the names of the layers; the resident parameters follow them.
        path: the PNG, PDF or SVG to write.
        title: the line above the picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = require_matplotlib()
    rows = sorted({each.layer for each in intervals if each.layer is not None})
    row_of: dict[int | None, int] = {layer: row for row, layer in enumerate(rows)}
    row_of[None] = len(rows)
    zero = min((each.begin for each in intervals), default=0.0)
    figure, (axes, near) = pyplot.subplots(
        1, 2, figsize=(14, min(16.0, 2.4 + 0.28 * len(row_of))), width_ratios=[2, 1], sharey=True, layout="constrained"
    )
    for kind, color in COLORS.items():
        bars = [each for each in intervals if each.kind == kind]
        for panel in (axes, near) if bars else ():
            panel.barh(
                [row_of[each.layer] + _LANE[kind] for each in bars],
                [1e3 * (each.end - each.begin) for each in bars],
                left=[1e3 * (each.begin - zero) for each in bars],
                height=0.3, color=color, edgecolor=color, linewidth=0.6, label=LABELS[kind],
            )  # fmt: skip
    begin, end = (1e3 * (each - zero) for each in _busiest(intervals))
    axes.axvspan(begin, end, color=COLORS["between"], alpha=0.25, linewidth=0, zorder=0)
    near.set_xlim(begin, end)
    near.set_title("the shaded part", fontsize=10)
    step = max(1, len(rows) // _MOST_NAMES)
    shown = [(row_of[layer], name_of(layer, names)) for layer in rows[::step]] + [(len(rows), "between layers")]
    axes.set_yticks([row for row, _ in shown], [name for _, name in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_title(title)
    for panel in (axes, near):
        panel.set_xlabel("milliseconds")
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(COLORS), loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _busiest(intervals: Sequence[Interval]) -> tuple[float, float]:
    """Returns the begin and end, in seconds, of the part of a batch with the longest copies. Enlarged, their thin bars show."""
    computed = ("forward", "backward", "between", "update", "read", "write")
    copies = [each for each in intervals if each.kind not in computed] or intervals
    first = min((each.begin for each in intervals), default=0.0)
    last = max((each.end for each in intervals), default=1.0)
    parts = min(max(_PARTS[0], len({each.layer for each in copies})), _PARTS[1])
    length = (last - first) / parts

    def copied(begin: float) -> float:
        return sum(max(0.0, min(each.end, begin + length) - max(each.begin, begin)) for each in copies)

    begin = max((first + part * length / 2 for part in range(2 * parts - 1)), key=copied)
    return begin, begin + length


def draw_measured(panels: Mapping[str, Sequence[DialPoint]], path: Path) -> None:
    """Draws measured seconds against device memory, a panel for each model, a named point for each run.

    Args:
        panels: the runs by the title of their panel. Runs of plain Lightning have names that begin with "plain".
        path: the PNG, PDF or SVG to write.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = require_matplotlib()
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(5 * columns, 3.6 * rows), layout="constrained", squeeze=False
    )
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, points) in zip(grid.flat, panels.items(), strict=False):
        for point in points:
            color = COLORS["backward" if point.name.startswith("plain") else "fetch"]
            axes.plot([point.nbytes / 2**20], [1e3 * point.seconds], "o", color=color)
            name = point.name.replace("k'=", "").replace("k=", "")
            at = point.nbytes / 2**20, 1e3 * point.seconds
            axes.annotate(name, at, (4, 4), textcoords="offset points", fontsize=8)
        axes.set(title=title, xlabel="GPU memory, MiB (beside each point: k, k')", ylabel="milliseconds per batch")
        axes.set_ylim(0, 1.15e3 * max((each.seconds for each in points), default=1))
        axes.set_xlim(0, 1.25 * max((each.nbytes for each in points), default=1) / 2**20)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
