"""What happened when: intervals on the device's streams and on the host, by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

Kind = Literal["fetch", "forward", "backward", "between", "drain", "update", "store", "return"]


class Interval(NamedTuple):
    """What happened to one layer from when to when.

    Attributes:
        kind: ``fetch``, the copy to the device; ``forward`` and ``backward``, the computation, and ``between``, what is
            computed between two layers; ``drain``, the copy of gradients to the host; ``update``, the optimizer's work;
            ``store`` and ``return``, activations that leave for the host and come back.
        layer: index among the plan's layers; the residents come after the last. None for what belongs to no layer.
        begin, end: seconds since some moment that all intervals share.
        nbytes: copied.
    """

    kind: Kind
    layer: int | None
    begin: float
    end: float
    nbytes: int = 0


class Timeline:
    """Collects intervals while a batch runs, and reads their times later: nobody waits for the device.

    Args:
        seconds: gives the time of a mark of the device's, in seconds; None while its stream has not come there.
    """

    def __init__(self, seconds: Callable[[Any], float | None]) -> None:
        self._seconds = seconds
        self._open: list[tuple[Kind, int | None, Any, Any, int]] = []

    def add(self, kind: Kind, layer: int | None, begin: Any, end: Any, nbytes: int = 0) -> None:
        """Something happened to a layer between two marks."""
        self._open.append((kind, layer, begin, end, nbytes))

    def take(self) -> list[Interval]:
        """The intervals that have ended by now, in the order of their beginning; each is given out once."""
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


def chrome_trace(steps: Mapping[int, Sequence[Interval]], names: Sequence[str]) -> dict[str, Any]:
    """The intervals as https://ui.perfetto.dev and ``chrome://tracing`` read them: a row for each kind, in microseconds.

    Args:
        steps: intervals by step.
        names: of the layers; the residents follow them.
    """
    rows = {kind: row for row, kind in enumerate(get_args(Kind))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": kind}} for kind, row in rows.items()
    ]
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
    """Of a layer, the residents (which come after the last), or of what is between layers."""
    if layer is None:
        return "between layers"
    return names[layer] if layer < len(names) else "residents"
