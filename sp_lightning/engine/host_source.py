"""The host store as the source of layers' bytes: updated, cast anew, with what the user put under the parameters."""

from __future__ import annotations

from collections.abc import Sequence

from sp_lightning.device.device import Device
from sp_lightning.device.waits import Wait
from sp_lightning.engine.lent_weights import keep_saved
from sp_lightning.optim.background import Updates
from sp_lightning.store.block import HostBlock
from sp_lightning.weights.layer import Kind, StreamedLayer
from sp_lightning.weights.slots import Slots, Staged
from sp_lightning.weights.weight_watch import WeightWatch


class HostSource:
    """The :class:`~sp_lightning.weights.source.BlockSource` of one device. The caller holds the engine's lock.

    Args:
        layers: all of them.
        slots: what transfers read the host's memory into.
        updates: what may be under way to it.
        device: the seam.
        watch: notes what is adopted, where ``check_writes`` looks for writes.
    """

    def __init__(
        self, layers: Sequence[StreamedLayer], slots: Slots, updates: Updates, device: Device, watch: WeightWatch | None
    ) -> None:
        self._layers = layers
        self._slots = slots
        self._updates = updates
        self._device = device
        self._watch = watch

    def ready(self, layer: StreamedLayer) -> bool:
        """Whether the layer's update is done."""
        return self._updates.ready(layer)

    def wait(self, layer: StreamedLayer) -> None:
        """Waits for the layer's update."""
        self._updates.wait(layer, Wait.FETCH_AFTER_UPDATE)

    def stage(self, layer: StreamedLayer) -> Staged:
        """The layer's block, with casts of its masters as they are now."""
        self.wait(layer)
        self._adopt(layer)
        if layer.masters is not None and layer.casts is not None:
            self._adopt(layer.masters)
            if not layer.casts.current:
                self._slots.synchronize(Wait.CAST_AFTER_FETCH, layer)
            layer.casts.refresh()
        return layer.block.weights, None

    def synchronize(self) -> None:
        """The host waits until no transfer reads its weights any more: whatever comes now may write them."""
        self._slots.synchronize(Wait.UPDATE_AFTER_FETCH)
        for layer in self._layers:
            if layer.kind is Kind.RESIDENTS:
                self._device.synchronize(layer.transfer, Wait.UPDATE_AFTER_RESIDENTS)
            if not self._updates.under_way(layer):  # written by whatever comes now: optimizer, hooks, callbacks
                self._device.access(layer.block.weights, None, write=True)

    def doubt(self, layers: Sequence[StreamedLayer]) -> None:
        """The host's weights of these layers may have been written unseen: their copies are out of date."""
        for layer in layers:
            layer.invalidate()
            # Whoever writes weights waits for updates first, so that what is being updated was not written.
            if layer.casts is not None and not self._updates.under_way(layer):
                layer.casts.doubt()

    def _adopt(self, layer: StreamedLayer) -> None:
        """Takes in what the user put under the layer's parameters (``param.data = other``)."""
        block = layer.block
        displaced = block.displaced
        if not displaced:
            return
        self._refuse_tied(block, displaced)
        self.synchronize()
        layer.invalidate()
        for index in displaced:
            keep_saved(layer, index)
            layer.parameters.unseen[index] += 1
        block.adopt()
        if (
            layer.owner is not layer and layer.owner.casts is not None
        ):  # the block's memory is the same, its values are others
            layer.owner.casts.doubt()
        if self._watch is not None:
            for index in displaced:
                self._watch.look_at(block, index)

    def _refuse_tied(self, block: HostBlock, displaced: Sequence[int]) -> None:
        mine = {block.parameters[index].data_ptr(): block.planned.spans[index].name for index in displaced}
        for other in self._layers:
            block = other.block
            for span, parameter, address in zip(block.planned.spans, block.parameters, block.addresses, strict=True):
                name = mine.get(address)
                if name is not None and name != span.name and parameter.data_ptr() == address and parameter.numel():
                    raise RuntimeError(tied(name, span.name))


def tied(name: str, other: str) -> str:
    """What to say where one parameter was given another one's memory."""
    return (
        f"Parameter {name!r} was given the memory of {other!r} (param.data = other.data); moving them would part them "
        f"silently. Tie them by sharing one object (module_b.weight = module_a.weight), or give it a copy: "
        f"param.data = other.data.clone()."
    )
