"""Predicts a batch by simulation: the engine's own schedule runs with clocks in place of copies.

The classes that stream the model, :class:`~sp_lightning.core.engine.schedule.Residency` and
:class:`~sp_lightning.core.weights.gradients.Transfers`, decide which layer is uploaded when and into which slot, and when
gradients are offloaded. Only the device is replaced (``clocks``): it copies nothing and predicts the time of each copy. So
uploads and gradients follow the engine as it is. Optimizer steps are a model: this file repeats the rules of ``layerwise``.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from sp_lightning.core.device.device import Stream, Wait
from sp_lightning.core.device.timeline import Kind
from sp_lightning.core.engine.schedule import Prefetch, Residency
from sp_lightning.core.plan.plan import Plan, PlannedLayer
from sp_lightning.core.updates.layer_stepper import FRESH
from sp_lightning.core.weights.bound_weights import BoundWeights
from sp_lightning.core.weights.gradients import Transfers
from sp_lightning.core.weights.layer import Kind as LayerKind
from sp_lightning.core.weights.layer import Slot, StreamedLayer, kinds
from sp_lightning.core.weights.ring import BlockSource, Slots, Staged, Uploads
from sp_lightning.tools.planner.prediction.clocks import ClockDevice, HostBytes
from sp_lightning.tools.planner.prediction.visits import RESOURCES, Prediction, Rates, Visit

_STALLS = {
    "gradients": (Wait.REUSE_AFTER_DRAIN,),
    "residents": (Wait.USE_AFTER_RESIDENTS,),
    "activations": (Wait.REUSE_AFTER_STORE, Wait.USE_AFTER_RETURN),
}


class _SimulatedLayer(StreamedLayer):
    """A layer without parameters."""

    def __init__(self, index: int, kind: LayerKind, planned: PlannedLayer, *, expert: bool) -> None:
        without: Any = None
        super().__init__(index, kind, planned, without, without, expert=expert)

    @property
    def stale(self) -> bool:
        """False: at the end of a step :class:`Walk` invalidates the layer itself."""
        return False


class _Unbound(BoundWeights):
    """Binds nothing, because a simulated layer has no parameters."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.held = set()

    def fetched(self, layer: StreamedLayer) -> None: ...

    def attach(self, layer: StreamedLayer, slot: Slot) -> None: ...

    def release(self, layer: StreamedLayer, slot: Slot) -> None:
        self._slots.release(layer, slot)

    def rest(self, layer: StreamedLayer) -> None: ...

    def written(self, layer: StreamedLayer) -> bool:
        return False


class _Source(BlockSource):
    """A source of layers that are ready as soon as their update is over. An update is only a time.

    Args:
        device: the simulated device, which only counts time.
        on_disk: bytes of weights that are read from a disk, by the layer's index.
    """

    def __init__(self, device: ClockDevice, on_disk: Mapping[int, int]) -> None:
        self._device = device
        self.waiting = deque[StreamedLayer]()  # layers whose update on the device is not issued yet
        self.issue: Callable[[StreamedLayer | None], None] = lambda layer: None
        """Issues updates of the waiting layers, up to that of the given layer. None: as many as begin while the link is idle."""
        self._on_disk = on_disk
        self.shares = dict[int, float]()  # the uploaded share of each layer of stacked experts
        self.updated = defaultdict[int, float](float)  # the end of the last update of each layer, in seconds
        self.stepped = dict[int, float]()  # the end of the kernels of each layer's last step on the device
        self.fresh = dict[StreamedLayer, float]()  # the time until which casts from a step stay on the device

    def ready(self, layer: StreamedLayer) -> bool:
        """Returns True if the layer's update is complete. First issues waiting updates for which the link is idle."""
        self.issue(None)
        return layer not in self.waiting and self._there(layer) <= self._device.host

    def _there(self, layer: StreamedLayer) -> float:
        """Returns the time from which a transfer may read the updated layer.

        This is the end of the update, or the end of the step's kernels if the layer's new casts are still on the device.
        """
        stepped = self.stepped.get(layer.index, 0.0)
        on_device = max(stepped, self._device.host) <= self.fresh.get(layer, -1.0)
        return stepped if on_device else self.updated[layer.index]

    def wait(self, layer: StreamedLayer) -> None:
        """Makes the host wait for the layer's update, which is issued if necessary."""
        self.issue(layer)
        self._device.synchronize(self._there(layer), Wait.FETCH_AFTER_UPDATE)

    def stage(self, layer: StreamedLayer) -> Staged:
        """Returns a placeholder for the bytes of the layer that are uploaded; no bytes if its casts are still on the device."""
        nbytes = int((self.shares.get(layer.index, 1.0) if layer.planned.rows else 1.0) * layer.planned.nbytes)
        if self._device.host <= self.fresh.pop(layer, -1.0):
            nbytes = 0
        stand_in: Any = HostBytes(layer.index, nbytes, self._on_disk.get(layer.index, 0))
        return stand_in, None


class Walk:
    """Runs through the visits of a batch as the engine would, with its own :class:`Residency` and :class:`Transfers`.

    With several devices, one is simulated: all do the same at the same time. They share the host's memory, and each update
    runs once for all.

    Layers that stay on the device are not among the layers of the plan. After backward, their optimizer step follows the model's
    kernels.

    Args:
        plan: the layers, k and k'.
        visits: the visits of a batch. If one is a backward, the batch trains, and updates follow.
        rates: the speed of the machine.
        overlap: when updates run, as in ``optimizer_overlap``.
        frees: True if ``"backward"`` frees gradients after each update, so that at most one layer's gradients are kept.
        on_disk: bytes on a disk, by the index of the layer: optimizer state in training, else weights.

    Attributes:
        device: the simulated device, which only counts time.
        stalls: seconds that compute waited in the last batch, with the keys of :attr:`Prediction.stalls`.
        host_seconds: seconds of Python for the visits of the last batch.
        ended: the end of the last batch.
    """

    def __init__(
        self,
        plan: Plan,
        visits: Sequence[Visit],
        rates: Rates,
        *,
        overlap: Literal["off", "forward", "backward"] = "off",
        frees: bool = False,
        on_disk: Mapping[int, int] | None = None,
    ) -> None:
        self.device = ClockDevice(rates)
        self.stalls: dict[int | str, float] = {}
        self.host_seconds = self.ended = 0.0
        self._plan = plan
        self._visits = visits
        self._rates = rates
        self._overlap = overlap
        self._layers = [
            _SimulatedLayer(index, kind, planned, expert=index in plan.experts)
            for index, (kind, planned) in enumerate(zip(kinds(plan), (*plan.moving, plan.residents), strict=True))
        ]
        *moving, self._resident = self._layers
        self._training = any(visit.backward for visit in visits)
        # In training, updates read optimizer state from the disk; in inference, uploads read weights.
        self._on_disk = on_disk = on_disk or {}
        self._state = on_disk if self._training else {}
        weights = {} if self._training else on_disk
        self._source = _Source(self.device, weights)
        slots = Slots(plan, moving, self.device, Uploads(self.device))
        prefetch = Prefetch(plan, slots, self._layers, self._source.ready)
        self._residency = Residency(slots, prefetch, self._source, _Unbound(slots), note_memory=lambda: None)
        self._drains = Transfers(self.device, plan.k_prime + 1, self._apply)
        self._on_device = bool(rates.update_download) and self._training
        # True if the gradients of any number of layers may wait on the host for their updates (see `_apply`).
        self._gradients_wait = not (frees or self._on_device or self._state or plan.ranks > 1)
        self._step_begun = 0.0
        self._left_slots = deque([0.0, 0.0])  # the time from which each of the two step slots is free
        self._source.issue = self._issue
        # The time at which the host has each layer's gradients in this backward.
        self._complete: list[tuple[float, Any]] = []
        self._early = 0.0  # the end of the last update in this backward, if gradients do not wait for the step
        self._left: float | None = None  # the time at which the activations of the last forward are offloaded
        self._back = dict[int, float]()  # by the index of a visit, the time at which its activations are uploaded
        self._last_backward = {layer: at for at, visit in enumerate(visits) if visit.backward for layer in visit.layers}

    def predict(self, *, host_traffic: float = 0.0, batches: int | None = None) -> Prediction:
        """Simulates some batches and returns the prediction of the last one, whose trace is known.

        In inference, a batch may upload a layer more than the next one. So its seconds are the mean of several batches.

        Args:
            host_traffic: bytes that the updates of a batch read and write on the host. Together with the copied bytes they bound
                the time of a batch from below, by the rate of host memory.
            batches: the number of simulated batches; None for 3 in training, and for 9 in inference.
        """
        begins = [self.batch() for _ in range(batches or (3 if self._training else 9))]
        begun, steady = begins[-1], begins[3:] or begins[-1:]
        seconds = (self.ended - steady[0]) / len(steady)
        moved = (event._replace(begin=event.begin - begun, end=event.end - begun) for event in self.device.intervals)
        intervals = tuple(moved)
        busy = {
            name: sum(event.end - event.begin for event in intervals if event.kind in kinds)
            for name, kinds in RESOURCES.items()
            if name != "disk" or self._on_disk
        }
        if self._plan.stay:
            stepped = [each for each in intervals if each.kind == "update" and each.layer is None]
            busy["gpu steps"] = sum(each.end - each.begin for each in stepped)
            busy["optimizer"] -= busy["gpu steps"]
        busy["host"] = self.host_seconds
        busy["host memory"] = (self._plan.ranks * self.device.copied + host_traffic) / self._rates.host_memory
        return Prediction(max(seconds, busy["host memory"]), busy, dict(self.stalls), intervals)

    def batch(self) -> float:
        """Simulates one batch and its update. Returns the time of its begin."""
        begun, device, prefetch = self.ended, self.device, self._residency.prefetch
        device.clear()
        self._back.clear()
        self._early = self.host_seconds = 0.0
        prefetch.start("batch", training=self._training)
        prefetch.trace.cyclic = not self._training and self.ended > 0
        self._residency.let_rest(not self._training)
        if self._training or not self.ended:
            device.transfer("fetch", self._resident.index, self._resident.planned.nbytes)
            device.wait(Stream.COMPUTE, device.record(Stream.UPLOAD), Wait.USE_AFTER_RESIDENTS)
        self._residency.fetch_ahead()
        self.stalls.clear()
        for at, visit in enumerate(self._visits):
            self._visit(at, visit)
        self._residency.release_unpinned()
        if self._training:
            self._end_step()
            for layer in self._layers:
                layer.invalidate()
        self.ended = max(device.now[Stream.COMPUTE], device.host)
        self.stalls |= {name: device.stall_seconds(*why) for name, why in _STALLS.items()}
        return begun

    def _visit(self, at: int, visit: Visit) -> None:
        device, residency = self.device, self._residency
        layers = [self._layers[index] for index in visit.layers]
        if visit.backward:
            residency.pre_backward(layers)
            for index in visit.needs:
                self._timed(self._layers[index], residency.unpack)
            self._return_activations(at)
        else:
            self._source.shares |= dict.fromkeys(visit.layers, visit.share)
            if layers:
                residency.release_unpinned(keep=layers)
            for layer in layers:
                self._timed(layer, lambda called: residency.begin_call([called]))
        # Later work is issued after the Python code of this visit.
        weights = sum(len(layer.spans) for layer in layers)
        python = self._rates.visit_seconds * bool(layers) + self._rates.weight_seconds * weights
        device.host += python
        self.host_seconds += python
        kind: Kind = "backward" if visit.backward else "forward" if layers else "between"
        device.spend(Stream.COMPUTE, visit.seconds, kind, visit.layers[0] if layers else None)
        if visit.backward:
            for layer in layers:
                if self._last_backward[layer.index] == at and layer.planned.gradient_bytes:
                    self._drain(layer)
        elif layers or visit.moved:  # layers that stay on the device offload their activations, too
            self._store_activations(visit)
            if layers:
                residency.end_call(layers)
                residency.fetch_ahead()

    def _timed(self, layer: StreamedLayer, use: Callable[[StreamedLayer], Any]) -> None:
        """Uses a layer and records the time that compute waited for it."""
        before = self.device.stall_seconds(Wait.USE_AFTER_FETCH)
        use(layer)
        stalled = self.device.stall_seconds(Wait.USE_AFTER_FETCH) - before
        if stalled:
            self.stalls[layer.index] = self.stalls.get(layer.index, 0.0) + stalled

    # ------------------------------------------------------------------ activations

    def _wait_until_left(self) -> None:
        """Makes compute wait until the activations of the last forward are offloaded."""
        self.device.wait(Stream.COMPUTE, self._left, Wait.REUSE_AFTER_STORE)
        self._left = None

    def _store_activations(self, visit: Visit) -> None:
        self._wait_until_left()
        if visit.moved:
            self.device.wait(Stream.DOWNLOAD, self.device.record(Stream.COMPUTE), Wait.STORE_AFTER_SAVE)
            self.device.transfer("store", next(iter(visit.layers), None), visit.moved)
            self._left = self.device.record(Stream.DOWNLOAD)

    def _return_activations(self, at: int) -> None:
        """Uploads the activations of a backward, and prefetches those of the next backward."""
        device = self.device
        self._wait_until_left()
        later = range(at + 1, len(self._visits))
        ahead = next((each for each in later if self._visits[each].layers or self._visits[each].moved), at)
        for wanted in dict.fromkeys((at, ahead)):
            visit = self._visits[wanted]
            if visit.moved and visit.backward and wanted not in self._back:
                device.wait(Stream.UPLOAD, device.record(Stream.COMPUTE), Wait.RETURN_AFTER_USE)
                device.transfer("return", next(iter(visit.layers), None), visit.moved)
                self._back[wanted] = device.record(Stream.UPLOAD)
        device.wait(Stream.COMPUTE, self._back.get(at), Wait.USE_AFTER_RETURN)

    # ------------------------------------------------------------------ gradients and updates

    def _drain(self, layer: StreamedLayer) -> None:
        device, nbytes = self.device, layer.planned.gradient_bytes
        if self._on_device and self._overlap == "backward" and layer is not self._resident:
            self._apply(layer)  # the update reads the gradients on the device, so they are not downloaded
            return
        if not self._plan.alone:
            device.wait(Stream.REDUCE, device.record(Stream.COMPUTE), Wait.REDUCE_AFTER_GRADIENT)
            sent = nbytes - layer.planned.narrow_bytes  # casts' gradients are sent in half as many bytes
            device.spend(Stream.REDUCE, sent / self._rates.links, "reduce", layer.index, sent)
            device.wait(Stream.DOWNLOAD, device.record(Stream.REDUCE), Wait.DRAIN_AFTER_REDUCE)
        else:
            device.wait(Stream.DOWNLOAD, device.record(Stream.COMPUTE), Wait.DRAIN_AFTER_GRADIENT)
        self._drains.send(layer.index, [], [HostBytes(layer.index, -(-nbytes // self._plan.ranks))], [], layer)
        self._drains.finish()

    def _apply(self, layer: StreamedLayer) -> None:
        if self._overlap != "backward":
            return
        if self._gradients_wait:
            self._complete.append((self.device.host, layer))
        else:  # the gradients of at most one layer wait, as in LayerwiseStep
            before, self._early = self._early, self._update(layer)
            self.device.synchronize(before, Wait.READ_AFTER_UPDATE)

    def _update_by_next_use(self) -> None:
        """Updates the layers whose gradients are complete, in the order in which the next forward needs them."""
        device, order = self.device, {layer: at for at, layer in enumerate(self._order())}
        waiting, self._complete, now = self._complete, [], device.host
        while waiting:
            begins = max(device.now[Stream.UPDATE], min(at for at, _ in waiting))
            at, layer = min((each for each in waiting if each[0] <= begins), key=lambda each: order[each[1]])
            waiting.remove((at, layer))
            device.host = begins
            self._update(layer)
        device.host = now

    def _order(self) -> list[_SimulatedLayer]:
        """Returns all layers: first residents and tables, then the others as the next forward needs them."""
        tables, blocks = (
            [layer for layer in self._layers if layer.kind is kind] for kind in (LayerKind.TABLE, LayerKind.BLOCK)
        )
        used = self._residency.prefetch.order("batch")
        return list(dict.fromkeys((self._resident, *tables, *used, *blocks)))  # type: ignore[arg-type]

    def _end_step(self) -> None:
        self._drain(self._resident)
        self._drains.retire(0)
        self._drains.finish(0)
        self._step_begun = self.device.host
        if staying := sum(nbytes for _, _, nbytes in self._plan.stay):
            self.device.spend(Stream.COMPUTE, staying / self._rates.step, "update", None)
        for layer in self._layers:
            # Only rows of a table are moved, so no call of the batch drains it. But the update is that of the whole table.
            if layer.kind is LayerKind.TABLE and layer.planned.gradient_bytes:
                self._apply(layer)
        self._update_by_next_use()
        if self._overlap != "backward":
            for layer in self._order():
                self._source.waiting.append(layer)
            if self._overlap == "off" or not self._on_device:
                self._issue(self._source.waiting[-1])
        if self._overlap == "off":
            self.device.synchronize(max(self._left_slots), Wait.READ_AFTER_TAKE)
            self.device.synchronize(self.device.now[Stream.UPDATE], Wait.READ_AFTER_UPDATE)

    def _issue(self, layer: StreamedLayer | None) -> None:
        """Issues the updates for which a slot and the link were free, at least up to that of ``layer``, if that waits.

        The background thread is not simulated. So the host calls this method, with its clock set back to the time at which the
        background thread could have issued the updates.
        """
        device, waiting = self.device, self._source.waiting
        while waiting and (layer in waiting or device.now[Stream.UPLOAD] <= device.host):
            host, device.host = device.host, min(device.host, self._step_begun)
            self._update(waiting.popleft())
            device.host = host

    def _step_on_device(self, layer: StreamedLayer, seconds: float) -> float:
        """Does the same as :meth:`_update`, on the device: uploads the step's inputs into a slot and downloads the results."""
        device, rates, nbytes = self.device, self._rates, layer.planned.gradient_bytes
        uploaded, downloaded = round(rates.update_upload * nbytes), round(rates.update_download * nbytes)
        left_before = self._left_slots.popleft()
        device.wait(Stream.UPLOAD, left_before, Wait.BRING_AFTER_TAKE)
        if self._state:  # with a disk, an update begins only when the results of the update before are downloaded
            device.wait(Stream.UPDATE, max(self._left_slots), Wait.READ_AFTER_TAKE)
            on_disk, beside = (
                self._state.get(layer.index, 0),
                uploaded / rates.upload + seconds + downloaded / rates.download,
            )
            device.pass_disk(Stream.UPDATE, ["read", "write"], layer.index, on_disk, beside)
            device.wait(Stream.UPLOAD, device.now[Stream.UPDATE], Wait.BRING_AFTER_TAKE)
        device.transfer("bring", layer.index, uploaded)
        device.wait(Stream.STEP, device.record(Stream.UPLOAD), Wait.STEP_AFTER_BRING)
        if self._overlap == "backward":
            device.wait(Stream.STEP, device.record(Stream.COMPUTE), Wait.DRAIN_AFTER_GRADIENT)
        device.step(seconds, layer.index)
        self._source.stepped[layer.index] = device.now[Stream.STEP]
        device.wait(Stream.DOWNLOAD, device.record(Stream.STEP), Wait.TAKE_AFTER_STEP)
        device.transfer("take", layer.index, downloaded)
        done = self._source.updated[layer.index] = device.now[Stream.DOWNLOAD]
        self._left_slots.append(done)
        casts = sum(cast.nbytes for cast in layer.planned.casts)
        if self._overlap == "forward" and 0 < casts <= layer.planned.narrow_bytes:  # all casts are trained
            fresh = [each for each, until in self._source.fresh.items() if until == math.inf]
            # The background thread drops the casts of the layer before last when a slot is free.
            until = max(left_before, device.host)
            self._source.fresh |= {layer: math.inf} | dict.fromkeys(fresh[: 1 - FRESH], until)
        return done

    def _update(self, layer: StreamedLayer) -> float:
        """Updates a layer in the background. Returns the time at which the update is complete."""
        seconds = layer.planned.gradient_bytes / self._rates.update
        if self._on_device:
            return self._step_on_device(layer, seconds)
        if layer.index in self._state:
            nbytes = self._state[layer.index]
            self.device.pass_disk(Stream.UPDATE, ["read", "write"], layer.index, nbytes, seconds)
        self.device.spend(Stream.UPDATE, seconds, "update", layer.index)
        done = self._source.updated[layer.index] = self.device.now[Stream.UPDATE]
        return done
