"""Modes of activations that fit the budget. Nothing else of ``tuning`` needs the capability ``activations``.

``activations="auto"`` chooses recompute or offload for as few units as the budget asks. The cost of a mode is the time per byte
that it frees: recompute costs a second forward, offload the part of its transfers that computation does not hide. This yields a
few candidates, of which the prediction of a whole batch chooses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sp_lightning.activations.policy import EXEMPT, FREEING, Call, least_bytes, peak_bytes, scaled
from sp_lightning.plan.choices import Mode, Modes
from sp_lightning.tuning.visits import Rates, Visit


def _with_forwards(visits: Sequence[Visit]) -> Iterator[tuple[Visit, int]]:
    """Each visit with the index of its forward: its own, or the one whose backward it is; -1 if that is not known."""
    # By layers, forwards whose backward is to come.
    pending: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for at, visit in enumerate(visits):
        if not visit.backward:
            pending[visit.layers].append(at)
            yield visit, at
        else:
            yield visit, pending[visit.layers].pop() if pending[visit.layers] else -1


def without_second_forwards(visits: Sequence[Visit]) -> list[Visit]:
    """Returns the visits of a batch whose units were all recomputed as they would be if all were kept.

    A layer's backward then contains its second forward, whose time is taken to be that of the first.
    """
    return [
        replace(visit, seconds=max(0.0, visit.seconds - visits[forward].seconds))
        if visit.backward and visit.layers and forward >= 0
        else visit
        for visit, forward in _with_forwards(visits)
    ]


@dataclass(frozen=True)
class Balance:
    """What is known of a batch's activations, and the choices of modes that follow from it.

    Attributes:
        calls: the unit calls of the batch's forward, in order.
        index_of: the index of each unit's layer. Units that stay on the device have none.
        visits: what the batch does, with its times, if all activations are kept.
        rates: how fast the machine is.
    """

    calls: tuple[Call, ...]
    index_of: Mapping[str, int]
    visits: Sequence[Visit]
    rates: Rates

    def candidates(self, room: int) -> Iterator[Modes]:
        """Choices of modes with which activations take at most ``room`` bytes on the device.

        Each changes as few units as that asks, the cheapest ones first. If no choice takes so little, those that take the
        least are returned.

        Three ways are tried: the cheaper mode of each unit, all units recomputed, all units offloaded. A mixture by
        turns, for a link that is too slow to offload every unit, is left out: it is never faster than the better mode
        alone, because a copy has the time of one unit to finish in, whatever mode the next unit has.
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
        """What the batch does with these modes. Units without a layer of their own count with the layer before them."""
        # By the index of a forward visit: bytes that leave after it, and seconds that its backward takes longer.
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
                moved[at] += call.saved
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
        """The units whose activations could be freed, in the order of the forward."""
        return list(dict.fromkeys(call.unit for call in self.calls[:-EXEMPT] if call.saved))

    def _cost(self, unit: str) -> dict[Mode, float]:
        """Seconds per byte that is freed, for each mode that frees any."""
        calls = [call for call in self.calls if call.unit == unit]
        saved, inputs = sum(call.saved for call in calls), sum(call.inputs for call in calls)
        up, down = saved / self.rates.upload, saved / self.rates.download
        if not self.rates.synchronous:
            # Activations leave during the next unit's forward and come back during the next unit's backward.
            following = next((b.unit for a, b in pairwise(self.calls) if a.unit == unit and b.unit != unit), unit)
            down = max(0.0, down - self._seconds(following))
            up = max(0.0, up - self._seconds(following, backward=True))
        return {"recompute": self._seconds(unit) / max(saved - inputs, 1), "offload": (down + up) / max(saved, 1)}

    def _seconds(self, unit: str, *, backward: bool = False) -> float:
        """How long a unit's forward or backward takes.

        Units without a layer share the time between layers equally; their backward is taken to be twice their forward.
        """
        index = self.index_of.get(unit)
        if index is not None:
            return sum(visit.seconds for visit in self.visits if visit.backward is backward and index in visit.layers)
        between = sum(visit.seconds for visit in self.visits if not visit.layers and not visit.backward)
        return between * (1 + backward) / max(1, sum(name not in self.index_of for name in self._freeable))


@dataclass(frozen=True)
class ActivationMemory:
    """The memory that activations of batches take, from the unit calls of one batch.

    Attributes:
        measured: the unit calls of that batch, in order.
        size: the size of that batch, in elements of its tensors.
    """

    measured: tuple[Call, ...]
    size: int

    def calls(self, size: int) -> tuple[Call, ...]:
        """The unit calls of a batch of another size."""
        return scaled(self.measured, size / self.size if self.size else 1)

    def peak(self, modes: Modes, size: int) -> int:
        """The most bytes that activations take on the device."""
        return peak_bytes(self.calls(size), modes)

    def least(self, size: int) -> int:
        """The same with the one mode for all units that takes least."""
        return least_bytes(self.calls(size))

    def least_mode(self, size: int) -> Mode:
        """That mode."""
        units = [call.unit for call in self.measured]
        peaks = {mode: self.peak(dict.fromkeys(units, mode), size) for mode in FREEING}
        return min(peaks, key=peaks.__getitem__)
