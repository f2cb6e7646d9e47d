"""The host store as the source of layers' bytes: updated, cast anew, and with the memory that users gave to parameters."""

from __future__ import annotations

from collections.abc import Sequence

from sp_lightning.device.device import Device
from sp_lightning.device.waits import Wait
from sp_lightning.engine.lent_weights import keep_saved
from sp_lightning.optim.background import BackgroundUpdates
from sp_lightning.store.block import HostBlock
from sp_lightning.weights.layer import Kind, StreamedLayer
from sp_lightning.weights.slots import Slots, Staged
from sp_lightning.weights.writes import WeightWatch


class HostSource:
    """The :class:`~sp_lightning.weights.source.BlockSource` of one device. The caller holds the engine's lock.

    Args:
        layers: all layers.
        slots: the slots, whose transfers read the host's memory.
        updates: the updates that may be under way.
        device: is told of reads and writes.
        watch: is told which weights were adopted, if ``check_writes`` looks for writes; otherwise None.
    """

    def __init__(
        self,
        layers: Sequence[StreamedLayer],
        slots: Slots,
        updates: BackgroundUpdates,
        device: Device,
        watch: WeightWatch | None,
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
        """Returns the bytes of the layer's block, in which the casts are those of the present masters."""
        self.wait(layer)
        self._adopt(layer)
        if layer.masters is not None and layer.casts is not None:
            self._adopt(layer.masters)
            if not layer.casts.current:
                self._slots.synchronize(Wait.CAST_AFTER_FETCH, layer)
                self._use(layer.masters.block)
            layer.casts.refresh()
        self._use(layer.block)
        return layer.block.weights, None

    def _use(self, block: HostBlock) -> None:
        try:
            block.memory.use()
        except OSError as error:
            self._updates.partially_updated = f"weights on the disk could not be read or written: {error!r}"
            raise

    def synchronize(self) -> None:
        """Lets the host wait until no transfer reads its weights any more, because what comes now may write them."""
        self._slots.synchronize(Wait.UPDATE_AFTER_FETCH)
        for layer in self._layers:
            if layer.kind is Kind.RESIDENTS:
                self._device.synchronize(layer.transfer, Wait.UPDATE_AFTER_RESIDENTS)
            if not self._updates.under_way(layer):  # an optimizer, a hook or a callback may write it now
                self._device.access(layer.block.weights, None, write=True)

    def doubt(self, layers: Sequence[StreamedLayer]) -> None:
        """Marks the copies of these layers as out of date, because their weights may have been written on the host."""
        for layer in layers:
            layer.invalidate()
            # User code that writes weights waits for their updates first. A layer whose update is under way was therefore
            # not written.
            if layer.casts is not None and not self._updates.under_way(layer):
                layer.casts.doubt()

    def settle(self) -> None:
        """Absorbs the memory that the user gave to parameters of any layer."""
        for layer in self._layers:
            self._adopt(layer)

    def _adopt(self, layer: StreamedLayer) -> None:
        """Absorbs the memory that the user gave to the layer's parameters (``param.data = other``)."""
        block = layer.block
        displaced = block.displaced
        if not displaced:
            return
        self._refuse_tied(block, displaced)
        self.synchronize()
        layer.leave_slot()
        for index in displaced:
            keep_saved(layer, index)
            layer.parameters.unversioned_writes[index] += 1
        block.adopt()
        layer.parameters.adopted()
        if layer.owner is not layer and layer.owner.casts is not None:
            layer.owner.casts.doubt()  # the masters have other values although their block has the same memory
        if self._watch is not None:
            for index in displaced:
                self._watch.look_at(block, index)

    def _refuse_tied(self, block: HostBlock, displaced: Sequence[int]) -> None:
        names = {block.parameters[index].data_ptr(): block.planned.spans[index].name for index in displaced}
        for other in self._layers:
            block = other.block
            for span, parameter, address in zip(block.planned.spans, block.parameters, block.addresses, strict=True):
                name = names.get(address)
                if name is not None and name != span.name and parameter.data_ptr() == address and parameter.numel():
                    raise RuntimeError(tied(name, span.name))


def tied(name: str, other: str) -> str:
    """The error message for a parameter that was given another parameter's memory."""
    return (
        f"Parameter {name!r} was given the memory of {other!r} (param.data = other.data); moving them would part them "
        f"silently. Tie them by sharing one object (module_b.weight = module_a.weight), or give it a copy: "
        f"param.data = other.data.clone()."
    )
