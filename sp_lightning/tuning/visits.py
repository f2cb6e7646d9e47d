"""What a batch does, visit by visit, how fast the machine is, and what a batch takes by that: measured, or expected."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sp_lightning.device.timeline import Interval, Kind

_BYTES = ("upload", "download", "update", "step", "host_memory", "links", "network", "disk")  # rates, bytes/s
# Simulating so many visits takes about a second for each choice of k and k'.
_MOST_VISITS = 2000

RESOURCES: dict[str, tuple[Kind, ...]] = {
    "compute": ("forward", "backward", "between"),
    "fetch": ("fetch", "return", "bring"),
    "drain": ("drain", "store", "take"),
    "optimizer": ("update",),
    "links": ("reduce", "gather"),
    "network": ("network",),
    "disk": ("read", "write"),
}
"""The kinds of intervals during which each resource is busy."""


@dataclass(frozen=True)
class Visit:
    """One use of some layers by a batch, in forward or in backward.

    Attributes:
        layers: indices of the layers that one module's call uses; none for what is computed between layers.
        seconds: how long the device computes.
        backward: whether this is the layers' backward, after which their gradients leave.
        needs: in backward, the layers whose weights are needed, in that order. The backward of an embedding needs none.
        moved: bytes of activations that leave after a forward, or come back for a backward.
        share: the share of stacked experts that a forward uses.
    """

    layers: tuple[int, ...]
    seconds: float
    backward: bool = False
    needs: tuple[int, ...] = ()
    moved: int = 0
    share: float = 1.0


@dataclass(frozen=True)
class Rates:
    """How fast the machine is. All rates are in bytes per second.

    Attributes:
        upload, download: bytes that are copied to the device, and to the host.
        update: bytes of gradients that the optimizer consumes, where it steps.
        host_memory: bytes that the host reads and writes.
        visit_seconds: seconds of Python for each use of layers.
        weight_seconds: the same, more for each weight of those layers.
        synchronous: whether everything else stands still during a copy, as on the CPU.
        links: bytes of gradients that are added up over several devices of a node.
        network: bytes of gradients that are added up over several nodes.
        disk: bytes that a disk reads or writes.
        come, leave: if the device steps layers, bytes that come to it and leave it for each byte of a layer's gradients; 0
            otherwise.
        sliced: whether the devices of a node upload layers together, with ``transfer="sharded"``. Then weights pass the links,
            too, at the same rate.
        step: bytes of gradients that the steps of layers consume that stay on the device.
    """

    upload: float
    download: float
    update: float
    host_memory: float
    visit_seconds: float = 1e-4
    weight_seconds: float = 0.0
    synchronous: bool = False
    links: float = math.inf
    network: float = math.inf
    disk: float = math.inf
    sliced: bool = False
    come: float = 0.0
    leave: float = 0.0
    step: float = math.inf

    def slowed(self, times: float) -> Rates:
        """The same if everything takes so many times as long."""
        slower = {name: getattr(self, name) / times for name in _BYTES}
        return replace(
            self, visit_seconds=times * self.visit_seconds, weight_seconds=times * self.weight_seconds, **slower
        )


def measured(
    intervals: Iterable[Interval], layers: int, *, synchronous: bool, stay: Collection[int] = ()
) -> tuple[list[Visit], Rates]:
    """Reads from the timeline of one batch what a batch does and how fast the machine is.

    Of a batch with very many visits (generation, token by token) only the first are read.

    Args:
        intervals: the timeline, in the order in which the intervals began.
        layers: how many layers the plan has. Layers with a higher index come on demand; the time of what uses them
            counts as computed between layers.
        synchronous: whether everything else stands still during a copy, as on the CPU.
        stay: the indices of layers that stay on the device, whose updates say nothing of the host's.

    Returns:
        The visits, and the rates. Of the rates, the host's memory and steps of layers that stay count as unlimited, because a
        timeline does not show them.
        The host's own time is in the visits: where it binds, the device waits for it inside of them.
    """
    by_kind: defaultdict[Kind, list[Interval]] = defaultdict(list)
    visits: list[Visit] = []
    enclosing: list[tuple[float, int]] = []  # the calls that are still running: their end, and their index in visits
    for interval in intervals:
        if interval.kind != "update" or interval.layer not in stay:
            by_kind[interval.kind].append(interval)
        if interval.kind in RESOURCES["compute"]:
            seconds = interval.end - interval.begin
            while enclosing and enclosing[-1][0] < interval.end:
                enclosing.pop()
            if enclosing:  # an expert, inside its block: its time is not the block's
                outer = enclosing[-1][1]
                visits[outer] = replace(visits[outer], seconds=visits[outer].seconds - seconds)
            enclosing.append((interval.end, len(visits)))
            used = () if interval.layer is None or interval.layer >= layers else (interval.layer,)
            visits.append(Visit(used, seconds, interval.kind == "backward", used))
    del visits[_MOST_VISITS:]
    with_backward = {layer for visit in visits if visit.backward for layer in visit.layers}
    known = {layer for visit in visits for layer in visit.layers}
    # The backward of an embedding needs no weights, so the timeline shows only that its gradients have left.
    for drain in by_kind["drain"]:
        if drain.layer in known and drain.layer not in with_backward and drain.layer is not None:
            visits.append(Visit((drain.layer,), 0.0, backward=True))
            with_backward.add(drain.layer)

    updated = sum(update.nbytes for update in by_kind["update"])
    come, leave = (sum(copy.nbytes for copy in by_kind[kind]) / max(updated, 1) for kind in ("bring", "take"))
    rates = Rates(
        _rate(by_kind, RESOURCES["fetch"], "gather"),
        _rate(by_kind, RESOURCES["drain"]),
        math.inf if leave else _rate(by_kind, RESOURCES["optimizer"]),  # on the device it is its transfers, nearly
        host_memory=math.inf,
        visit_seconds=0.0,
        synchronous=synchronous,
        links=_rate(by_kind, ["reduce"]),
        come=come,
        leave=leave,
    )
    return visits, rates


def _rate(by_kind: Mapping[Kind, Sequence[Interval]], kinds: Sequence[Kind], *more: Kind) -> float:
    """Bytes of these kinds per second of theirs and of more that brings some of the same bytes."""
    seconds = sum(copy.end - copy.begin for kind in (*kinds, *more) for copy in by_kind[kind])
    nbytes = sum(copy.nbytes for kind in kinds for copy in by_kind[kind])
    return nbytes / seconds if nbytes and seconds else math.inf  # a layer without gradients leaves, too, with no bytes


@dataclass(frozen=True)
class Prediction:
    """How long a batch takes once the trace is known, and why. All times are in seconds.

    Attributes:
        seconds: from the beginning of one batch to that of the next.
        busy: seconds of work by resource: ``compute``, ``fetch``, ``drain``, ``optimizer``, ``links`` (between
            devices), ``network`` (between nodes, if there are several), ``disk`` (if something is there), ``host``
            (Python's own time), ``host memory`` (of the node), ``gpu steps`` (of layers that stay, if there are any).
        stalls: seconds that compute waited, by what it waited for. The keys are the index of each layer, ``gradients``
            (until they had left), ``residents``, and ``activations`` (until they had left or had come back).
        intervals: what happened when, counted from the beginning of the batch.
    """

    seconds: float
    busy: dict[str, float]
    stalls: dict[int | str, float]
    intervals: tuple[Interval, ...]

    def beside(self, other: Prediction, times: int) -> Prediction:
        """The average with so many others. What happened when is this one's."""

        def mean(mine: float, its: float) -> float:
            return (mine + times * its) / (times + 1)

        return Prediction(
            mean(self.seconds, other.seconds),
            {name: mean(busy, other.busy.get(name, 0.0)) for name, busy in self.busy.items()},
            {key: mean(self.stalls.get(key, 0.0), other.stalls.get(key, 0.0)) for key in (*self.stalls, *other.stalls)},
            self.intervals,
        )

    @property
    def binds(self) -> str:
        """The resource with the most work. No schedule is faster than that."""
        return max(self.busy, key=self.busy.__getitem__)
