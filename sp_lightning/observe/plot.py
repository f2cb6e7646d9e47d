"""Draws pictures with matplotlib: the timeline of a batch by layer, and time against memory for a range of windows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sp_lightning.device.timeline import LABELS, Interval, Kind, name_of
from sp_lightning.plan.units import human_bytes

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
_FEWEST_MARKS = 4
_MOST_MARKS = 12
"""The fewest numbers on a logarithmic axis, and about the highest number of them."""
_MOST_NAMES = 40
"""About the highest number of layers whose names are shown beside the axis."""


class Point(NamedTuple):
    """Device memory (bytes) and time (seconds per batch) of one choice of k and k'."""

    k: int
    k_prime: int
    nbytes: float
    seconds: float

    @property
    def gib(self) -> float:
        """The device memory in GiB, the unit of the axis."""
        return self.nbytes / 2**30


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


def draw_windows(points: Sequence[Point], limit: float | None, path: Path, title: str) -> None:
    """Draws predicted seconds against device memory, for a range of k and k'.

    Args:
        points: the choices of k and k'. The choices with the same k' are joined by a line.
        limit: bytes of device memory; None for no limit.
        path: the PNG, PDF or SVG to write.
        title: the line above the picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    series = sorted({each.k_prime for each in points})
    for k_prime, color in zip(series, [*COLORS.values()] * len(series), strict=False):
        mine = [each for each in points if each.k_prime == k_prime]
        axes.plot(
            [p.gib for p in mine], [p.seconds for p in mine], "o-", color=color, alpha=0.7, label=f"k' = {k_prime}"
        )
        for point in mine:
            # Of the points with one k, only the highest has its number above it, so that fewer numbers overlap.
            highest = max((p for p in points if p.k == point.k), key=lambda p: (p.seconds, p.k_prime))
            offset, vertical = ((0, 6), "bottom") if point is highest else ((0, -6), "top")
            axes.annotate(
                str(point.k), (point.gib, point.seconds), offset, textcoords="offset points", ha="center", va=vertical,
                fontsize=8, color=color,
            )  # fmt: skip
    if limit is not None:
        axes.axvline(limit / 2**30, color=COLORS["backward"], linestyle="--", label=f"{human_bytes(limit)} available")
    axes.legend(frameon=False, title="beside each point: k", title_fontsize=8)
    axes.set_xlabel("GPU memory, GiB")
    axes.set_ylabel("predicted seconds per batch")
    axes.set_ylim(0, 1.15 * max(each.seconds for each in points))
    _mark_sizes(axes)
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.canvas.draw()  # first: only after it texts have their final extents
    _keep_readable(axes.texts)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


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


def _keep_readable(texts: Iterable[Any]) -> None:
    """Removes each text that overlaps an earlier one."""
    shown: list[Any] = []
    for text in list(texts):
        extent = text.get_window_extent()
        if any(extent.overlaps(each) for each in shown):
            text.remove()
        else:
            shown.append(extent)


def _mark_sizes(axes: Any) -> None:
    """Makes the memory axis logarithmic if it then has enough numbers to be read."""
    low, high = axes.get_xlim()
    marks = [each * 2.0**power for power in range(-30, 20) for each in (1, 1.5)]
    marks = [each for each in marks if max(low, 0) <= each <= high]
    if len(marks) >= _FEWEST_MARKS:
        axes.set_xscale("log", base=2)
        axes.set_xticks(marks[:: 1 + len(marks) // _MOST_MARKS], minor=False)
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter("{x:g}")
