"""When copies and computations happened: intervals on the device's streams and on the host, by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

Kind = Literal[
    "fetch", "forward", "backward", "between", "reduce", "gather", "network", "drain", "update", "store", "return", "read",
    "write", "bring", "take",
]  # fmt: skip


class Interval(NamedTuple):
    """One copy or computation of one layer, with its begin and end.

    Attributes:
        kind: ``fetch``, the copy of weights to the device; ``forward`` and ``backward``, a layer's computation;
            ``between``, the computation between two layers; ``reduce``, the sum of gradients over several devices, with
            the wait for the others; ``network``, the same over several nodes; ``gather``, parts of a layer that come from
            other devices, with the wait for them; ``drain``, the copy of gradients to the host; ``update``, the optimizer's
            work; ``store`` and ``return``, the copies of activations to the host and back; ``bring`` and ``take``, those
            of what an update on the device needs, and of what it has made.
        layer: the layer's index in the plan; the number of layers stands for the residents, None for no layer at all.
        begin, end: seconds since a moment that all intervals of a run share.
        nbytes: bytes that were copied; 0 for computations.
    """

    kind: Kind
    layer: int | None
    begin: float
    end: float
    nbytes: int = 0


class Timeline:
    """Collects intervals while a batch runs, and reads their times later, so that the host never waits for the device.

    Args:
        seconds: converts a mark of the device's into seconds; it returns None while the stream has not reached the mark.
    """

    def __init__(self, seconds: Callable[[Any], float | None]) -> None:
        self._seconds = seconds
        self._open: list[tuple[Kind, int | None, Any, Any, int]] = []

    def add(self, kind: Kind, layer: int | None, begin: Any, end: Any, nbytes: int = 0) -> None:
        """Notes an interval between two marks."""
        self._open.append((kind, layer, begin, end, nbytes))

    def take(self) -> list[Interval]:
        """Returns the intervals that have ended since the last call, ordered by their begin. The others stay."""
        taken, self._open = self._open, []
        done = []
        for each in taken:
            kind, layer, first, last, nbytes = each
            begin, end = self._seconds(first), self._seconds(last)
            if begin is None or end is None:
                self._open.append(each)
            else:
                done.append(Interval(kind, layer, begin, end, nbytes))
        return sorted(done, key=lambda interval: interval.begin)


def chrome_trace(
    steps: Mapping[int, Sequence[Interval]], names: Sequence[str], process: str | None = None
) -> dict[str, Any]:
    """Returns the intervals in the format of https://ui.perfetto.dev and ``chrome://tracing``, with one row per kind.

    Args:
        steps: the intervals of every step, by the step's number.
        names: the names of the layers; the residents come after the last one.
        process: what the trace calls the process; None for no name.
    """
    rows = {kind: row for row, kind in enumerate(get_args(Kind))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": kind}} for kind, row in rows.items()
    ]
    if process is not None:
        events.append({"ph": "M", "name": "process_name", "pid": 0, "args": {"name": process}})
    zero = min((each.begin for step in steps.values() for each in step), default=0.0)
    for step, intervals in steps.items():
        for each in intervals:
            events.append(
                {
                    "ph": "X", "name": name_of(each.layer, names), "cat": each.kind, "pid": 0, "tid": rows[each.kind],
                    "ts": (each.begin - zero) * 1e6, "dur": (each.end - each.begin) * 1e6,
                    "args": {"step": step, "bytes": each.nbytes},
                }
            )  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def name_of(layer: int | None, names: Sequence[str]) -> str:
    """Returns how the trace names a layer, the residents (whose index is the number of layers) or None."""
    if layer is None:
        return "between layers"
    return names[layer] if layer < len(names) else "residents"
