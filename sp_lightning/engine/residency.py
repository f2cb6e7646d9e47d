"""Residency: the schedule. It decides which layers are fetched, locked, attached, rested and released, and when.

The states and transitions are in :mod:`~sp_lightning.layers.states`. Residency does not know what modules do with a slot's memory
(:class:`~sp_lightning.layers.lent_weights.SlotUsers`) or where bytes come from (:class:`~sp_lightning.layers.slots.BlockSource`).
So the planner's simulator can run this very class with a device of clocks. The caller holds the engine's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import itemgetter

from sp_lightning.layers.gradient_sink import GradientSink
from sp_lightning.layers.layer import Slot, StreamedLayer
from sp_lightning.layers.lent_weights import SlotUsers
from sp_lightning.layers.prefetch import Prefetch
from sp_lightning.layers.residents import Residents
from sp_lightning.layers.slots import BlockSource, Slots
from sp_lightning.layers.states import IN_USE, RESTING
from sp_lightning.model.found import Found, tensor_bytes
from sp_lightning.plan.plan import Plan
from sp_lightning.updates.layer_stepper import LayerStepper


class Residency:
    """Moves layers between their states.

    Args:
        slots: the slots of the layers.
        prefetch: chooses the layers to fetch before a call needs them.
        source: the layers' bytes on the host.
        tenants: give a layer's slot to its modules, and take it from them.
        noted: called after a layer may have taken an extra slot, because device memory may be at its peak.

    Attributes:
        used: the locked layers, except resting ones, with their slots: in the order in which they were locked.
        resting: the resting layers with their slots. Resting saves the host's time in inference. Code that marks copies as out
            of date first ends it (:meth:`let_rest`).
        rests: whether layers may rest if each has a slot of its own.
        demand_fetches: how often a layer was fetched because a call or autograd needed it at once.
    """

    def __init__(
        self, slots: Slots, prefetch: Prefetch, source: BlockSource, tenants: SlotUsers, noted: Callable[[], None]
    ) -> None:
        self.slots = slots
        self.prefetch = prefetch
        self._source = source
        self._tenants = tenants
        self._noted = noted
        self.used: dict[StreamedLayer, Slot] = {}
        self.resting: dict[StreamedLayer, Slot] = {}
        self.rests = False
        self.demand_fetches = 0

    # ------------------------------------------------------------------ what a batch does

    def begin_call(self, layers: Sequence[StreamedLayer], *, backward: bool = False) -> None:
        """Locks and attaches layers for a module call, or for one operation, until :meth:`end_call`."""
        if layers and (self.used or self._tenants.held):
            self.release_unpinned(keep=layers)
        pinned = 0
        try:
            for layer in layers:
                self.require(layer, backward=backward)
                layer.running_calls += 1
                pinned += 1
            for layer in layers:
                self._tenants.move_in(layer, self.used[layer])
                layer.state = IN_USE
        except BaseException:
            self.end_call(layers[:pinned], release=False)
            raise

    def end_call(self, layers: Sequence[StreamedLayer], *, release: bool = True) -> None:
        """Ends a call. If ``release`` is set, layers that no other call uses are released."""
        for layer in layers:
            layer.running_calls = max(layer.running_calls - 1, 0)  # a step that has failed meanwhile has set it to 0
        for layer in layers if release else ():
            if not layer.running_calls and layer in self.used:
                self._leave(layer)

    def pre_backward(self, layers: Collection[StreamedLayer]) -> None:
        """Releases all other layers without a running call: the backward of these begins, so that of later ones is over."""
        if self.release_unpinned(keep=layers):
            self.fetch_ahead()

    def unpack(self, layer: StreamedLayer) -> Slot:
        """Locks a layer for autograd, which unpacks a weight of it."""
        released = layer not in self.used and self.release_unpinned()
        slot = self.require(layer, backward=True)
        if released:
            self.fetch_ahead()
        return slot

    # ------------------------------------------------------------------ layers are fetched and locked

    def require(self, layer: StreamedLayer, *, backward: bool = False) -> Slot:
        """Locks a layer's slot. If the layer is not on the device, or is out of date, it is fetched first.

        Raises:
            RuntimeError: the running backward has updated the layer already.
        """
        if layer in self.used:
            if not layer.whole and not layer.rows.complete:
                self._complete(layer)
            return self.used[layer]
        if self._tenants.replaced:
            self._tenants.before_use(layer)
        if layer in self.resting:
            if not layer.outdated:
                layer.visits += not backward
                self.prefetch.trace.visit(layer)
                slot = self.used[layer] = self.resting.pop(layer)
                return slot
            self._release_resting(layer)
        if self.slots.idle_since is not None:
            self.slots.resume()
        layer.visits += not backward
        if not layer.on_demand:
            self.prefetch.trace.visit(layer)
        early = layer.owner.updated_early
        if not early and not self._source.ready(layer):
            self._source.wait(layer)
            self.fetch_ahead()
        if not early and layer.outdated:
            layer.invalidate()
        absent = layer.slot is None or layer.slot.stale
        if not layer.whole:
            layer.rows.begin_use()
            absent = absent or not layer.rows.complete
        if absent:
            layer.refuse_updated()
            self.demand_fetches += 1
            self._fetch([(layer, layer.slot or self.slots.find(layer, self.prefetch.trace.next_use))])
            self._noted()
        slot = self.used[layer] = self.slots.use(layer, backward=backward)  # (2)
        return slot

    def _complete(self, layer: StreamedLayer) -> None:
        """Uploads the missing rows of a layer in use into its slot."""
        slot = self.used[layer]
        layer.refuse_updated()
        if layer.outdated:
            layer.invalidate()
        self.demand_fetches += 1
        self._fetch([(layer, slot)])
        self.slots.join(slot)

    def fetch_ahead(self) -> None:
        """Fetches the next layers of the trace, as long as slots may be overwritten for them."""
        if self.slots.all_settled and len(self.resting) == len(self.slots.settled):
            return  # every layer is on the device
        for ring in self.prefetch.rings:
            more = True
            while more:
                pairs, more = self.prefetch.next(ring)
                if not pairs:
                    break
                self._fetch(pairs)

    def renew_views(self) -> None:
        """Fetches the host's present weights into slots that user code views, as views of a plain parameter show writes."""
        for slot in self.slots.all:
            if slot.stale and slot.layer is not None and slot.held:
                self._fetch([(slot.layer, slot)])

    def renew_used(self) -> None:
        """Fetches the host's present weights into the slots of all layers in use, because they may have been written."""
        for layer in list(self.used):
            self.renew(layer)

    def renew(self, layer: StreamedLayer) -> None:
        """Fetches the host's present weights into the slot of one layer in use. A layer without a running call is released.

        A running call continues with the new weights in the same memory, as with a plain parameter that was written in place:
        views of the weights show them, and autograd finds the new version of what it saved.

        Raises:
            RuntimeError: a weight was given other memory, or was written on the device as well.
        """
        if not layer.running_calls:  # its next use fetches it
            self.release(layer)
            layer.invalidate()
            return
        self._tenants.before_renewal(layer)
        slot = self.used[layer]
        layer.rows.drop_cached()
        layer.casts.invalidate()
        slot.stale = True
        self._fetch([(layer, slot)])
        self.slots.join(slot)
        self._tenants.renewed(layer, slot)

    def release_exchanged(self, layer: StreamedLayer) -> None:
        """Releases a layer that is about to be fetched, if user code has given its host parameters other memory."""
        for member in layer.family:
            if member in self.used and not member.running_calls and member.block.displaced:
                self.release(member)

    def _fetch(self, pairs: Sequence[tuple[StreamedLayer, Slot]]) -> None:
        self._tenants.take_back_late(map(_slot_of_pair, pairs))
        transfer = []
        try:
            for layer, slot in pairs:
                if self.used:
                    self.release_exchanged(layer)
                transfer.append((layer, slot, self._source.stage(layer)))
        except BaseException:
            for layer, _ in pairs:
                layer.made = ()  # only this transfer could have used it
            raise
        self.slots.fetch(transfer)  # (1)
        for layer, _ in pairs:
            self._tenants.fetched(layer)

    # ------------------------------------------------------------------ layers are released

    def release(self, layer: StreamedLayer) -> None:
        """Releases a layer that no call uses. Its slot may be overwritten, unless user code still views it (HELD)."""
        self._tenants.release(layer, self.used.pop(layer))

    def release_unpinned(self, keep: Collection[StreamedLayer] = ()) -> bool:
        """Releases the layers that no running call uses, except ``keep``. Returns whether a slot may have become free."""
        loose = [layer for layer in self.used if not layer.running_calls and layer not in keep] if self.used else ()
        for layer in loose:
            self._leave(layer)
        return (bool(self._tenants.held) and self._tenants.free_dropped()) or bool(loose)

    def _leave(self, layer: StreamedLayer) -> None:
        """Releases a layer whose last call has ended, or lets it rest."""
        if self.rests and layer.state.attached and layer in self.slots.settled:
            self._tenants.rest(layer)
            layer.state = RESTING
            self.resting[layer] = self.used.pop(layer)
        else:
            self._tenants.release(layer, self.used.pop(layer))

    def let_rest(self, rests: bool) -> None:
        """Sets whether layers may rest. Releases resting layers that may not, and those that were written on the device."""
        self.rests = rests
        for layer in list(self.resting):
            if not rests or self._tenants.written(layer):
                self._release_resting(layer)

    def _release_resting(self, layer: StreamedLayer) -> None:
        self.used[layer] = self.resting.pop(layer)
        self.release(layer)

    def resize(self, plan: Plan) -> None:
        """Replaces the slots by those of another plan for the same layers, between two batches."""
        self.prefetch.follow(plan)
        self.slots.resize(plan)


_slot_of_pair: Callable[[tuple[StreamedLayer, Slot]], Slot] = itemgetter(1)


class Peak:
    """Measures the peak of device memory: slots, residents, gradients, and weights that are not streamed.

    The slots in which layers are stepped count as well.

    Attributes:
        most: the peak in bytes.
        stepper: steps layers on the GPU.
    """

    def __init__(
        self,
        found: Found,
        slots: Slots,
        residents: Residents,
        gradients: GradientSink,
        stepper: LayerStepper,
    ) -> None:
        self.most = 0
        self.stepper = stepper
        self._staying = found.staying[0]
        self._aside = [parameter for _, module in found.aside for parameter in module.parameters()]
        self._slots = slots
        self._residents = residents
        self._gradients = gradients

    @property
    def weight_bytes(self) -> int:
        """Bytes of device memory of weights and buffers at present."""
        return self._slots.device_bytes + self._residents.nbytes + self._staying + self.stepper.nbytes

    def note(self) -> None:
        """Updates the peak. Called whenever memory use may have grown."""
        now = self._slots.device_bytes + self._residents.nbytes + self._staying + self._gradients.device_bytes
        now += self.stepper.nbytes
        if self._aside:  # nearly always empty, and this is called several times per layer
            now += sum(tensor_bytes(parameter.grad) for parameter in self._aside if parameter.grad is not None)
        if now > self.most:
            self.most = now
