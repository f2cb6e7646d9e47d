"""The order in which layers are used: recorded in each batch, followed in the next."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import chain, islice


class Trace:
    """One phase's order of layers, and how far the running batch has come along it.

    A trace that turns out wrong (conditional layers, several forwards) costs demand fetches, never a result.

    Args:
        order: the order expected for the first batch.
    """

    def __init__(self, order: Iterable[int]) -> None:
        self._expected: list[int] = []
        self._uses: dict[int, list[int]] = {}
        self._recorded: list[int] = list(order)
        self._at = 0
        self.cyclic = False
        """Whether the next batch finds the copies of this one still valid: then the order goes round."""
        self.start()

    def start(self) -> None:
        """Begin a batch: expect what the last one did."""
        if self._recorded:
            self._expected = self._recorded
            self._uses = {}
            for index, layer in enumerate(self._expected):
                self._uses.setdefault(layer, []).append(index)
        self._recorded = []
        self._at = 0

    def visit(self, layer: int) -> None:
        """A layer is used now."""
        self._recorded.append(layer)
        index = self._find(layer, self._at)
        if index is not None:
            self._at = index + 1

    def next_use(self, layer: int) -> float:
        """Uses of other layers until ``layer`` is used again; infinite if it is not expected."""
        return self.next_uses(layer)[0]

    def next_uses(self, layer: int) -> tuple[float, float]:
        """As :meth:`next_use`, for the next use and the one after it."""
        distances = []
        start = self._at
        for _ in range(2):
            index = self._find(layer, start)
            if index is not None:
                distances.append(float(index - self._at))
                start = index + 1
        if self.cyclic:
            around = len(self._expected) - self._at
            distances += [float(index + around) for index in self._uses.get(layer, ())[:2]]
        return tuple([*distances, math.inf, math.inf][:2])  # type: ignore[return-value]

    def upcoming(self) -> Iterator[int]:
        """The layers that are used next, each once, nearest first."""
        ahead: Iterable[int] = islice(self._expected, self._at, None)
        if self.cyclic:
            ahead = chain(ahead, islice(self._expected, 0, self._at))
        seen = set()
        for layer in ahead:
            if layer not in seen:
                seen.add(layer)
                yield layer

    def _find(self, layer: int, start: int) -> int | None:
        uses = self._uses.get(layer, [])
        index = bisect_left(uses, start)
        return uses[index] if index < len(uses) else None
