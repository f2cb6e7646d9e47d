"""Residency: which layers are on the device, and which of them are in use; when the others come and go.

Here is the schedule, and nothing else: what a slot's memory means to the modules is the business of its
:class:`Tenants`, where bytes come from that of a :class:`~sp_lightning.weights.source.BlockSource`. The simulator drives
this very class with a device of clocks. The caller holds the engine's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from sp_lightning.plan.plan import Plan
from sp_lightning.weights.layer import StreamedLayer
from sp_lightning.weights.prefetch import Prefetch
from sp_lightning.weights.slots import Slot, Slots
from sp_lightning.weights.source import BlockSource


class Tenants(Protocol):
    """Who has a layer's memory while the layer is in use."""

    def before_use(self, layer: StreamedLayer) -> None:
        """The layer is about to be used; what is on the host of it has to be right."""

    def before_fetch(self, slots: Sequence[Slot]) -> None:
        """These slots are about to be overwritten."""

    def fetched(self, layer: StreamedLayer) -> None:
        """The layer is on its way to the device."""

    def move_in(self, layer: StreamedLayer, slot: Slot) -> None:
        """A call uses the layer: the modules have its weights on the device."""

    def move_out(self, layer: StreamedLayer, slot: Slot) -> None:
        """Nobody uses the layer any more: the modules let go of it."""

    def moved_out(self, layer: StreamedLayer, slot: Slot) -> None:
        """The slot was released."""

    def let_go(self) -> bool:
        """Takes the memory from what nobody keeps any more. Returns whether there was any."""


class Residency:
    """The layers that are on the device.

    Args:
        slots: where they are.
        prefetch: which come before anybody asks.
        source: where their bytes come from.
        tenants: who has them while they are in use.
        noted: called where a layer may have taken an extra slot: more memory may be in use than ever.

    Attributes:
        used: the layers in use, in the order in which they came into use, with their slots.
        demand_fetches: how often a layer was needed that was not there.
    """

    def __init__(
        self, slots: Slots, prefetch: Prefetch, source: BlockSource, tenants: Tenants, noted: Callable[[], None]
    ) -> None:
        self.slots = slots
        self.prefetch = prefetch
        self._source = source
        self._tenants = tenants
        self._noted = noted
        self.used: dict[StreamedLayer, Slot] = {}
        self.demand_fetches = 0

    # ------------------------------------------------------------------ what a batch does

    def begin_call(self, layers: Sequence[StreamedLayer], *, backward: bool = False) -> None:
        """A module that uses these layers is called, or an operation: they are there until :meth:`end_call`."""
        if layers:
            self.release_unpinned(keep=layers)
        for layer in layers:
            self.require(layer, backward=backward)
            layer.pins += 1
        for layer in layers:
            self._tenants.move_in(layer, self.used[layer])

    def end_call(self, layers: Sequence[StreamedLayer], *, release: bool = True) -> None:
        """The call has returned: layers that no other call uses may go, if they are to."""
        for layer in layers:
            layer.pins -= 1
            if layer.pins <= 0 and layer in self.used and release:
                self.release(layer)

    def pre_backward(self, layers: Collection[StreamedLayer]) -> None:
        """Backward comes to these layers: those above them are done."""
        if self.release_unpinned(keep=layers):
            self.fetch_ahead()

    def unpack(self, layer: StreamedLayer) -> bool:
        """Autograd needs a layer's weights. Returns whether the layer was not in use before."""
        if layer in self.used:
            return False
        released = self.release_unpinned()
        self.require(layer, backward=True)
        if released:
            self.fetch_ahead()
        return True

    # ------------------------------------------------------------------ layers come

    def require(self, layer: StreamedLayer, *, backward: bool = False) -> Slot:
        """Makes the layer resident, and takes it into use."""
        if layer in self.used:
            return self.used[layer]
        self._tenants.before_use(layer)
        self.slots.resume()
        if not layer.on_demand:
            self.prefetch.trace.visit(layer)
        early = layer.owner.updated_early
        if not early and not self._source.ready(layer):
            self._source.wait(layer)
            self.fetch_ahead()
        if layer.slot is not None and not early and layer.outdated:
            layer.invalidate()
        if layer.slot is None:
            if early:
                raise RuntimeError(needed_again(layer, "its weights were needed again"))
            self.demand_fetches += 1
            self._fetch([(layer, self.slots.find(layer, self.prefetch.trace.next_use))])
            self._noted()
        slot = self.used[layer] = self.slots.use(layer, backward=backward)
        return slot

    def fetch_ahead(self) -> None:
        """Fetches along the trace what there are slots for."""
        for pairs in self.prefetch.transfers():
            self._fetch(pairs)

    def release_exchanged(self, layer: StreamedLayer) -> None:
        """A layer that the user exchanged on the host is to be staged: what the device has of it is not written back."""
        for member in layer.family:
            if member in self.used and not member.pins and member.block.displaced:
                self.release(member)

    def _fetch(self, pairs: Sequence[tuple[StreamedLayer, Slot]]) -> None:
        self._tenants.before_fetch([slot for _, slot in pairs])
        transfer = []
        for layer, slot in pairs:
            if self.used:
                self.release_exchanged(layer)
            transfer.append((layer, slot, self._source.stage(layer)))
        self.slots.fetch(transfer)
        for layer, _ in pairs:
            self._tenants.fetched(layer)

    # ------------------------------------------------------------------ layers go

    def release(self, layer: StreamedLayer) -> None:
        """Nobody uses the layer any more: its slot may be overwritten, unless somebody still views it."""
        slot = self.used.pop(layer)
        self._tenants.move_out(layer, slot)
        self.slots.release(slot)
        self._tenants.moved_out(layer, slot)

    def release_unpinned(self, keep: Collection[StreamedLayer] = ()) -> bool:
        """Releases what no running call pins. Returns whether there was anything."""
        loose = [layer for layer in self.used if not layer.pins and layer not in keep]
        for layer in loose:
            self.release(layer)
        return self._tenants.let_go() or bool(loose)

    def resize(self, plan: Plan) -> None:
        """Between batches: the same layers get the slots of another plan."""
        self.prefetch.follow(plan)
        self.slots.resize(plan)


def needed_again(layer: StreamedLayer, why: str) -> str:
    """What to say where a layer is needed that the running backward has updated."""
    return (
        f'optimizer_overlap="backward" had updated layer {layer.name!r} when, in the same backward, '
        f'{why}: some weights are those of the next step now. Use SuperpipelineStrategy(optimizer_overlap="forward").'
    )
