"""What a batch does, visit by visit, and how fast the machine is: measured, or expected."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sp_lightning.device.timeline import Interval, Kind
from sp_lightning.plan.plan import Plan

# Walking so many takes about a second for each choice of k and k'.
_MOST_VISITS = 2000

RESOURCES: dict[str, tuple[Kind, ...]] = {
    "compute": ("forward", "backward", "between"),
    "fetch": ("fetch", "return"),
    "drain": ("drain", "store"),
    "optimizer": ("update",),
}
"""What is busy while what happens."""


@dataclass(frozen=True)
class Visit:
    """One use of some layers by a batch, in forward or in backward.

    Attributes:
        layers: those of one module's call; none for what computes between layers.
        seconds: how long the device computes.
        backward: whether it is their backward, after which gradients leave.
        needs: in backward, the layers whose weights are needed, in that order: an embedding's needs none.
        moved: bytes of activations that leave after a forward, or come back for a backward.
    """

    layers: tuple[int, ...]
    seconds: float
    backward: bool = False
    needs: tuple[int, ...] = ()
    moved: int = 0


@dataclass(frozen=True)
class Rates:
    """What the machine does in a second.

    Attributes:
        upload, download: bytes copied to the device, and to the host.
        update: bytes of gradients that the optimizer works off on the host.
        host_memory: bytes read and written.
        visit_seconds: seconds of Python for each use of a layer.
        synchronous: whether copies hold everything else up, as on the CPU.
    """

    upload: float
    download: float
    update: float
    host_memory: float
    visit_seconds: float = 1e-4
    synchronous: bool = False


def measured(intervals: Iterable[Interval], layers: int, *, synchronous: bool) -> tuple[list[Visit], Rates]:
    """What a batch does, and how fast the machine is, from the timeline of one batch.

    Of a batch of very many visits (generation, token by token) the first are taken.

    Args:
        intervals: in the order of their beginning.
        layers: how many the plan has; what comes on demand is computed between layers.
        synchronous: whether copies hold everything else up, as on the CPU.
    """
    by_kind: defaultdict[Kind, list[Interval]] = defaultdict(list)
    visits: list[Visit] = []
    around: list[tuple[float, int]] = []  # when they end, and where they are in the list
    for each in intervals:
        by_kind[each.kind].append(each)
        if each.kind in RESOURCES["compute"]:
            seconds = each.end - each.begin
            while around and around[-1][0] < each.end:
                around.pop()
            if around:  # an expert, inside its block
                at = around[-1][1]
                visits[at] = replace(visits[at], seconds=visits[at].seconds - seconds)
            around.append((each.end, len(visits)))
            used = () if each.layer is None or each.layer >= layers else (each.layer,)
            visits.append(Visit(used, seconds, each.kind == "backward", used))
    del visits[_MOST_VISITS:]
    back = {layer for visit in visits if visit.backward for layer in visit.layers}
    known = {layer for visit in visits for layer in visit.layers}
    for drain in by_kind["drain"]:  # of an embedding, whose backward needs no weights
        if drain.layer in known and drain.layer not in back and drain.layer is not None:
            visits.append(Visit((drain.layer,), 0.0, backward=True))
            back.add(drain.layer)

    def rate(resource: str) -> float:
        copies = [each for kind in RESOURCES[resource] for each in by_kind[kind]]
        seconds = sum(each.end - each.begin for each in copies)
        return sum(each.nbytes for each in copies) / seconds if seconds else math.inf

    rates = Rates(
        rate("fetch"),
        rate("drain"),
        rate("optimizer"),
        host_memory=math.inf,
        visit_seconds=0.0,
        synchronous=synchronous,
    )
    return visits, rates


def schedule_visits(plan: Plan, seconds: Sequence[float], *, training: bool) -> list[Visit]:
    """What a batch is expected to do before one has shown it: forward, then a backward that takes twice as long.

    Args:
        plan: its order is taken.
        seconds: of each layer's forward.
        training: whether there is a backward.
    """
    visits = [Visit((layer,), seconds[layer]) for layer in plan.order]
    if training:
        visits += [Visit((layer,), 2 * seconds[layer], True, (layer,)) for layer in reversed(plan.order)]
    return visits
