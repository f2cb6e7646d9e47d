"""The order in which layers are used: recorded in each batch, followed in the next."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable
from itertools import chain, filterfalse, islice
from typing import Generic, TypeVar

L = TypeVar("L", bound=Hashable)


class Trace(Generic[L]):
    """The order in which a phase uses layers, and how far the running batch has come along it.

    A trace that turns out wrong (conditional layers, several forwards) costs fetches on demand, never a result.

    Args:
        order: the order that is expected of the first batch.
    """

    def __init__(self, order: Iterable[L]) -> None:
        self._expected: list[L] = []
        self._uses: dict[L, list[float]] = {}  # the indices of each layer's uses in the order, then _NEVER
        self._around: dict[L, list[float]] = {}  # the same for a cyclic order: those of the next round follow
        self._recorded: list[L] = list(order)
        self._at = 0
        self.cyclic = False
        """Whether the order repeats: the next batch finds the copies of this one valid, or this one has begun it again."""
        self.may_go_on = False
        """Whether a batch that has come to the end of the order may begin it again, as generation does for each token."""
        self.start()

    def start(self) -> None:
        """Begins a batch, which is expected to do what the last one did."""
        if self._recorded and self._recorded != self._expected:
            self._expected = self._recorded
            self._uses = {layer: [] for layer in self._expected}
            for index, layer in enumerate(self._expected):
                self._uses[layer].append(index)
            around = len(self._expected)
            self._around = {
                layer: [*uses, *(index + around for index in uses), *_NEVER] for layer, uses in self._uses.items()
            }
            for uses in self._uses.values():
                uses += _NEVER
        self._recorded = []
        self._at = 0

    def order(self) -> list[L]:
        """The order of the running batch as far as it has come; that of the batch before if it has not begun."""
        return self._recorded or self._expected

    def visit(self, layer: L) -> None:
        """Records that a layer is used now."""
        self._recorded.append(layer)
        uses = self._uses.get(layer, _NEVER)
        index = uses[bisect_left(uses, self._at)]
        if self.may_go_on and uses[0] < self._at == len(self._expected):
            index, self.cyclic = uses[0], True
        if index != math.inf:
            self._at = int(index) + 1

    def next_use(self, layer: L) -> float:
        """How many uses of other layers come before ``layer`` is used again; infinite if no use of it is expected."""
        return self.next_uses(layer)[0]

    def next_uses(self, layer: L) -> tuple[float, float]:
        """Does what :meth:`next_use` does, for the next use and for the one after it."""
        uses = (self._around if self.cyclic else self._uses).get(layer, _NEVER)
        index = bisect_left(uses, self._at)
        return uses[index] - self._at, uses[index + 1] - self._at

    def coming(self, there: Callable[[L], object], wanted: Callable[[L], bool], most: int) -> list[tuple[L, int]]:
        """The next layers that are wanted, each once, with the number of uses of others before each.

        Args:
            there: says which layers are passed over. There may be hundreds, so this is no function of Python's own.
            wanted: says which of the others are wanted.
            most: how many are asked for.
        """
        distances: dict[L, int] = {}
        ahead: Iterable[L] = islice(self._expected, self._at, None)
        for layer in filterfalse(there, chain(ahead, self._expected[: self._at]) if self.cyclic else ahead):
            if layer not in distances and wanted(layer):
                distances[layer] = int(self.next_use(layer))
                if len(distances) == most:
                    break
        return list(distances.items())


_NEVER = [math.inf, math.inf]
