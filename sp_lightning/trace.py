"""The order in which layers are used: recorded in each batch, followed in the next."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator


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
        if self._recorded and self._recorded[-1] == layer:
            return
        self._recorded.append(layer)
        index = self._find(layer)
        if index is not None:
            self._at = index + 1

    def next_use(self, layer: int) -> float:
        """Uses of other layers until ``layer`` is used again; infinite if it is not expected."""
        index = self._find(layer)
        if index is not None:
            return index - self._at
        if self.cyclic and layer in self._uses:
            return self._uses[layer][0] + len(self._expected) - self._at
        return math.inf

    def upcoming(self) -> Iterator[int]:
        """The layers that are used next, each once, nearest first."""
        ahead = self._expected[self._at :]
        if self.cyclic:
            ahead = ahead + self._expected[: self._at]
        yield from dict.fromkeys(ahead)

    def _find(self, layer: int) -> int | None:
        uses = self._uses.get(layer, [])
        index = bisect_left(uses, self._at)
        return uses[index] if index < len(uses) else None
