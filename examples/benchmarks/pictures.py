"""The report's two pictures, drawn from rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

try:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator
except ImportError:  # a machine with a GPU may have none, and what it measures is worth more than its pictures
    matplotlib = None  # type: ignore[assignment]

from examples.benchmarks.rows import Row

GIB = 2**30
OURS, PLAIN = "#0b6e99", "#222222"
# Shape and colour of each rival, by the order in which they come.
RIVALS = (("s", "#c4632b"), ("D", "#7a4fa3"), ("v", "#3f8f4f"), ("^", "#b8860b"), ("P", "#b03060"), ("X", "#5f6b7a"))
CLEAR = 0.65  # of markers, so that one shows under another
CURVES = {
    "best possible": "-",
    "step under next forward": "--",
    "transfers overlapped": ":",
    "nothing overlapped": "-.",
}

# Where a label may be, in points from its marker; the first that has room, otherwise the one with most.
SIDES = ((0, 12), (0, -12), (18, 0), (-18, 0), (15, 10), (15, -10), (-15, 10), (-15, -10))
ROOM = 11

Limit = Callable[[Row, float], dict[str, float]]
Picture = tuple[Path, str]  # and its caption


def draw(groups: Sequence[Sequence[Row]], limit: Limit, folder: Path) -> list[Picture]:
    """Both pictures, or those that the rows are enough for; ``limit(row, tokens)`` gives seconds by schedule."""
    if matplotlib is None:
        return []
    done = [[row for row in group if row["status"] == "ok"] for group in groups]
    made = [
        memory(done, folder / "step-time-against-memory.png"),
        limits(done, limit, folder / "step-time-against-limit.png"),
    ]
    return [picture for picture in made if picture is not None]


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


def limits(groups: Sequence[Sequence[Row]], limit: Limit, path: Path) -> Picture | None:
    """Step time against tokens per step, with the limit model's curves, of the model that most rows are about."""
    models: dict[Any, list[Row]] = {}
    for row in (row for group in groups for row in group if row["kind"] == "train"):
        workload = row["workload"]
        if limit(row, workload["items"]):
            key = row["run"], workload["size"], workload["precision"], workload["checkpointing"]
            models.setdefault(key, []).append(row)
    found = max(models.values(), key=len, default=[])
    if not found:
        return None
    tokens = [row["workload"]["items"] for row in found]
    span = [min(tokens) / 4 * (16 * max(tokens) / min(tokens)) ** (step / 60) for step in range(61)]
    figure, axes = _canvas()
    for name, style in CURVES.items():
        seconds = [limit(found[0], each)[name] for each in span]
        axes.plot(span, seconds, style, color="#8a8a8a", label=f"limit: {name}")
    best = {each: min(rows, key=_seconds) for each in set(tokens) if (rows := _ours_at(found, each))}
    others = [row for row in found if not is_ours(row)]
    marks = {"superpipeline, fastest k:k'": ("o", OURS), **_marks(others)}
    for label, (shape, color) in marks.items():
        same = [row for row in others if row["label"] == label] or list(best.values())
        pairs = sorted((row["workload"]["items"], _seconds(row)) for row in same)
        if pairs:
            axes.plot(
                *zip(*pairs, strict=True), shape + "-", color=color, markersize=7, linewidth=1, alpha=CLEAR, label=label
            )
    axes.set(xscale="log", yscale="log", xlabel="tokens per step", ylabel="seconds per step")
    workload = found[0]["workload"]
    title = f"train llm {workload['size']}, {workload['precision']}"
    axes.set_title(title + (", checkpointing" if workload["checkpointing"] else ""))
    ticks = [2**power for power in range(math.ceil(math.log2(span[0])), math.floor(math.log2(span[-1])) + 1)]
    axes.set_xticks(ticks, [f"{each:,}" for each in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter("{x:g}")
    _legend(axes)
    return _save(figure, path), (
        f"Step time against tokens per step, beside the limit model: {_of(found[0], axes.get_title())}, "
        "the language model with most rows of training."
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


def _of(row: Row, workload: str = "") -> str:
    """Which workload and run, for a caption."""
    return f"{workload or row['workload']['name']} (run {row['run']})"


def _marks(others: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """Shape and colour by label; plain Lightning's are its own."""
    rivals = list(dict.fromkeys(row["label"] for row in others if row["contestant"] != "plain"))
    plain = {row["label"]: ("o", PLAIN) for row in others if row["contestant"] == "plain"}
    return plain | {label: RIVALS[number % len(RIVALS)] for number, label in enumerate(rivals)}


def _ours_at(found: Sequence[Row], tokens: int) -> list[Row]:
    return [row for row in found if is_ours(row) and row["workload"]["items"] == tokens]


def _points(group: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [_gib(row) for row in group], [_seconds(row) for row in group]


def _seconds(row: Row) -> float:
    return row["median_step_seconds"]


def _gib(row: Row) -> float:
    return row["peak_allocated_bytes"] / GIB


def is_ours(row: Row) -> bool:
    """Whether the row is this project's."""
    return row["contestant"].startswith("superpipeline")
