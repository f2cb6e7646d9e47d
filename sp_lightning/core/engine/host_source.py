"""The host store as the source of uploads: waits for updates, refreshes casts, and adopts memory of user code.

To *adopt* memory is to copy the values of ``other`` into the layer's block after ``param.data = other``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sp_lightning.core.device.device import Wait
from sp_lightning.core.model.elsewhere import tied_streams
from sp_lightning.core.store.block import HostBlock, open_blocks
from sp_lightning.core.store.block_memory import BlockMemory
from sp_lightning.core.weights.layer import AllRows, Kind, StreamedLayer
from sp_lightning.core.weights.ring import BlockSource, Staged

if TYPE_CHECKING:
    from sp_lightning.core.engine.engine import Engine


class HostSource(BlockSource):
    """The source of one device. The caller holds the engine's lock.

    Args:
        engine: has the layers, the slots, whose uploads read the host's memory, and the updates that may be in flight.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def ready(self, layer: StreamedLayer) -> bool:
        """Returns True if an upload need not wait for the layer's update.

        This is the case if no update is in flight, or if the update has ended and its results are on the host, or on the device.
        """
        update = layer.owner.update
        if update is None:
            return True
        return update.done() and (bool(layer.step_results) or self.engine.device.has_happened(layer.owner.downloaded))

    def wait(self, layer: StreamedLayer) -> Any:
        """Waits for the layer's update and, if necessary, for the download of its results, so that an upload may follow.

        If an upload can copy the results on the device, the host does not wait for the download. Otherwise it waits: if the
        upload stream waited instead, the uploads of other layers would be delayed.

        Returns:
            The event after which the host has the results; None if the host already has them.
        """
        engine = self.engine
        owner = layer.owner
        if owner.update is None and engine.updates.failure is None:
            return None  # nearly always
        downloaded = engine.updates.wait_until_issued(layer)
        if downloaded is None or (layer.step_results and self._fetches_as_updated(layer)):
            return downloaded
        engine.updates.wait(layer, Wait.FETCH_AFTER_UPDATE)
        return None

    def stage(self, layer: StreamedLayer) -> Staged:
        """Returns the bytes of the layer's block, after adopting memory and casting the present masters if necessary.

        Raises:
            OSError: the memory of a block could not be read or written. The weights then count as torn.
        """
        downloaded = self.wait(layer)
        if downloaded is not None:  # the upload follows the update on the device, and the host has nothing to do
            return layer.block.weights, downloaded
        for member in layer.with_masters:
            if displaced := member.block.displaced:
                self._adopt(member, displaced)
        stale = not layer.casts.current
        if stale:  # the last transfer may still read the casts that `refresh` overwrites
            self.engine.slots.synchronize(Wait.CAST_AFTER_FETCH, layer)
        try:
            for member in layer.with_masters if stale else (layer,):  # casting reads the masters' memory, too
                member.block.memory.use()
        except OSError as error:
            self.engine.updates.torn = f"memory of the host store could not be read or written: {error!r}"
            raise
        if stale:
            layer.casts.refresh()
        return layer.block.weights, None

    def _fetches_as_updated(self, layer: StreamedLayer) -> bool:
        """Returns True if an upload of the whole layer can copy its update's results on the device, without the host.

        Otherwise :meth:`stage` waits until the host has the results, because the host has to read or change them first.
        """
        slot, blocks = layer.slot, [member.block for member in layer.with_masters]
        return (
            type(layer.rows) is AllRows  # rows are taken from host memory
            and layer.casts.current  # otherwise the host casts again
            and (slot is None or not slot.stale)  # otherwise tensors view the slot, and user code may write it
            and not layer.views  # the same
            and all(type(block.memory).use is BlockMemory.use for block in blocks)  # otherwise read from a disk first
            and not any(block.displaced or block.retyped for block in blocks)  # user code has set param.data
        )

    def synchronize(self) -> None:
        """Waits until no upload reads the host's weights any more, because the next code may write the weights."""
        engine = self.engine
        engine.slots.synchronize(Wait.UPDATE_AFTER_FETCH)
        for layer in engine.layers:
            if layer.kind is Kind.RESIDENTS:
                engine.device.synchronize(layer.transfer, Wait.UPDATE_AFTER_RESIDENTS)
            # An optimizer, a hook or a callback may write the layer now. If an update is in flight, such code waits first.
            if layer.owner.update is None:
                engine.device.access(layer.block.weights, None, write=True)

    def invalidate(self, layers: Sequence[StreamedLayer]) -> None:
        """Marks copies of these layers as out of date, because their weights may have been written on the host."""
        for layer in layers:
            layer.invalidate()
            # User code that writes weights waits for updates first. So a layer was not written if its update is in flight.
            if layer.owner.update is None:
                layer.casts.invalidate()

    def _adopt(self, layer: StreamedLayer, displaced: Sequence[int]) -> None:
        """Adopts memory that user code has given to some of the layer's parameters. ``displaced``: their indices."""
        block = layer.block
        self._refuse_tied(block, displaced)
        self.synchronize()  # `reabsorb` overwrites memory that uploads may read
        layer.leave_slot()  # views of the slot keep the old values, as views of the old memory do
        for index in displaced:
            if not block.has_values_of_place(index):  # otherwise another run of the module has moved the weight
                layer.parameters.give_place(index)
            layer.parameters.unversioned_writes[index] += 1
        block.reabsorb()
        if layer.owner is not layer:
            layer.owner.casts.invalidate()  # the masters have new values in the same memory

    def _refuse_tied(self, block: HostBlock, displaced: Sequence[int]) -> None:
        """Raises a RuntimeError if a displaced parameter has the memory of another parameter, in any layer of any run.

        On plain Lightning both would be one weight from then on. Copying the values into the block would make them two.
        """
        with torch.DisableTorchFunctionSubclass():  # must not wait for updates: they do not change addresses
            given = {
                block.parameters[each].data_ptr(): (block.parameters[each], block.planned.spans[each].name)
                for each in displaced
            }
        own = {id(parameter) for layer in self.engine.layers for parameter in layer.block.parameters}
        for other in open_blocks():
            for parameter, span, address in zip(other.parameters, other.planned.spans, other.addresses, strict=True):
                # Parameters without elements have the address 0.
                if not address or address not in given:
                    continue
                weight, name = given[address]
                if parameter is weight:  # another run of the module has it, perhaps by another name
                    continue
                if id(parameter) not in own:
                    raise RuntimeError(tied_streams(name, repr(span.name)))
                raise RuntimeError(tied(name, span.name))


def tied(name: str, other: str) -> str:
    """Returns the error message for a parameter that got another parameter's memory."""
    return (
        f"Parameter {name!r} was given the memory of {other!r} (param.data = other.data); moving them would part them "
        f"silently. Tie them by sharing one object (module_b.weight = module_a.weight), or give it a copy: "
        f"param.data = other.data.clone()."
    )
