"""Recorded times of copies and computations: intervals on the device's streams and on the host, per layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

Kind = Literal[
    "fetch", "forward", "backward", "between", "reduce", "network", "drain", "update", "store", "return", "read",
    "write", "bring", "take",
]  # fmt: skip
LABELS: dict[Kind, str] = {
    "fetch": "upload", "forward": "forward", "backward": "backward", "between": "between layers", "drain": "gradient offloading",
    "update": "optimizer step", "store": "activation offloading", "return": "activation upload", "read": "disk read",
    "write": "disk write", "bring": "optimizer state upload", "take": "optimizer state download",
    "reduce": "sum of gradients", "network": "sum over nodes",
}  # fmt: skip
"""The words for each kind in pictures and in torch's profiler."""


class Interval(NamedTuple):
    """One copy or computation of one layer.

    Attributes:
        kind: ``fetch``: upload of weights. ``forward``, ``backward``: computation of a layer. ``between``: computation between
            two layers. ``reduce``: sum of gradients over devices, including the wait for the other ranks. ``network``: the
            same over nodes. ``drain``: download of gradients. ``update``: optimizer step. ``store``, ``return``: download and
            upload of activations. ``read``, ``write``: simulated transfers from and to a disk. ``bring``, ``take``: upload
            and download for an optimizer step on the device.
        layer: the layer's index in the plan; the number of layers for the residents; None for no layer.
        begin, end: seconds since a zero that all intervals of a run share.
        nbytes: copied bytes; 0 for computations.
    """

    kind: Kind
    layer: int | None
    begin: float
    end: float
    nbytes: int = 0


class Timeline:
    """Collects intervals during a batch, and reads their times after it, so that the host never waits for the device.

    Args:
        seconds: converts a mark of the device into seconds; returns None if the stream has not reached the mark yet.
    """

    def __init__(self, seconds: Callable[[Any], float | None]) -> None:
        self._seconds = seconds
        self._open: list[tuple[Kind, int | None, Any, Any, int]] = []

    def add(self, kind: Kind, layer: int | None, begin: Any, end: Any, nbytes: int = 0) -> None:
        """Adds an interval between two marks."""
        self._open.append((kind, layer, begin, end, nbytes))

    def take(self) -> list[Interval]:
        """Removes and returns the intervals that have ended, ordered by their begin."""
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


def name_of(layer: int | None, names: Sequence[str]) -> str:
    """Returns the name of a layer, of the residents (index: the number of layers) or of None."""
    if layer is None:
        return "between layers"
    return names[layer] if layer < len(names) else "weights outside layers"
