"""A batch on paper: the engine's own schedule, walked with clocks in place of copies.

What is fetched when, and into which slot, and which gradients leave when, is decided by the very
:class:`~sp_lightning.engine.residency.Residency` and :class:`~sp_lightning.weights.gradients.Drains` that stream the model; only
the device under them is one that moves nothing and says how long a copy would have taken. So what is predicted is what the
engine does, and not what it was meant to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sp_lightning.device.timeline import Interval, Kind
from sp_lightning.device.waits import Stream, Wait
from sp_lightning.engine.residency import Residency
from sp_lightning.plan.plan import Plan, PlannedLayer
from sp_lightning.tune.clocks import ClockDevice, HostBytes
from sp_lightning.tune.visits import RESOURCES, Rates, Visit
from sp_lightning.weights.gradients import Drains
from sp_lightning.weights.layer import Kind as LayerKind
from sp_lightning.weights.layer import StreamedLayer
from sp_lightning.weights.prefetch import Prefetch
from sp_lightning.weights.slots import Slot, Slots, Staged

_STALLS = {
    "gradients": (Wait.REUSE_AFTER_DRAIN,),
    "residents": (Wait.USE_AFTER_RESIDENTS,),
    "activations": (Wait.REUSE_AFTER_STORE, Wait.USE_AFTER_RETURN),
}


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


class _SimulatedLayer(StreamedLayer):
    """A layer without parameters.

    Attributes:
        updated: when its last update is done.
    """

    def __init__(self, index: int, kind: LayerKind, planned: PlannedLayer, *, expert: bool) -> None:
        without: Any = None
        super().__init__(index, kind, planned, without, without, expert=expert)
        self.updated = 0.0

    @property
    def outdated(self) -> bool:
        """Whoever updates says so."""
        return False


class _Source:
    """Updates as times: a layer's bytes are there when its update is done."""

    def __init__(self, device: ClockDevice) -> None:
        self._device = device

    def ready(self, layer: StreamedLayer) -> bool:
        """Whether its update is done."""
        return _simulated(layer).updated <= self._device.host

    def wait(self, layer: StreamedLayer) -> None:
        """The host waits for its update."""
        self._device.synchronize(_simulated(layer).updated, Wait.FETCH_AFTER_UPDATE)

    def stage(self, layer: StreamedLayer) -> Staged:
        """As many bytes as its block has."""
        stand_in: Any = HostBytes(layer.index, layer.planned.nbytes)
        return stand_in, None


class _NoTenants:
    """No module has the memory of layers without parameters."""

    def before_use(self, layer: StreamedLayer) -> None:
        """Nothing was written."""

    def before_fetch(self, slots: Sequence[Slot]) -> None:
        """Nothing views them."""

    def fetched(self, layer: StreamedLayer) -> None:
        """It has no versions."""

    def move_in(self, layer: StreamedLayer, slot: Slot) -> None:
        """It has no device parameters."""

    def move_out(self, layer: StreamedLayer, slot: Slot) -> None:
        """It has no device parameters."""

    def moved_out(self, layer: StreamedLayer, slot: Slot) -> None:
        """It has no device parameters."""

    def let_go(self) -> bool:
        """Nobody keeps anything."""
        return False


class _Leaving(NamedTuple):
    """A layer's gradients on their way, and when they have landed."""

    layer: _SimulatedLayer
    landed: float


class Walk:
    """A model's visits, for which the engine's own :class:`Residency` and :class:`Drains` do what they would do.

    Args:
        plan, visits, rates, overlap: as in :func:`predict`.

    Attributes:
        device: whose streams are clocks.
        stalls: seconds that compute waited, by layer and by reason, in the last batch.
        ended: when that was over.
    """

    def __init__(
        self,
        plan: Plan,
        visits: Sequence[Visit],
        rates: Rates,
        *,
        overlap: Literal["off", "forward", "backward"] = "off",
    ) -> None:
        self.device = ClockDevice(rates)
        self.stalls: dict[int | str, float] = {}
        self.ended = 0.0
        self._visits = visits
        self._rates = rates
        self._overlap = overlap
        kinds = (LayerKind.BLOCK, LayerKind.MASTERS, LayerKind.TABLE, LayerKind.RESIDENTS)
        planned = [
            (kind, each)
            for kind, group in zip(kinds, (plan.layers, plan.masters, plan.tables, (plan.residents,)), strict=True)
            for each in group
        ]
        self._layers = [
            _SimulatedLayer(index, kind, each, expert=index in plan.experts)
            for index, (kind, each) in enumerate(planned)
        ]
        *moving, self._resident = self._layers
        source = _Source(self.device)
        slots = Slots(plan, moving, self.device)
        prefetch = Prefetch(plan, slots, self._layers, source.ready)
        self._residency = Residency(slots, prefetch, source, _NoTenants(), noted=lambda: None)
        self._drains = Drains[_Leaving](
            self.device, plan.k_prime + 1, free=lambda leaving: None, apply=lambda leaving: self._apply(leaving.layer)
        )
        self._left: float | None = None  # when the last activations have
        self._back = dict[int, float]()  # by visit: when its activations are
        self._training = any(visit.backward for visit in visits)
        self._last_backward = {layer: at for at, visit in enumerate(visits) if visit.backward for layer in visit.layers}

    def batch(self) -> float:
        """One batch and its update. Returns when it began."""
        begun, prefetch = self.ended, self._residency.prefetch
        self.device.clear()
        self.stalls.clear()
        self._back.clear()
        prefetch.start("batch", training=self._training)
        prefetch.trace.cyclic = not self._training and self.ended > 0
        self._send_residents()
        self._residency.fetch_ahead()
        for at, visit in enumerate(self._visits):
            self._visit(at, visit)
        self._residency.release_unpinned()
        if self._training:
            self._settle()
            for layer in self._layers:
                layer.invalidate()
        self.ended = max(self.device.now[Stream.COMPUTE], self.device.host)
        for name, why in _STALLS.items():
            self.stalls[name] = self.device.stall_seconds(*why)
        return begun

    # ------------------------------------------------------------------ one visit

    def _visit(self, at: int, visit: Visit) -> None:
        device, residency = self.device, self._residency
        layers = [self._layers[index] for index in visit.layers]
        if visit.backward:
            residency.pre_backward(layers)
            for index in visit.needs:
                self._timed(self._layers[index], lambda layer: residency.unpack(layer))
            self._bring(at)
        else:
            if layers:
                residency.release_unpinned(keep=layers)
            for layer in layers:
                self._timed(layer, lambda each: residency.begin_call([each]))
        device.host += self._rates.visit_seconds * bool(layers)
        kind: Kind = "backward" if visit.backward else "forward" if layers else "between"
        device.spend(Stream.COMPUTE, visit.seconds, kind, visit.layers[0] if layers else None)
        if visit.backward:
            for layer in layers:
                if self._last_backward[layer.index] == at and layer.planned.gradient_bytes:
                    self._drain(layer)
        elif layers:
            self._store(visit)
            residency.end_call(layers)
            residency.fetch_ahead()

    def _timed(self, layer: StreamedLayer, use: Callable[[StreamedLayer], Any]) -> None:
        """Uses a layer, and notes how long compute waited for it."""
        before = self.device.stall_seconds(Wait.USE_AFTER_FETCH)
        use(layer)
        late = self.device.stall_seconds(Wait.USE_AFTER_FETCH) - before
        if late:
            self.stalls[layer.index] = self.stalls.get(layer.index, 0.0) + late

    def _store(self, visit: Visit) -> None:
        """A forward's activations leave; those of the one before have left by the time compute goes on."""
        device = self.device
        device.wait(Stream.COMPUTE, self._left, Wait.REUSE_AFTER_STORE)
        self._left = None
        if visit.moved:
            device.wait(Stream.DOWNLOAD, device.record(Stream.COMPUTE), Wait.STORE_AFTER_SAVE)
            device.copy([], [HostBytes(visit.layers[0], visit.moved, "store")], Stream.DOWNLOAD)
            self._left = device.record(Stream.DOWNLOAD)

    def _bring(self, at: int) -> None:
        """A backward's activations are there, those of the next one are on their way."""
        device = self.device
        device.wait(Stream.COMPUTE, self._left, Wait.REUSE_AFTER_STORE)
        self._left = None
        ahead = next((each for each in range(at + 1, len(self._visits)) if self._visits[each].layers), at)
        for each in dict.fromkeys((at, ahead)):
            visit = self._visits[each]
            if visit.moved and visit.backward and each not in self._back:
                device.wait(Stream.UPLOAD, device.record(Stream.COMPUTE), Wait.RETURN_AFTER_USE)
                device.copy([], [HostBytes(visit.layers[0], visit.moved, "return")], Stream.UPLOAD)
                self._back[each] = device.record(Stream.UPLOAD)
        device.wait(Stream.COMPUTE, self._back.get(at), Wait.USE_AFTER_RETURN)

    def _send_residents(self) -> None:
        device = self.device
        if self._training or not self.ended:
            device.copy([], [HostBytes(self._resident.index, self._resident.planned.nbytes)], Stream.UPLOAD)
            device.wait(Stream.COMPUTE, device.record(Stream.UPLOAD), Wait.USE_AFTER_RESIDENTS)

    # ------------------------------------------------------------------ gradients and updates

    def _drain(self, layer: _SimulatedLayer) -> None:
        device = self.device
        device.wait(Stream.DOWNLOAD, device.record(Stream.COMPUTE), Wait.DRAIN_AFTER_GRADIENT)
        device.copy([], [HostBytes(layer.index, layer.planned.gradient_bytes)], Stream.DOWNLOAD)
        self._drains.add(_Leaving(layer, device.record(Stream.DOWNLOAD)))

    def _apply(self, layer: _SimulatedLayer) -> None:
        if self._overlap == "backward":
            self._update(layer)

    def _settle(self) -> None:
        self._drain(self._resident)
        self._drains.settle()
        if self._overlap != "backward":
            for layer in self._update_order():
                self._update(_simulated(layer))
        if self._overlap == "off":
            self.device.synchronize(self.device.now[Stream.UPDATE], Wait.READ_AFTER_UPDATE)

    def _update_order(self) -> Iterator[StreamedLayer]:
        tables = [layer for layer in self._layers if layer.kind is LayerKind.TABLE]
        blocks = [layer for layer in self._layers if layer.kind is LayerKind.BLOCK]
        return iter(dict.fromkeys((self._resident, *tables, *self._residency.prefetch.order("batch"), *blocks)))

    def _update(self, layer: _SimulatedLayer) -> None:
        seconds = layer.planned.gradient_bytes / self._rates.update
        self.device.spend(Stream.UPDATE, seconds, "update", layer.index)
        layer.updated = self.device.now[Stream.UPDATE]


def _simulated(layer: StreamedLayer) -> _SimulatedLayer:
    assert isinstance(layer, _SimulatedLayer)
    return layer
