"""The order in which layers are used: recorded in each batch, followed in the next."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable
from itertools import chain, islice
from typing import Generic, TypeVar

L = TypeVar("L", bound=Hashable)


class Trace(Generic[L]):
    """One phase's order of layers, and how far the running batch has come along it.

    A trace that turns out wrong (conditional layers, several forwards) costs demand fetches, never a result.

    Args:
        order: the order expected for the first batch.
    """

    def __init__(self, order: Iterable[L]) -> None:
        self._expected: list[L] = []
        self._uses: dict[L, list[float]] = {}  # where in the order, and then never
        self._around: dict[L, list[float]] = {}  # the same where the order goes round
        self._recorded: list[L] = list(order)
        self._at = 0
        self.cyclic = False
        """Whether the order goes round: the next batch finds the copies of this one still valid, or this one has begun anew."""
        self.may_go_on = False
        """Whether a batch that has come to the end of the order may begin it anew, as generation does with each token."""
        self.start()

    def start(self) -> None:
        """Begin a batch: expect what the last one did."""
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
        """The batch's order as far as it is known: of the running one, or else of the one before."""
        return self._recorded or self._expected

    def visit(self, layer: L) -> None:
        """A layer is used now."""
        self._recorded.append(layer)
        uses = self._uses.get(layer, _NEVER)
        index = uses[bisect_left(uses, self._at)]
        if self.may_go_on and uses[0] < self._at == len(self._expected):
            index, self.cyclic = uses[0], True
        if index != math.inf:
            self._at = int(index) + 1

    def next_use(self, layer: L) -> float:
        """Uses of other layers until ``layer`` is used again; infinite if it is not expected."""
        return self.next_uses(layer)[0]

    def next_uses(self, layer: L) -> tuple[float, float]:
        """As :meth:`next_use`, for the next use and the one after it."""
        uses = (self._around if self.cyclic else self._uses).get(layer, _NEVER)
        index = bisect_left(uses, self._at)
        return uses[index] - self._at, uses[index + 1] - self._at

    def coming(self, wanted: Callable[[L], bool], most: int) -> list[tuple[L, int]]:
        """The ``most`` nearest of the layers that are ``wanted``, each once, with the uses of other layers until then."""
        found: dict[L, int] = {}
        ahead = islice(self._expected, self._at, None)
        for distance, layer in enumerate(chain(ahead, self._expected[: self._at]) if self.cyclic else ahead):
            if layer not in found and wanted(layer):
                found[layer] = distance
                if len(found) == most:
                    break
        return list(found.items())


_NEVER = [math.inf, math.inf]
