"""``activations="auto"``: chooses recompute or offload for as few units as the budget asks.

The cost of a mode is the time per byte that it frees. Recompute costs a second forward; offload costs the part of its
transfers that computation does not hide. This yields a few candidates, of which the prediction of a whole batch chooses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sp_lightning.plan.activation_policy import EXEMPT, FREEING, Call, Mode, Modes, least_bytes, peak_bytes
from sp_lightning.tune.visits import Rates, Visit


def without_second_forwards(visits: Sequence[Visit]) -> list[Visit]:
    """Returns the visits of a batch whose units were all recomputed as they would be if all were kept.

    A layer's backward then contains its second forward, whose time is taken to be that of the first.
    """
    forwards: defaultdict[tuple[int, ...], list[float]] = defaultdict(list)
    kept = []
    for visit in visits:
        if not visit.backward:
            forwards[visit.layers].append(visit.seconds)
            kept.append(visit)
        else:
            second_forward = forwards[visit.layers].pop() if visit.layers and forwards[visit.layers] else 0.0
            kept.append(replace(visit, seconds=max(0.0, visit.seconds - second_forward)))
    return kept


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

        Each changes as few units as that asks. If no choice takes so little, those that take the least are returned.

        Three ways are tried: the cheaper mode of each unit, all units recomputed, all units offloaded. A mixture by
        turns, for a link that is too slow to offload every unit, is left out: it is never faster than the better mode
        alone, because a copy has the time of one unit to finish in, whatever mode the next unit has.
        """
        cheaper: Modes = {unit: min(FREEING, key=self._cost(unit).__getitem__) for unit in self._units}
        least = least_bytes(self.calls)
        choices: list[Modes] = []
        for way in (cheaper, *map(self._all, FREEING)):
            modes = self._fewest(way, room)
            if modes not in choices and peak_bytes(self.calls, modes) <= max(room, least):
                choices.append(modes)
        yield from choices

    def visited(self, modes: Modes) -> list[Visit]:
        """What the batch does with these modes. Units without a layer of their own count with the layer before them."""
        moved, recomputed = self._extra(modes)
        visits: list[Visit] = []
        # By layers, the indices of the forwards whose backward is still to come.
        pending: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for at, visit in enumerate(self.visits):
            if not visit.backward:
                pending[visit.layers].append(at)
                visits.append(replace(visit, moved=moved.get(at, 0)))
            else:
                forward = pending[visit.layers].pop() if pending[visit.layers] else -1
                seconds = visit.seconds + recomputed.get(forward, 0.0)
                visits.append(replace(visit, moved=moved.get(forward, 0), seconds=seconds))
        return visits

    # ------------------------------------------------------------------ one unit

    @property
    def _units(self) -> list[str]:
        """The units whose activations could be freed, in the order of the forward."""
        return list(dict.fromkeys(call.unit for call in self.calls[:-EXEMPT] if call.saved))

    def _all(self, mode: Mode) -> dict[str, Mode]:
        return dict.fromkeys((call.unit for call in self.calls), mode)

    def _cost(self, unit: str) -> dict[Mode, float]:
        """Seconds per byte that is freed, for each mode that frees any."""
        calls = [call for call in self.calls if call.unit == unit]
        saved, inputs = sum(call.saved for call in calls), sum(call.inputs for call in calls)
        forward = self._seconds(unit, backward=False)
        # Activations leave during the next unit's forward and come back during the next unit's backward.
        following = next((b.unit for a, b in pairwise(self.calls) if a.unit == unit and b.unit != unit), unit)
        times = self._seconds(following, backward=False), self._seconds(following, backward=True)
        exposed = max(0.0, saved / self.rates.download - times[0]) + max(0.0, saved / self.rates.upload - times[1])
        if self.rates.synchronous:
            exposed = saved / self.rates.download + saved / self.rates.upload
        return {"recompute": forward / max(saved - inputs, 1), "offload": exposed / max(saved, 1)}

    def _seconds(self, unit: str, *, backward: bool) -> float:
        """How long a unit's forward or backward takes.

        Units without a layer share the time between layers equally; their backward is taken to be twice their forward.
        """
        index = self.index_of.get(unit)
        if index is not None:
            return sum(visit.seconds for visit in self.visits if visit.backward is backward and index in visit.layers)
        between = sum(visit.seconds for visit in self.visits if not visit.layers and not visit.backward)
        return between * (2 if backward else 1) / max(1, sum(name not in self.index_of for name in self._units))

    def _fewest(self, way: Modes, room: int) -> Modes:
        """Changes the fewest units, cheapest first, with which activations take at most ``room`` bytes."""
        order = sorted(way, key=lambda unit: self._cost(unit)[way[unit]])
        low, high = 0, len(order)
        while low < high:
            middle = (low + high) // 2
            if peak_bytes(self.calls, self._with(way, order[:middle])) <= room:
                high = middle
            else:
                low = middle + 1
        return self._with(way, order[:low])

    def _with(self, way: Modes, units: Sequence[str]) -> Modes:
        return {**self._all("keep"), **{unit: way[unit] for unit in units}}

    def _extra(self, modes: Modes) -> tuple[dict[int, int], dict[int, float]]:
        """By the index of a forward visit: bytes that leave after it, and seconds that its backward takes longer."""
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
                seconds = self.visits[at].seconds if index is not None else self._seconds(call.unit, backward=False)
                recomputed[at] += seconds
        return moved, recomputed
