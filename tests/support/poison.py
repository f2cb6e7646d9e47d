"""Poisoned memory: what nobody may read is NaN, so that a read of it cannot go unnoticed.

Slots are NaN-filled as soon as nobody uses them, and the host's weights are NaN while modules hold device parameters:
only a fetch may read them then. Random NaN bit patterns are all ones, which is NaN in every float type.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sp_lightning.core.device.device import Stream
from sp_lightning.core.device.layout import part
from sp_lightning.core.store.block import HostBlock
from sp_lightning.core.torch_compat.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.core.weights import writes
from sp_lightning.core.weights.layer import Slot, StreamedLayer
from sp_lightning.core.weights.ring import Slots
from sp_lightning.core.weights.swap import ParameterSwap
from sp_lightning.core.weights.writes import host_value
from tests.support.simdevice import poison


@contextmanager
def poisoned() -> Iterator[None]:
    """Poison every engine inside; each use of a layer fetches it anew.

    What the engine itself does with the host's weights meanwhile (takes back what was written, takes in memory that they were
    given, compares them) finds them as if they were not hidden. Otherwise the poison, and not the engine, changes numbers.
    """
    to_device, to_host = ParameterSwap.to_device, ParameterSwap.to_host
    write, reabsorb, release = HostBlock.write, HostBlock.reabsorb, Slots.release
    hidden: dict[HostBlock, Tensor] = {}  # the blocks' memory, while what a fetch reads is a copy of it

    def hide_one(block: HostBlock) -> None:
        hidden[block] = block.weights
        block.memory.common = block.weights.clone()
        hidden[block].fill_(0xFF)

    def show_one(block: HostBlock) -> None:
        copy, block.memory.common = block.weights, hidden.pop(block)
        block.weights.copy_(copy)

    def poisoned_release(self: Slots, layer: StreamedLayer, slot: Slot) -> bool:
        viewed = release(self, layer, slot)
        if not viewed:
            if slot.layer is not None:
                slot.layer.invalidate()
            self._device.access(slot.memory, Stream.COMPUTE, write=True)
            with no_inference_mode(), no_dispatch_modes():
                slot.memory.fill_(0xFF)
            slot.idle = self._device.record(Stream.COMPUTE)
        return viewed

    def hide(self: ParameterSwap) -> None:
        if not self.on_device:
            for block in self.blocks:
                hide_one(block)
        to_device(self)

    def show(self: ParameterSwap) -> None:
        if self.on_device:
            for block in self.blocks:
                show_one(block)
        to_host(self)

    def hidden_write(self: HostBlock, index: int, value: Tensor) -> bool:
        written = write(self, index, value)
        if written and self in hidden and index not in self.retyped:  # a retyped weight has memory of its own
            span = self.planned.spans[index]
            its = slice(span.offset, span.offset + span.nbytes)
            self.weights[its] = hidden[self][its]
            hidden[self][its] = 0xFF
        return written

    def hidden_reabsorb(self: HostBlock) -> None:
        if self not in hidden:
            return reabsorb(self)
        show_one(self)  # else parameters would become views of the copy, and their next values be read from elsewhere
        reabsorb(self)
        return hide_one(self)

    def hidden_value(layer: StreamedLayer, index: int) -> Tensor:
        if layer.block in hidden and index not in layer.block.retyped:
            return part(layer.block.weights, layer.block.planned.spans[index])
        return host_value(layer, index)

    with (
        mock.patch.object(Slots, "release", poisoned_release),
        mock.patch.object(ParameterSwap, "to_device", hide),
        mock.patch.object(ParameterSwap, "to_host", show),
        mock.patch.object(HostBlock, "write", hidden_write),
        mock.patch.object(HostBlock, "reabsorb", hidden_reabsorb),
        mock.patch.object(writes, "host_value", hidden_value),
    ):
        yield


@contextmanager
def poisoned_ring() -> Iterator[None]:
    """Host memory is NaN as soon as no graph needs what is in it, and device memory when nothing is to be read there."""
    from sp_lightning.capabilities.activations.offload import Offload, OffloadedStorage

    end, drop = OffloadedStorage.__del__, Offload._drop

    def ended(self: Any) -> None:
        with no_dispatch_modes():  # nothing that the engine does
            poison(self.buffer.bytes)
        end(self)

    def dropped(self: Any, storages: Sequence[Any]) -> None:
        mine = [storage.returned for storage in storages if storage.returned is not None]
        drop(self, storages)
        for memory in mine:
            if torch._C._storage_Use_Count(memory.untyped_storage()._cdata) <= 2:  # ours and the object's
                with no_dispatch_modes():
                    poison(memory)

    with mock.patch.object(OffloadedStorage, "__del__", ended), mock.patch.object(Offload, "_drop", dropped):
        yield


@contextmanager
def crowded() -> Iterator[None]:
    """In this context all activations are offloaded, however small they are."""
    from sp_lightning.capabilities.activations import offload
    from sp_lightning.capabilities.tuning.tuner import Tuner

    with mock.patch.object(Tuner, "_left", return_value=-1), mock.patch.object(offload, "WORTH_MOVING", 1):
        yield
