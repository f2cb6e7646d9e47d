"""The report's two pictures, drawn from rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot  # noqa: E402

from examples.benchmarks.rows import Row  # noqa: E402

GIB = 2**30
OURS, PLAIN, RIVAL = "#0b6e99", "#222222", "#c4632b"
# Rivals whose points fall together are told apart by shape as well.
SHAPES = "sDv^P*X"
CURVES = {"best possible": "-", "step under next forward": "--", "transfers overlapped": ":", "nothing overlapped": "-."}

Limit = Callable[[Row, float], dict[str, float]]


def draw(groups: Sequence[Sequence[Row]], limit: Limit, folder: Path) -> list[Path]:
    """Both pictures, or those that the rows are enough for; ``limit(row, tokens)`` gives seconds by schedule."""
    done = [[row for row in group if row["status"] == "ok"] for group in groups]
    made = [memory(done, folder / "step-time-against-memory.png"), limits(done, limit, folder / "step-time-against-limit.png")]
    return [path for path in made if path is not None]


def memory(groups: Sequence[Sequence[Row]], path: Path) -> Path | None:
    """Step time against peak device memory of the training workload that most contestants finished."""
    measured = [[row for row in group if row["peak_allocated_bytes"] and row["kind"] == "train"] for group in groups]
    group = max(measured, key=len, default=[])
    if len(group) < 2:
        return None
    figure, axes = _canvas()
    ours = sorted((row for row in group if _is_ours(row)), key=_gib)
    axes.plot(*_points(ours), "o-", color=OURS, markersize=7, label="superpipeline, k:k'")
    for row in ours:
        _annotate(axes, row, row["label"].split()[-1], OURS)
    shapes = iter(SHAPES * len(group))
    for row in group:
        if not _is_ours(row):
            color, shape = (PLAIN, "o") if row["contestant"] == "plain" else (RIVAL, next(shapes))
            axes.plot(*_points([row]), shape, color=color, markersize=8, label=row["label"])
    axes.set(xlabel="peak device memory, GiB", ylabel="seconds per step", title=group[0]["workload"]["name"])
    axes.set_xlim(0, max(map(_gib, group)) * 1.12)
    axes.set_ylim(0, max(row["median_step_seconds"] for row in group) * 1.12)
    return _save(figure, axes, path)


def limits(groups: Sequence[Sequence[Row]], limit: Limit, path: Path) -> Path | None:
    """Step time against tokens per step, with the limit model's curves, of the model that most rows are about."""
    models: dict[Any, list[Row]] = {}
    for row in (row for group in groups for row in group if row["kind"] == "train"):
        workload = row["workload"]
        if limit(row, workload["items"]):
            key = workload["size"], workload["precision"], workload["checkpointing"]
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
    shapes = iter(SHAPES * len(found))
    for label in dict.fromkeys(row["label"] for row in found):
        same = sorted((row for row in found if row["label"] == label), key=lambda row: row["workload"]["items"])
        color, shape = (OURS, "o") if _is_ours(same[0]) else (PLAIN, "o") if label.startswith("plain") else (RIVAL, next(shapes))
        x, y = [row["workload"]["items"] for row in same], [row["median_step_seconds"] for row in same]
        axes.plot(x, y, shape + "-", color=color, markersize=7, linewidth=1, label=label)
    workload = found[0]["workload"]
    kept = ", checkpointing" if workload["checkpointing"] else ""
    axes.set(xscale="log", yscale="log", xlabel="tokens per step", ylabel="seconds per step")
    axes.set_title(f"train llm {workload['size']}, {workload['precision']}{kept}")
    axes.set_xticks(sorted(set(tokens)), [f"{each:,}" for each in sorted(set(tokens))])
    axes.minorticks_off()
    return _save(figure, axes, path)


def _canvas() -> tuple[Any, Any]:
    figure, axes = pyplot.subplots(figsize=(8.4, 4.8), dpi=150, layout="constrained")
    axes.grid(color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> Path:
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)
    return path


def _annotate(axes: Any, row: Row, text: str, color: str) -> None:
    point = _gib(row), row["median_step_seconds"]
    axes.annotate(text, point, xytext=(5, 7), textcoords="offset points", fontsize=9, color=color)


def _points(group: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [_gib(row) for row in group], [row["median_step_seconds"] for row in group]


def _gib(row: Row) -> float:
    return row["peak_allocated_bytes"] / GIB


def _is_ours(row: Row) -> bool:
    return row["contestant"].startswith("superpipeline")
