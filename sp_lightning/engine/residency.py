"""Residency: the schedule. It decides which layers are fetched, locked, attached, rested and released, and when.

The states and transitions are in :mod:`~sp_lightning.layers.states`. Two interfaces separate this class from modules and from
host memory:

- :class:`~sp_lightning.layers.bound_weights.SlotUsers` attaches device parameters to slots, and detaches them.
- :class:`~sp_lightning.layers.ring.BlockSource` provides the bytes on the host that a transfer reads.

So the planner's simulator can run this very class with a simulated device that only counts time. The caller holds the engine's
lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import itemgetter

from sp_lightning.layers.bound_weights import SlotUsers
from sp_lightning.layers.gradient_sink import GradientSink
from sp_lightning.layers.layer import Slot, StreamedLayer
from sp_lightning.layers.prefetch import Prefetch
from sp_lightning.layers.residents import Residents
from sp_lightning.layers.ring import BlockSource, Slots
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
        slot_users: attaches the device parameters of a layer to its slot, and detaches them.
        note_memory: called after a layer may have taken an extra slot, because device memory may be at its peak.

    Attributes:
        used: the locked layers, except resting ones, with their slots, in the order in which they were locked.
        resting: the resting layers with their slots. Resting saves the host's time in inference. Code that marks copies as out of
            date first releases the resting layers (:meth:`let_rest`).
        rests: True if layers may rest. A layer rests only if its ring has a slot for each of the ring's layers.
        demand_fetches: how often a layer was fetched because a call or autograd needed it at once.
    """

    def __init__(
        self,
        slots: Slots,
        prefetch: Prefetch,
        source: BlockSource,
        slot_users: SlotUsers,
        note_memory: Callable[[], None],
    ) -> None:
        self.slots = slots
        self.prefetch = prefetch
        self._source = source
        self._slot_users = slot_users
        self._note_memory = note_memory
        self.used: dict[StreamedLayer, Slot] = {}
        self.resting: dict[StreamedLayer, Slot] = {}
        self.rests = False
        self.demand_fetches = 0

    # ------------------------------------------------------------------ module calls and autograd

    def begin_call(self, layers: Sequence[StreamedLayer], *, backward: bool = False) -> None:
        """Locks and attaches layers for a module call, or for one operation, until :meth:`end_call`.

        First releases the other layers that no running call uses, so that their slots may be overwritten. If an error is raised,
        no layer counts the call; the next call releases the layers that are locked already.
        """
        if layers and (self.used or self._slot_users.held):
            self.release_unpinned(keep=layers)
        counted = 0
        try:
            for layer in layers:
                self.require(layer, backward=backward)
                layer.running_calls += 1
                counted += 1
            for layer in layers:
                self._slot_users.attach(layer, self.used[layer])
                layer.state = IN_USE
        except BaseException:
            self.end_call(layers[:counted], release=False)
            raise

    def end_call(self, layers: Sequence[StreamedLayer], *, release: bool = True) -> None:
        """Ends a call. If ``release`` is set, layers that no other call uses are released, or rest."""
        for layer in layers:
            layer.running_calls = max(layer.running_calls - 1, 0)  # a step that has failed meanwhile has set it to 0
        for layer in layers if release else ():
            if not layer.running_calls and layer in self.used:
                self._leave(layer)

    def pre_backward(self, layers: Collection[StreamedLayer]) -> None:
        """Releases the locked layers that no running call uses, except ``layers``, whose backward begins. Then prefetches.

        Backward runs through the layers in reverse. So the backward of every other locked layer is over.
        """
        if self.release_unpinned(keep=layers):
            self.fetch_ahead()

    def unpack(self, layer: StreamedLayer) -> Slot:
        """Locks a layer for autograd, which unpacks a saved weight of the layer. Returns the slot.

        If the layer is not locked, backward has just reached it. The layers that backward used before are then released first.
        """
        released = layer not in self.used and self.release_unpinned()
        slot = self.require(layer, backward=True)
        if released:
            self.fetch_ahead()  # after `require`, because the layer that is needed now gets a slot first
        return slot

    # ------------------------------------------------------------------ layers are fetched and locked

    def require(self, layer: StreamedLayer, *, backward: bool = False) -> Slot:
        """Locks a layer's slot. If the layer is not on the device, or its copy is out of date, the layer is fetched first.

        Also records the use in the trace. If the layer is locked already, or rests with a current copy, its slot is returned at
        once. Otherwise:

        1. If the host weights are not ready (an update runs), this waits for them.
        2. If the copy is out of date, it is dropped.
        3. If there is no copy, or rows of it are missing, the layer is fetched on demand.

        Args:
            layer: the layer.
            backward: True if backward uses the layer. Other uses are counted in ``layer.visits``.

        Raises:
            RuntimeError: the running backward has updated the layer already.
        """
        if layer in self.used:
            if not layer.whole and not layer.rows.complete:
                self._complete(layer)
            return self.used[layer]
        if self._slot_users.replaced:
            self._slot_users.before_use(layer)
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
        # If this backward has updated the layer, the host has newer weights than backward needs. The copy that the forward has
        # used is still right. Without a copy, `refuse_updated` raises.
        updated_early = layer.owner.updated_early
        if not updated_early and not self._source.ready(layer):
            self._source.wait(layer)
            self.fetch_ahead()  # other updates may have ended meanwhile, so prefetches that waited for them can begin
        if not updated_early and layer.outdated:
            layer.invalidate()
        absent = layer.slot is None or layer.slot.stale
        if not layer.whole:
            layer.rows.begin_use()
            absent = absent or not layer.rows.complete
        if absent:
            layer.refuse_updated()
            self.demand_fetches += 1
            # A stale slot, or one with other rows, is still the layer's: tensors may view it, so it is filled again.
            self._fetch([(layer, layer.slot or self.slots.find(layer, self.prefetch.trace.next_use))])
            self._note_memory()
        slot = self.used[layer] = self.slots.lock(layer, backward=backward)  # (2)
        return slot

    def _complete(self, layer: StreamedLayer) -> None:
        """Uploads the missing rows of a layer in use into its slot."""
        slot = self.used[layer]
        layer.refuse_updated()
        if layer.outdated:
            layer.invalidate()
        self.demand_fetches += 1
        self._fetch([(layer, slot)])
        self.slots.wait_for_upload(slot)

    def fetch_ahead(self) -> None:
        """Fetches the next layers of the trace, as long as slots may be overwritten for them.

        Called whenever a slot may have become free, or the bytes of a layer may have become ready.
        """
        if self.slots.none_evicted and len(self.resting) == len(self.slots.never_evicted):
            return  # every layer rests, so every layer is on the device
        # Uploads end in the order in which they are issued. So of several rings, the one whose layer is used next is first.
        transfers = {ring: found for ring in self.prefetch.rings if (found := self.prefetch.next(ring))[0]}
        while transfers:
            one = len(transfers) == 1  # nearly always
            ring = next(iter(transfers)) if one else min(transfers, key=lambda ring: self._next_use(transfers[ring][0]))
            pairs, more = transfers.pop(ring)
            self._fetch(pairs)
            if more and (found := self.prefetch.next(ring))[0]:
                transfers[ring] = found

    def _next_use(self, pairs: Sequence[tuple[StreamedLayer, Slot]]) -> float:
        """Returns the number of uses of layers before the next use of the first layer of a transfer."""
        return self.prefetch.trace.next_use(pairs[0][0])

    def renew_views(self) -> None:
        """Fetches the host's present weights into stale slots that tensors view.

        On plain Lightning a view of a parameter shows writes to the parameter, so a view of a slot must show such writes.
        """
        for slot in self.slots.all:
            if slot.stale and slot.layer is not None and slot.held:
                self._fetch([(slot.layer, slot)])

    def renew_used(self) -> None:
        """Calls :meth:`renew` for each locked layer, because host weights may have been written."""
        for layer in list(self.used):
            self.renew(layer)

    def renew(self, layer: StreamedLayer) -> None:
        """Uploads a locked layer again, because its host weights were written, or may have been, while it was locked.

        If no call of the layer is running, the layer is released instead, and its next use fetches it.

        A running call continues with the new values in the same slot. This is how a plain parameter behaves when it is written in
        place: views of the weight show the new values, and autograd detects that the version of a saved weight has changed.

        Raises:
            RuntimeError: a weight was given other memory, or was written on the device as well.
        """
        if not layer.running_calls:
            self.release(layer)
            layer.invalidate()
            return
        # Write back first: the fetch overwrites the slot, and would lose the writes on the device.
        self._slot_users.before_renewal(layer)
        slot = self.used[layer]
        layer.rows.drop_cached()
        layer.casts.invalidate()  # staging then casts the new masters
        slot.stale = True
        self._fetch([(layer, slot)])
        self.slots.wait_for_upload(slot)
        self._slot_users.renewed(layer, slot)

    def release_exchanged(self, layer: StreamedLayer) -> None:
        """Releases the members of a layer's family whose host parameters user code has given other memory (``.data =``).

        Called before the layer is staged. Staging copies that memory into the host block, which must not happen while a member is
        locked.
        """
        for member in layer.family:
            if member in self.used and not member.running_calls and member.block.displaced:
                self.release(member)

    def _fetch(self, pairs: Sequence[tuple[StreamedLayer, Slot]]) -> None:
        """Stages layers on the host, and uploads them into these slots in one transfer.

        All prefetches and fetches on demand end here. Before the slots are overwritten, writes through views of them are copied
        to the host.
        """
        self._slot_users.take_back_late(map(_slot_of_pair, pairs))
        transfer = []
        try:
            for layer, slot in pairs:
                if self.used:  # `stage` adopts memory of the family, whose members may still be locked
                    self.release_exchanged(layer)
                transfer.append((layer, slot, self._source.stage(layer)))
        except BaseException:
            for layer, _ in pairs:
                layer.step_results = ()  # only this transfer could have used them
            raise
        self.slots.fetch(transfer)  # (1)
        for layer, _ in pairs:
            self._slot_users.fetched(layer)

    # ------------------------------------------------------------------ layers are released

    def release(self, layer: StreamedLayer) -> None:
        """Releases a layer that no call uses. If no tensor views its slot, the slot may then be overwritten; otherwise HELD."""
        self._slot_users.release(layer, self.used.pop(layer))

    def release_unpinned(self, keep: Collection[StreamedLayer] = ()) -> bool:
        """Releases the locked layers that no running call uses, or lets them rest, except ``keep``.

        Also frees device parameters that graphs held and have dropped.

        Returns:
            True if a slot may have become free.
        """
        unpinned = [layer for layer in self.used if not layer.running_calls and layer not in keep] if self.used else ()
        for layer in unpinned:
            self._leave(layer)
        return (bool(self._slot_users.held) and self._slot_users.free_dropped()) or bool(unpinned)

    def _leave(self, layer: StreamedLayer) -> None:
        """Releases a layer whose last call has ended, or lets it rest."""
        if self.rests and layer.state.attached and layer in self.slots.never_evicted:
            self._slot_users.rest(layer)
            layer.state = RESTING
            self.resting[layer] = self.used.pop(layer)
        else:
            self._slot_users.release(layer, self.used.pop(layer))

    def let_rest(self, rests: bool) -> None:
        """Sets whether layers may rest. Releases resting layers if they may not, or if they were written on the device."""
        self.rests = rests
        self.release_resting(None if not rests else [each for each in self.resting if self._slot_users.written(each)])

    def release_resting(self, layers: Collection[StreamedLayer] | None = None) -> None:
        """Releases those of these layers that rest. ``layers``: None for all."""
        for layer in [each for each in self.resting if layers is None or each in layers]:
            self._release_resting(layer)

    def _release_resting(self, layer: StreamedLayer) -> None:
        self.used[layer] = self.resting.pop(layer)  # where `release` looks for it
        self.release(layer)

    def resize(self, plan: Plan) -> None:
        """Replaces the slots by those of another plan for the same layers, between two batches."""
        self.prefetch.follow(plan)
        self.slots.resize(plan)


_slot_of_pair: Callable[[tuple[StreamedLayer, Slot]], Slot] = itemgetter(1)


class Peak:
    """Measures the peak of device memory: slots, residents, gradients, and weights that are not streamed.

    The memory that GPU steps take beside the slots counts as well.

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
        # Parameters of modules that are on the device as a whole. The engine is not notified of their gradients, so `note` reads
        # them.
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
