"""Modes of activations that fit the budget. No other file of ``tuning`` needs the capability ``activations``.

``activations="auto"`` chooses recompute or offload for as few units as the budget asks. The cost of a mode is the time per byte
that the mode frees: recompute costs a second forward, offload the part of its transfers that computation does not hide. The costs
yield a few candidates. The one with the shortest predicted batch is chosen.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sp_lightning.capabilities.activations.policy import EXEMPT, FREEING, Call, least_bytes, peak_bytes, scaled
from sp_lightning.capabilities.tuning.visits import Rates, Visit
from sp_lightning.core.plan.choices import Mode, Modes


def _with_forwards(visits: Sequence[Visit]) -> Iterator[tuple[Visit, int]]:
    """Yields each visit with the index of its forward (its own index for a forward); -1 if it is unknown."""
    # For each tuple of layers, the indices of forwards whose backward has not been seen.
    pending: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for at, visit in enumerate(visits):
        if not visit.backward:
            pending[visit.layers].append(at)
            yield visit, at
        else:
            yield visit, pending[visit.layers].pop() if pending[visit.layers] else -1


def without_second_forwards(visits: Sequence[Visit]) -> list[Visit]:
    """Converts the visits of a batch with all units recomputed to those of a batch with all activations kept.

    The backward of a recomputed layer contains its second forward, which is assumed to be as long as the first.
    """
    return [
        replace(visit, seconds=max(0.0, visit.seconds - visits[forward].seconds))
        if visit.backward and visit.layers and forward >= 0
        else visit
        for visit, forward in _with_forwards(visits)
    ]


@dataclass(frozen=True)
class Balance:
    """The activations of a batch, and the choices of modes for them.

    Attributes:
        calls: the unit calls of the batch's forward, in order.
        index_of: the index of each unit's layer. Units that stay on the device have none.
        visits: the visits of the batch with their times, if all activations are kept.
        rates: the speed of the machine.
    """

    calls: tuple[Call, ...]
    index_of: Mapping[str, int]
    visits: Sequence[Visit]
    rates: Rates

    def candidates(self, room: int) -> Iterator[Modes]:
        """Yields choices of modes with which activations use at most ``room`` bytes on the device.

        Each choice changes as few units as necessary, the cheapest units first. If no choice fits, choices with at most the
        memory of the better single mode are yielded (:func:`~sp_lightning.capabilities.activations.policy.least_bytes`).

        Three kinds are tried: the cheaper mode of each unit, all units recomputed, all units offloaded. Alternating modes,
        for a slow link, are never faster than the better mode alone: a copy has the time of one unit to finish, whatever
        the mode of the next unit.
        """
        costs = {call.unit: self._cost(call.unit) for call in self.calls}
        kept: dict[str, Mode] = dict.fromkeys(costs, "keep")
        cheaper = {unit: min(FREEING, key=costs[unit].__getitem__) for unit in self._freeable}
        choices: list[Modes] = []
        for way in (cheaper, *(dict.fromkeys(costs, mode) for mode in FREEING)):
            order = sorted(way, key=lambda unit: costs[unit][way[unit]])
            fewest = bisect_left(
                range(len(order)),
                True,
                key=lambda count: peak_bytes(self.calls, kept | {unit: way[unit] for unit in order[:count]}) <= room,
            )
            modes = kept | {unit: way[unit] for unit in order[:fewest]}
            if modes not in choices and peak_bytes(self.calls, modes) <= max(room, least_bytes(self.calls)):
                choices.append(modes)
        yield from choices

    def visited(self, modes: Modes) -> list[Visit]:
        """Returns the visits of the batch with these modes. A unit without a layer counts with the layer before it."""
        # By the index of a forward visit: bytes that are offloaded after it, and additional seconds of its backward.
        moved: defaultdict[int, int] = defaultdict(int)
        recomputed: defaultdict[int, float] = defaultdict(float)
        forwards = [at for at, visit in enumerate(self.visits) if visit.layers and not visit.backward]
        at = forwards[0] if forwards else 0
        following = iter(forwards)
        for number, call in enumerate(self.calls):
            index = self.index_of.get(call.unit)
            if index is not None:
                at = next((forward for forward in following if index in self.visits[forward].layers), at)
            if modes[call.unit] == "offload" and number < len(self.calls) - EXEMPT:
                moved[at] += call.moved
            elif modes[call.unit] == "recompute":
                recomputed[at] += self._seconds(call.unit) if index is None else self.visits[at].seconds
        return [
            replace(
                visit, moved=moved[forward], seconds=visit.seconds + (recomputed[forward] if visit.backward else 0.0)
            )
            for visit, forward in _with_forwards(self.visits)
        ]

    # ------------------------------------------------------------------ one unit

    @property
    def _freeable(self) -> list[str]:
        """The units whose activations can be freed, in the order of the forward."""
        return list(dict.fromkeys(call.unit for call in self.calls[:-EXEMPT] if call.saved))

    def _cost(self, unit: str) -> dict[Mode, float]:
        """Returns the seconds per freed byte for each mode that frees memory."""
        calls = [call for call in self.calls if call.unit == unit]
        saved, inputs, moved = (sum(getattr(call, part) for call in calls) for part in ("saved", "inputs", "moved"))
        up, down = moved / self.rates.upload, moved / self.rates.download
        if not self.rates.synchronous:
            # Activations are offloaded during the next unit's forward and uploaded during the next unit's backward.
            following = next((b.unit for a, b in pairwise(self.calls) if a.unit == unit and b.unit != unit), unit)
            down = max(0.0, down - self._seconds(following))
            up = max(0.0, up - self._seconds(following, backward=True))
        return {
            "recompute": self._seconds(unit) / max(saved - inputs, 1),
            "offload": (down + up) / moved if moved else math.inf,
        }

    def _seconds(self, unit: str, *, backward: bool = False) -> float:
        """Returns the seconds of a unit's forward or backward.

        Units without a layer share the time between layers equally; their backward counts as twice their forward.
        """
        index = self.index_of.get(unit)
        if index is not None:
            return sum(visit.seconds for visit in self.visits if visit.backward is backward and index in visit.layers)
        between = sum(visit.seconds for visit in self.visits if not visit.layers and not visit.backward)
        return between * (1 + backward) / max(1, sum(name not in self.index_of for name in self._freeable))


@dataclass(frozen=True)
class ActivationMemory:
    """The memory use of activations, estimated for any batch from the unit calls of one batch.

    Attributes:
        measured: the unit calls of that batch, in order.
        size: the size of that batch, in elements of its tensors.
    """

    measured: tuple[Call, ...]
    size: int

    def calls(self, size: int) -> tuple[Call, ...]:
        """Returns the unit calls of a batch of another size."""
        return scaled(self.measured, size / self.size if self.size else 1)

    def peak(self, modes: Modes, size: int) -> int:
        """Returns the peak memory of activations on the device, in bytes."""
        return peak_bytes(self.calls(size), modes)

    def least(self, size: int) -> int:
        """Returns the peak memory if all units have the mode that uses the least."""
        return least_bytes(self.calls(size))

    def least_mode(self, size: int) -> Mode:
        """Returns the mode that uses the least memory if all units have it."""
        units = [call.unit for call in self.measured]
        peaks = {mode: self.peak(dict.fromkeys(units, mode), size) for mode in FREEING}
        return min(peaks, key=peaks.__getitem__)
