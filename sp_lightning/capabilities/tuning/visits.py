"""The visits of a batch (its layer calls), the speed of the machine, and the prediction that follows from both."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sp_lightning.core.device.timeline import Interval, Kind

# Simulating this number of visits takes about a second for each choice of k and k'.
_MOST_VISITS = 2000

RESOURCES: dict[str, tuple[Kind, ...]] = {
    "compute": ("forward", "backward", "between"),
    "fetch": ("fetch", "return", "bring"),
    "drain": ("drain", "store", "take"),
    "optimizer": ("update",),
    "links": ("reduce",),
    "disk": ("read", "write"),
}
"""The kinds of intervals during which each resource is busy."""


@dataclass(frozen=True)
class Visit:
    """One use of some layers by a batch, in forward or in backward.

    Attributes:
        layers: indices of the layers that one module's call uses; empty for computation between layers.
        seconds: the time of the device's computation.
        backward: True for the layers' backward, after which their gradients are offloaded.
        needs: in backward, the layers whose weights are needed, in this order. The backward of an embedding needs none.
        moved: bytes of activations that are offloaded after a forward, or uploaded for a backward.
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
    """The speed of the machine. If no other unit is stated, values are in bytes per second.

    Attributes:
        upload, download: copies to the device, and to the host.
        update: gradients that the optimizer consumes, on the CPU or the device.
        host_memory: reads and writes of host memory.
        visit_seconds: seconds of Python for each use of layers.
        weight_seconds: additional seconds of Python for each weight of those layers.
        synchronous: True if nothing else runs during a copy, as on the CPU.
        links: gradients that are summed over the devices of a node.
        disk: reads or writes of a disk.
        update_upload, update_download: if the optimizer steps on the device, bytes that an update uploads and downloads for each
            byte of its layer's gradients; otherwise 0.
        step: gradients that the optimizer consumes in steps of staying layers.
    """

    upload: float
    download: float
    update: float
    host_memory: float
    visit_seconds: float = 1e-4
    weight_seconds: float = 0.0
    synchronous: bool = False
    links: float = math.inf
    disk: float = math.inf
    update_upload: float = 0.0
    update_download: float = 0.0
    step: float = math.inf


def measured(
    intervals: Iterable[Interval], layers: int, *, synchronous: bool, stay: Collection[int] = ()
) -> tuple[list[Visit], Rates]:
    """Reads the visits of one batch, and the speed of the machine, from its timeline.

    If a batch has very many visits (generation, token by token), only the first ones are read.

    Args:
        intervals: the timeline, ordered by the begin of the intervals.
        layers: the number of layers of the plan. Layers with a higher index are uploaded on demand; their computation
            counts as computation between layers.
        synchronous: True if nothing else runs during a copy, as on the CPU.
        stay: the indices of layers that stay on the device. Their updates run on the GPU, and do not count for ``update``.

    Returns:
        The visits and the rates. Host memory and steps of staying layers count as unlimited, because a timeline does not
        contain them. The host's own time is part of the visits: the device waits for the host inside of them.
    """
    by_kind: defaultdict[Kind, list[Interval]] = defaultdict(list)
    visits: list[Visit] = []
    enclosing: list[tuple[float, int]] = []  # the enclosing calls: their end, and their index in visits
    for interval in intervals:
        if interval.kind != "update" or interval.layer not in stay:
            by_kind[interval.kind].append(interval)
        if interval.kind in RESOURCES["compute"]:
            seconds = interval.end - interval.begin
            while enclosing and enclosing[-1][0] < interval.end:
                enclosing.pop()
            if enclosing:  # an expert inside its block: its time does not count for the block
                outer = enclosing[-1][1]
                visits[outer] = replace(visits[outer], seconds=visits[outer].seconds - seconds)
            enclosing.append((interval.end, len(visits)))
            used = () if interval.layer is None or interval.layer >= layers else (interval.layer,)
            visits.append(Visit(used, seconds, interval.kind == "backward", used))
    del visits[_MOST_VISITS:]
    with_backward = {layer for visit in visits if visit.backward for layer in visit.layers}
    known = {layer for visit in visits for layer in visit.layers}
    # The backward of an embedding needs no weights, so the timeline contains only the copy of its gradients.
    for drain in by_kind["drain"]:
        if drain.layer in known and drain.layer not in with_backward and drain.layer is not None:
            visits.append(Visit((drain.layer,), 0.0, backward=True))
            with_backward.add(drain.layer)

    updated = sum(update.nbytes for update in by_kind["update"])
    uploaded, downloaded = (sum(copy.nbytes for copy in by_kind[kind]) / max(updated, 1) for kind in ("bring", "take"))
    # The time of an update on the device is mostly that of its transfers, which `update_upload` and `update_download` describe.
    update = math.inf if downloaded else _rate(by_kind, RESOURCES["optimizer"])
    rates = Rates(
        _rate(by_kind, RESOURCES["fetch"]),
        _rate(by_kind, RESOURCES["drain"]),
        update,
        host_memory=math.inf,
        visit_seconds=0.0,
        synchronous=synchronous,
        links=_rate(by_kind, RESOURCES["links"]),
        update_upload=uploaded,
        update_download=downloaded,
    )
    return visits, rates


def _rate(by_kind: Mapping[Kind, Sequence[Interval]], kinds: Sequence[Kind]) -> float:
    """Returns the bytes per second in intervals of these kinds; infinite if no bytes were copied."""
    seconds = sum(copy.end - copy.begin for kind in kinds for copy in by_kind[kind])
    nbytes = sum(copy.nbytes for kind in kinds for copy in by_kind[kind])
    # The interval of a layer without gradients has no bytes.
    return nbytes / seconds if nbytes and seconds else math.inf


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a batch whose trace is known. All times are in seconds.

    Attributes:
        seconds: from the beginning of one batch to that of the next.
        busy: seconds of work by resource: ``compute``, ``fetch``, ``drain``, ``optimizer``, ``links`` (between
            devices), ``disk`` (if it is used), ``host`` (Python), ``host memory`` (of the node), ``gpu steps`` (of staying
            layers, if there are any).
        stalls: seconds that compute waited, by cause. The keys are the index of each layer, ``gradients`` (their offload),
            ``residents``, and ``activations`` (their offload and upload).
        intervals: all copies and computations, in seconds from the beginning of the batch.
    """

    seconds: float
    busy: dict[str, float]
    stalls: dict[int | str, float]
    intervals: tuple[Interval, ...]

    def beside(self, other: Prediction, times: int) -> Prediction:
        """Returns the average of this prediction and ``times`` copies of ``other``, with the intervals of this prediction."""

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
        """The resource with the most work. No schedule is faster than this work."""
        return max(self.busy, key=self.busy.__getitem__)
