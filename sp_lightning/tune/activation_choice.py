"""``activations="auto"``: for each unit the cheaper of recomputing and offloading, for as few units as the budget asks.

What a mode costs is time per byte that it frees: a second forward, or the part of a transfer that computation does not
hide. The choice between the few candidates that come out of this is by the prediction of a whole batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sp_lightning.plan.activation_policy import EXEMPT, FREEING, Call, Mode, least_bytes, peak_bytes
from sp_lightning.tune.visits import Rates, Visit

Modes = Mapping[str, Mode]


def without_second_forwards(visits: Sequence[Visit]) -> list[Visit]:
    """What a batch did in which everything was recomputed, as if all had been kept."""
    forwards: defaultdict[tuple[int, ...], list[float]] = defaultdict(list)
    kept = []
    for visit in visits:
        if not visit.backward:
            forwards[visit.layers].append(visit.seconds)
            kept.append(visit)
        else:
            again = forwards[visit.layers].pop() if visit.layers and forwards[visit.layers] else 0.0
            kept.append(replace(visit, seconds=max(0.0, visit.seconds - again)))
    return kept


@dataclass(frozen=True)
class Balance:
    """What is known of a batch's activations.

    Attributes:
        calls: of its forward, in order.
        index_of: the layer of each unit; units that stay on the device have none.
        visits: what the batch does, with its times, where all activations are kept.
        rates: of the machine.
    """

    calls: tuple[Call, ...]
    index_of: Mapping[str, int]
    visits: Sequence[Visit]
    rates: Rates

    def candidates(self, room: int) -> Iterator[Modes]:
        """Choices that take at most so many bytes, each with as few units as that asks; or else those that take least.

        By the cheaper mode of each unit, and all in one mode. (Both by turns, where a link is too slow for all, is never
        faster than the better one alone: a copy has one unit's time, whatever the next unit does.)
        """
        cheaper: Modes = {unit: min(FREEING, key=self._cost(unit).__getitem__) for unit in self._units}
        least = least_bytes(self.calls)
        found: list[Modes] = []
        for way in (cheaper, *map(self._all, FREEING)):
            modes = self._fewest(way, room)
            if modes not in found and peak_bytes(self.calls, modes) <= max(room, least):
                found.append(modes)
        yield from found

    def visited(self, modes: Modes) -> list[Visit]:
        """What the batch does with other modes. Units without a layer of their own go with the layer before them."""
        moved, again = self._extra(modes)
        visits: list[Visit] = []
        seen: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # forwards whose backward is to come
        for at, visit in enumerate(self.visits):
            if not visit.backward:
                seen[visit.layers].append(at)
                visits.append(replace(visit, moved=moved.get(at, 0)))
            else:
                of = seen[visit.layers].pop() if seen[visit.layers] else -1
                visits.append(replace(visit, moved=moved.get(of, 0), seconds=visit.seconds + again.get(of, 0.0)))
        return visits

    # ------------------------------------------------------------------ one unit

    @property
    def _units(self) -> list[str]:
        """In the order of the forward, those that could be freed."""
        return list(dict.fromkeys(call.unit for call in self.calls[:-EXEMPT] if call.saved))

    def _all(self, mode: Mode) -> dict[str, Mode]:
        return dict.fromkeys((call.unit for call in self.calls), mode)

    def _cost(self, unit: str) -> dict[Mode, float]:
        """Seconds per byte that is freed, by mode."""
        calls = [call for call in self.calls if call.unit == unit]
        saved, inputs = sum(call.saved for call in calls), sum(call.inputs for call in calls)
        forward = self._seconds(unit, backward=False)
        # What leaves has the next unit's forward for that, and comes back during its backward.
        after = next((b.unit for a, b in pairwise(self.calls) if a.unit == unit and b.unit != unit), unit)
        times = self._seconds(after, backward=False), self._seconds(after, backward=True)
        late = max(0.0, saved / self.rates.download - times[0]) + max(0.0, saved / self.rates.upload - times[1])
        if self.rates.synchronous:
            late = saved / self.rates.download + saved / self.rates.upload
        return {"recompute": forward / max(saved - inputs, 1), "offload": late / max(saved, 1)}

    def _seconds(self, unit: str, *, backward: bool) -> float:
        index = self.index_of.get(unit)
        if index is not None:
            return sum(visit.seconds for visit in self.visits if visit.backward is backward and index in visit.layers)
        between = sum(visit.seconds for visit in self.visits if not visit.layers and not visit.backward)
        return between * (2 if backward else 1) / max(1, sum(name not in self.index_of for name in self._units))

    def _fewest(self, way: Modes, room: int) -> Modes:
        """The cheapest units first, until the rest fits."""
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
        """By forward visit: bytes that leave after it, seconds that its backward takes longer."""
        moved: defaultdict[int, int] = defaultdict(int)
        again: defaultdict[int, float] = defaultdict(float)
        forwards = [at for at, visit in enumerate(self.visits) if visit.layers and not visit.backward]
        at = forwards[0] if forwards else 0
        coming = iter(forwards)
        for number, call in enumerate(self.calls):
            index = self.index_of.get(call.unit)
            if index is not None:
                at = next((each for each in coming if index in self.visits[each].layers), at)
            if modes[call.unit] == "offload" and number < len(self.calls) - EXEMPT:
                moved[at] += call.saved
            elif modes[call.unit] == "recompute":
                again[at] += self.visits[at].seconds if index is not None else self._seconds(call.unit, backward=False)
        return moved, again
