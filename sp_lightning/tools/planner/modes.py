"""The modes of activations of a planned run, and the layer calls of a batch with these modes."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from sp_lightning.capabilities.activations.policy import EXEMPT, Call, peak_bytes
from sp_lightning.core.plan.choices import Mode, Modes
from sp_lightning.tools.planner.prediction.visits import Visit


def oldest_offloaded(calls: Sequence[Call], room: int) -> Modes:
    """Returns the modes of ``"auto"``: as few units as necessary are offloaded, those that are called first.

    If no number of units is enough, all are offloaded.

    Args:
        calls: the unit calls of a batch's forward, in order.
        room: bytes on the device for activations.
    """
    units = list(dict.fromkeys(call.unit for call in calls))

    def modes(count: int) -> dict[str, Mode]:
        return {unit: "offload" if at < count else "keep" for at, unit in enumerate(units)}

    # Offloading one more unit never raises the peak: its bytes stay at most until the next call, as if they were kept.
    return modes(bisect_left(range(len(units)), True, key=lambda count: peak_bytes(calls, modes(count)) <= room))


def visited(visits: Sequence[Visit], calls: Sequence[Call], index_of: Mapping[str, int], modes: Modes) -> list[Visit]:
    """Returns the visits of a batch with these modes. A unit without a layer counts with the layer before it.

    Args:
        visits: the visits of the batch with their times, if all activations are kept.
        calls: the unit calls of the batch's forward, in order.
        index_of: the index of each unit's layer.
        modes: the mode of each unit.
    """
    # By the index of a call's first visit: bytes that are offloaded after it, additional seconds and layers of its backward.
    moved: defaultdict[int, int] = defaultdict(int)
    recomputed: defaultdict[int, float] = defaultdict(float)
    needed: defaultdict[int, tuple[int, ...]] = defaultdict(tuple)
    forwards = _forwards(visits)
    between = sum(visit.seconds for visit in visits if not visit.layers and not visit.backward)
    beside = {call.unit for call in calls[:-EXEMPT] if call.saved and call.unit not in index_of}
    at = next(iter(forwards), 0)
    following = iter(forwards)
    for number, call in enumerate(calls):
        index = index_of.get(call.unit)
        if index is not None:
            at = next((forward for forward in following if index in visits[forward].layers), at)
        if modes[call.unit] == "offload" and number < len(calls) - EXEMPT:
            moved[at] += call.moved
        elif modes[call.unit] == "recompute" and index is None:
            recomputed[at] += between / max(
                1, len(beside)
            )  # units without a layer share the time between layers equally
        elif modes[call.unit] == "recompute":
            whole = forwards.get(at, [])
            recomputed[at] += sum(visit.seconds for visit in whole)
            needed[at] = tuple(layer for visit in whole[1:] for layer in visit.layers)
    return [
        replace(
            visit,
            moved=moved[forward],
            seconds=visit.seconds + (recomputed[forward] if visit.backward else 0.0),
            needs=tuple(dict.fromkeys((*visit.needs, *needed[forward]))) if visit.backward else visit.needs,
        )
        for visit, forward in _with_forwards(visits)
    ]


def _forwards(visits: Sequence[Visit]) -> dict[int, Sequence[Visit]]:
    """Returns the visits of each layer call's forward, with those of the calls inside it, by the index of the first one."""
    found, begun = dict[int, Sequence[Visit]](), dict[tuple[int, ...], int]()
    for at, visit in enumerate(visits):
        if visit.layers and not visit.backward:
            first = begun[visit.layers] if visit.continues else at
            begun[visit.layers] = first
            found[first] = visits[first : at + 1]
    return found


def _with_forwards(visits: Sequence[Visit]) -> Iterator[tuple[Visit, int]]:
    """Yields each visit with the index of its call's first visit: its own index for a forward; -1 if it is unknown."""
    # For each tuple of layers, the first visits of calls whose backward has not been seen.
    pending: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for at, visit in enumerate(visits):
        if visit.backward:
            yield visit, pending[visit.layers].pop() if pending[visit.layers] else -1
        else:
            if not visit.continues:
                pending[visit.layers].append(at)
            yield visit, at
