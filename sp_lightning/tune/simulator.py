"""A batch on paper: the engine's own schedule, walked with clocks in place of copies.

What is fetched when, and into which slot, is decided by the very :class:`~sp_lightning.weights.slots.Slots` and
:class:`~sp_lightning.weights.prefetch.Prefetch` that stream the model; only the device under them is one that moves nothing and
says how long a copy would have taken. So what is predicted is what the engine does, and not what it was meant to do.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.device.timeline import Interval, Kind
from sp_lightning.plan.plan import Plan
from sp_lightning.weights.prefetch import Prefetch
from sp_lightning.weights.slots import Slots

# Walking so many takes about a second for each choice of k and k'.
_MOST_VISITS = 2000

RESOURCES: dict[str, tuple[Kind, ...]] = {
    "compute": ("forward", "backward", "between"),
    "fetch": ("fetch", "return"),
    "drain": ("drain", "store"),
    "optimizer": ("update",),
}
"""What is busy while what happens."""


_STALLS = {
    "gradients": (Wait.REUSE_AFTER_DRAIN,),
    "residents": (Wait.USE_AFTER_RESIDENTS,),
    "activations": (Wait.REUSE_AFTER_STORE, Wait.USE_AFTER_RETURN),
}


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


@dataclass(frozen=True)
class Prediction:
    """How long a batch takes once the trace is known, and why. All times in seconds.

    Attributes:
        seconds: from one batch's beginning to the next one's.
        busy: seconds of work, by resource: ``compute``, ``fetch``, ``drain``, ``optimizer``, ``host memory``.
        stalls: seconds that compute waited for each layer, and in all for gradients to leave, for residents, and for
            activations to leave and to come back.
        intervals: what happened when, from the batch's beginning.
    """

    seconds: float
    busy: dict[str, float]
    stalls: dict[int | str, float]
    intervals: tuple[Interval, ...]

    @property
    def binds(self) -> str:
        """The resource with the most work: no schedule is faster than that."""
        return max(self.busy, key=self.busy.__getitem__)


def predict(
    plan: Plan,
    visits: Sequence[Visit],
    rates: Rates,
    *,
    overlap: Literal["off", "forward", "backward"] = "off",
    host_traffic: float = 0.0,
    batches: int = 3,
) -> Prediction:
    """Walk some batches and look at the last one, whose trace is known.

    Args:
        plan: with its k and k'.
        visits: what a batch does; with a backward among them it trains, and its updates follow.
        rates: of the machine.
        overlap: how updates run, as ``optimizer_overlap``.
        host_traffic: bytes that a batch's updates read and write on the host
            (:class:`~sp_lightning.plan.ledger.Ledger` lists them); they bound it, as the copies' do.
        batches: how many are walked.
    """
    walk = Walk(plan, visits, rates, overlap=overlap)
    for _ in range(batches):
        begun = walk.batch()
    device = walk.device
    intervals = tuple(each._replace(begin=each.begin - begun, end=each.end - begun) for each in device.intervals)
    busy = {
        name: sum(each.end - each.begin for each in intervals if each.kind in kinds)
        for name, kinds in RESOURCES.items()
    }
    busy["host memory"] = (device.copied + host_traffic) / rates.host_memory
    seconds = max(walk.ended - begun, busy["host memory"])
    return Prediction(seconds, busy, dict(walk.stalls), intervals)


@dataclass(frozen=True)
class _Paper:
    """Stands for a layer's memory on the host."""

    layer: int
    nbytes: int
    kind: Kind | None = None


@dataclass(frozen=True)
class _Block:
    """Stands for a layer's block on the host."""

    weights: _Paper


class _PaperDevice(Device):
    """Every stream is a clock; a copy moves it on, a wait sets it to the event's time. The host is a clock, too."""

    def __init__(self, rates: Rates) -> None:
        super().__init__(torch.device("cpu"))
        self._rates = rates
        self.now = dict.fromkeys(Stream, 0.0)
        self.host = 0.0
        self.intervals: list[Interval] = []
        self.copied = 0

    def empty(self, nbytes: int) -> Tensor:
        return super().empty(0)

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Any], stream: Stream, *, why: Wait | None = None
    ) -> None:
        rate = self._rates.upload if stream is Stream.UPLOAD else self._rates.download
        for source in sources:
            kind: Kind = source.kind or ("fetch" if stream is Stream.UPLOAD else "drain")
            self.spend(stream, source.nbytes / rate, kind, source.layer, source.nbytes)
            self.copied += source.nbytes

    def spend(self, stream: Stream, seconds: float, kind: Kind, layer: int | None, nbytes: int = 0) -> None:
        """Something is issued to a stream that takes so long; it does not begin before the host has issued it."""
        begin = max(self.now[stream], self.host)
        self.now[stream] = begin + seconds
        if seconds:
            self.intervals.append(Interval(kind, layer, begin, begin + seconds, nbytes))
        if self._rates.synchronous and stream is not Stream.UPDATE:
            self.host = self.now[Stream.COMPUTE] = self.now[stream]

    def record(self, stream: Stream) -> float:
        return max(self.now[stream], self.host)

    def wait(self, stream: Stream, event: float | None, why: Wait) -> None:
        if event is not None:
            late = event - max(self.now[stream], self.host)
            if late > 0:
                self.now[stream] = event
                if stream is Stream.COMPUTE:
                    self._stalled[why] += late

    def synchronize(self, event: float | None, why: Wait) -> None:
        if event is not None:
            self.host = max(self.host, event)


@dataclass
class Walk:
    """The engine's steps, one after the other. What :class:`~sp_lightning.engine.streamer.Streamer` does, without a model.

    Args:
        plan, visits, rates, overlap: as in :func:`predict`.
    """

    plan: Plan
    visits: Sequence[Visit]
    rates: Rates
    overlap: Literal["off", "forward", "backward"] = "off"
    stalls: dict[int | str, float] = field(default_factory=dict)
    ended: float = 0.0

    def __post_init__(self) -> None:
        self.device = _PaperDevice(self.rates)
        blocks: Any = [_Block(_Paper(index, each.nbytes)) for index, each in enumerate(self.plan.moving)]
        self._slots = Slots(self.plan, blocks, self.device)
        self._prefetch = Prefetch(self.plan, self._slots, self._ready)
        self._updated = dict[int, float]()
        self._used = dict[int, Any]()
        self._flying = deque[tuple[int, float]]()
        self._landed = deque[tuple[int, float]]()
        self._left: float | None = None  # when the last activations have
        self._back = dict[int, float]()  # by visit: when its activations are
        self._training = any(visit.backward for visit in self.visits)
        self._last_backward = {
            layer: at for at, visit in enumerate(self.visits) if visit.backward for layer in visit.layers
        }

    def batch(self) -> float:
        """One batch and its update. Returns when it began."""
        begun = self.ended
        self.device.intervals.clear()
        self.device.copied = 0
        self.device._stalled = dict.fromkeys(Wait, 0.0)
        self.stalls.clear()
        self._back.clear()
        self._prefetch.start("batch", training=self._training)
        self._prefetch.trace.cyclic = not self._training and self.ended > 0
        self._send_residents()
        self._fetch_ahead()
        for at, visit in enumerate(self.visits):
            self._visit(at, visit)
        self._release(self._used)
        if self._training:
            self._settle()
            self._slots.forget(range(len(self.plan.moving)))
        self.ended = max(self.device.now[Stream.COMPUTE], self.device.host)
        for name, why in _STALLS.items():
            self.stalls[name] = sum(self.device._stalled[each] for each in why)
        return begun

    # ------------------------------------------------------------------ one visit

    def _visit(self, at: int, visit: Visit) -> None:
        device = self.device
        if visit.backward and self._release(set(self._used) - {*visit.layers}):
            self._fetch_ahead()
        elif not visit.backward and visit.layers:
            self._release(set(self._used) - {*visit.layers})
        for layer in visit.needs if visit.backward else visit.layers:
            released = visit.backward and layer not in self._used and self._release(set(self._used))
            self._use(layer)
            if released:
                self._fetch_ahead()
        if visit.backward:
            self._bring(at)
        device.host += self.rates.visit_seconds * bool(visit.layers)
        kind: Kind = "backward" if visit.backward else "forward" if visit.layers else "between"
        device.spend(Stream.COMPUTE, visit.seconds, kind, visit.layers[0] if visit.layers else None)
        if visit.backward:
            for layer in visit.layers:
                if self._last_backward[layer] == at and self.plan.layers[layer].gradient_bytes:
                    self._drain(layer)
        elif visit.layers:
            self._store(visit)
            self._release(set(visit.layers))
            self._fetch_ahead()

    def _store(self, visit: Visit) -> None:
        """A forward's activations leave; those of the one before have left by the time compute goes on."""
        device = self.device
        device.wait(Stream.COMPUTE, self._left, Wait.REUSE_AFTER_STORE)
        self._left = None
        if visit.moved:
            device.wait(Stream.DOWNLOAD, device.record(Stream.COMPUTE), Wait.STORE_AFTER_SAVE)
            device.copy([], [_Paper(visit.layers[0], visit.moved, "store")], Stream.DOWNLOAD)
            self._left = device.record(Stream.DOWNLOAD)

    def _bring(self, at: int) -> None:
        """A backward's activations are there, those of the next one are on their way."""
        device = self.device
        device.wait(Stream.COMPUTE, self._left, Wait.REUSE_AFTER_STORE)
        self._left = None
        ahead = next((each for each in range(at + 1, len(self.visits)) if self.visits[each].layers), at)
        for each in dict.fromkeys((at, ahead)):
            visit = self.visits[each]
            if visit.moved and visit.backward and each not in self._back:
                device.wait(Stream.UPLOAD, device.record(Stream.COMPUTE), Wait.RETURN_AFTER_USE)
                device.copy([], [_Paper(visit.layers[0], visit.moved, "return")], Stream.UPLOAD)
                self._back[each] = device.record(Stream.UPLOAD)
        device.wait(Stream.COMPUTE, self._back.get(at), Wait.USE_AFTER_RETURN)

    def _use(self, layer: int) -> None:
        if layer in self._used:
            return
        self._prefetch.trace.visit(layer)
        if not self._ready(layer):
            self.device.synchronize(self._updated[layer], Wait.FETCH_AFTER_UPDATE)
            self._fetch_ahead()
        if layer not in self._slots:
            self._slots.fetch([(layer, self._slots.find(layer, self._prefetch.trace.next_use))])
        before = self.device._stalled[Wait.USE_AFTER_FETCH]
        self._used[layer] = self._slots.use(layer)
        late = self.device._stalled[Wait.USE_AFTER_FETCH] - before
        if late:
            self.stalls[layer] = self.stalls.get(layer, 0.0) + late

    def _release(self, layers: Collection[int]) -> bool:
        released = [self._used.pop(layer) for layer in list(self._used) if layer in layers]
        for slot in released:
            self._slots.release(slot)
        return bool(released)

    def _fetch_ahead(self) -> None:
        for pairs in self._prefetch.transfers():
            self._slots.fetch(pairs)

    def _send_residents(self) -> None:
        device = self.device
        if self._training or not self.ended:
            device.copy([], [_Paper(len(self.plan.moving), self.plan.resident_bytes)], Stream.UPLOAD)
            device.wait(Stream.COMPUTE, device.record(Stream.UPLOAD), Wait.USE_AFTER_RESIDENTS)

    # ------------------------------------------------------------------ gradients and updates

    def _drain(self, layer: int) -> None:
        device = self.device
        nbytes = self._gradients_of(layer)
        device.wait(Stream.DOWNLOAD, device.record(Stream.COMPUTE), Wait.DRAIN_AFTER_GRADIENT)
        device.copy([], [_Paper(layer, nbytes)], Stream.DOWNLOAD)
        self._flying.append((layer, device.record(Stream.DOWNLOAD)))
        self._retire(self.plan.k_prime)

    def _retire(self, keep: int) -> None:
        while len(self._flying) > keep:
            layer, landed = self._flying.popleft()
            self.device.wait(Stream.COMPUTE, landed, Wait.REUSE_AFTER_DRAIN)
            self._landed.append((layer, landed))
        while len(self._landed) > self.plan.k_prime + 1:
            self._apply(*self._landed.popleft())

    def _apply(self, layer: int, landed: float) -> None:
        self.device.synchronize(landed, Wait.APPLY_AFTER_DRAIN)
        if self.overlap == "backward":
            self._update(layer)

    def _settle(self) -> None:
        self._drain(len(self.plan.moving))
        self._retire(0)
        while self._landed:
            self._apply(*self._landed.popleft())
        if self.overlap != "backward":
            for layer in self._update_order():
                self._update(layer)
        if self.overlap == "off":
            self.device.synchronize(self.device.now[Stream.UPDATE], Wait.READ_AFTER_UPDATE)

    def _update_order(self) -> Iterator[int]:
        moving, layers = len(self.plan.moving), len(self.plan.layers)
        tables = range(moving - len(self.plan.tables), moving)
        return iter(dict.fromkeys((moving, *tables, *self._prefetch.order("batch"), *range(layers))))

    def _update(self, layer: int) -> None:
        seconds = self._gradients_of(layer) / self.rates.update
        self.device.spend(Stream.UPDATE, seconds, "update", layer)
        self._updated[layer] = self.device.now[Stream.UPDATE]

    def _ready(self, layer: int) -> bool:
        return self._updated.get(layer, 0.0) <= self.device.host

    def _gradients_of(self, layer: int) -> int:
        moving = self.plan.moving
        return (moving[layer] if layer < len(moving) else self.plan.residents).gradient_bytes


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
