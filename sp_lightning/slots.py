"""Slots: the device memory that layers pass through, and the transfers that fill it.

A slot's life::

    FREE ──fetch──▶ FILLED ──use──▶ LENT ──release──▶ FILLED or, while somebody still reads it, HELD ──▶ FREE

Each use lends the slot's memory under a new storage. Once that has expired nobody can read it any more on the host's
side, and an event recorded then covers the kernels that still run. Until then the slot is not overwritten, whatever
happens: another one is used, or an extra one is made.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sp_lightning.device import Device, Stream, Wait
from sp_lightning.host import HostBlock
from sp_lightning.memory import lend
from sp_lightning.plan import Plan


class SlotState(enum.Enum):
    """Which memory exists in each state."""

    FREE = enum.auto()
    """The memory means nothing and may be overwritten after the event ``idle``."""
    FILLED = enum.auto()
    """It holds, or after the event ``filled`` will hold, a layer that nobody uses; it may be overwritten."""
    LENT = enum.auto()
    """A layer's weights, in use."""
    HELD = enum.auto()
    """No longer in use, but some tensor still views it (an escaped view, a graph): not to be overwritten."""


@dataclass(eq=False)
class Slot:
    """Device memory for one layer.

    Attributes:
        memory: flat ``uint8``.
        layer: whose weights are in it; None if they are out of date.
        lent: the storage under which the present use has it.
        last_lent: that of the last use, weakly.
        filled: event of the transfer into it.
        idle: event after the last kernel that used it.
    """

    ring: int
    memory: Tensor
    extra: bool = False
    layer: int | None = None
    lent: Tensor | None = None
    last_lent: list[StorageWeakRef] = field(default_factory=list)
    filled: Any = None
    idle: Any = None

    @property
    def state(self) -> SlotState:
        """The state now; HELD ends by itself, when the last view is dropped."""
        if self.lent is not None:
            return SlotState.LENT
        if any(not storage.expired() for storage in self.last_lent):
            return SlotState.HELD
        return SlotState.FREE if self.layer is None else SlotState.FILLED

    @property
    def overwritable(self) -> bool:
        """Whether another layer may come in."""
        return self.state in (SlotState.FREE, SlotState.FILLED)


class Slots:
    """All slots of a plan.

    Args:
        plan: rings and layers.
        blocks: host blocks of the layers.
        device: the seam.
    """

    def __init__(self, plan: Plan, blocks: Sequence[HostBlock], device: Device) -> None:
        self._plan = plan
        self._blocks = blocks
        self._device = device
        self.all = [
            Slot(index, device.empty(ring.nbytes)) for index, ring in enumerate(plan.rings) for _ in range(ring.slots)
        ]
        self._at: dict[int, Slot] = {}
        self._by_address = {slot.memory.data_ptr(): slot for slot in self.all if slot.memory.nbytes}
        self.fetched_layers = 0
        self.fetched_bytes = 0
        self.transfers = 0
        self.extra_slots = 0

    @property
    def device_bytes(self) -> int:
        """Bytes of all slots that exist now, extra ones included."""
        return sum(slot.memory.nbytes for slot in self.all)

    def __contains__(self, layer: int) -> bool:
        return layer in self._at

    def of_ring(self, ring: int) -> list[Slot]:
        """The slots of a ring, those aside that somebody holds after their use."""
        return [slot for slot in self.all if slot.ring == ring and slot.state is not SlotState.HELD]

    def lent_at(self, address: int) -> int | None:
        """The layer whose weights lie in the slot that begins at ``address``; None if there is none, or out of date."""
        slot = self._by_address.get(address)
        return None if slot is None else slot.layer

    def ring_of(self, layer: int) -> int:
        """Index of the ring that a layer passes through."""
        return self._plan.layers[layer].ring

    def find(self, layer: int, next_use: Callable[[int], float]) -> Slot:
        """The slot to overwrite for a layer that is needed at once: a free one, the farthest, or an extra one."""
        ring = self.ring_of(layer)
        candidates = [slot for slot in self.of_ring(ring) if slot.overwritable]
        if candidates:
            return max(candidates, key=lambda slot: _rank(slot, next_use))
        self.extra_slots += 1
        slot = Slot(ring, self._device.empty(self._plan.rings[ring].nbytes), extra=True)
        self.all.append(slot)
        self._by_address[slot.memory.data_ptr()] = slot
        return slot

    def fetch(self, pairs: Sequence[tuple[int, Slot]]) -> None:
        """Overwrite slots with layers: one transfer.

        The caller has chosen slots that may be overwritten. Upload waits until the last kernel that used them is
        through.
        """
        for layer, slot in pairs:
            if slot.layer is not None:
                self._at.pop(slot.layer, None)
            # A slot that was held after its release has no event of its own: nobody knows when its last view went.
            idle = slot.idle if slot.idle is not None else self._device.record(Stream.COMPUTE)
            self._device.wait(Stream.UPLOAD, idle, Wait.FETCH_AFTER_USE)
            source = self._blocks[layer].weights
            self._device.copy(slot.memory[: source.nbytes], source, Stream.UPLOAD)
            slot.layer = layer
            slot.last_lent.clear()
            self._at[layer] = slot
            self.fetched_layers += 1
            self.fetched_bytes += source.nbytes
        filled = self._device.record(Stream.UPLOAD)
        for _, slot in pairs:
            slot.filled = filled
        self.transfers += 1

    def use(self, layer: int) -> Slot:
        """Lend a fetched layer's memory to compute, which waits for the transfer. The slot's ``lent`` is the loan."""
        slot = self._at[layer]
        self._device.wait(Stream.COMPUTE, slot.filled, Wait.USE_AFTER_FETCH)
        self._device.access(slot.memory, Stream.COMPUTE, write=False)
        if slot.lent is None:
            slot.lent = lend(slot.memory)
            slot.last_lent = [storage for storage in slot.last_lent if not storage.expired()]
            slot.last_lent.append(StorageWeakRef(slot.lent.untyped_storage()))
            slot.idle = None
        return slot

    def release(self, slot: Slot) -> None:
        """The use is over. Device parameters have let go of the memory; others may still hold views of it."""
        self._device.access(slot.memory, Stream.COMPUTE, write=False)
        slot.lent = None
        if slot.state is not SlotState.HELD:
            slot.idle = self._device.record(Stream.COMPUTE)

    def forget(self, layers: Iterable[int]) -> None:
        """The host's weights have changed: what is on the device of these layers is out of date."""
        for layer in layers:
            slot = self._at.pop(layer, None)
            if slot is not None:
                slot.layer = None

    def give_back_extra(self) -> None:
        """Free the extra slots that nobody holds. They are fetched into on demand only, so compute has waited."""
        for slot in [each for each in self.all if each.extra]:
            if slot.overwritable:
                if slot.layer is not None:
                    self._at.pop(slot.layer, None)
                self._device.access(slot.memory, Stream.COMPUTE, write=True)
                self.all.remove(slot)
                del self._by_address[slot.memory.data_ptr()]

    def synchronize(self, why: Wait) -> None:
        """The host waits until no transfer reads its weights any more."""
        for slot in self.all:
            self._device.synchronize(slot.filled, why)

    def close(self) -> None:
        """Free all slots."""
        self.synchronize(Wait.CLOSE_AFTER_FETCH)
        for slot in self.all:
            self._device.access(slot.memory, Stream.COMPUTE, write=True)
        self._at.clear()
        self._by_address.clear()
        self.all.clear()


def _rank(slot: Slot, next_use: Callable[[int], float]) -> tuple[bool, float]:
    """Belady's order of overwriting: what means nothing first, then what is used again last."""
    return (True, 0.0) if slot.layer is None else (False, next_use(slot.layer))
