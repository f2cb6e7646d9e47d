"""The device memory in which layers are stepped: two slots, so that one layer's comes while another one's leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.device.layout import ALIGNMENT, aligned


@dataclass(eq=False)
class StepSlot:
    """Device memory for one update.

    Attributes:
        memory: flat ``uint8``.
        left: the event after which all has left that the last update made; None once it was waited for.
        alive: what it has made beside the slot, which is there until then.
    """

    memory: Tensor
    left: Any = None
    alive: list[Tensor] = field(default_factory=list)


class StepSlots:
    """The slots. A layer that is much larger than the others, an embedding say, has both for itself.

    Args:
        device: allocates them.
        count: how many slots of the largest layer's size there are: with one, two of the other layers are there at once.
    """

    def __init__(self, device: Device, count: int) -> None:
        self._device = device
        self._count = count
        # That of all the memory, then its halves, the one that was used last behind the other.
        self._slots: list[StepSlot] = []

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that they take."""
        return self._slots[0].memory.nbytes if self._slots else 0

    def take(self, nbytes: int) -> StepSlot:
        """The half that was used longer ago, or both if one is too small, once all has left it that the last update made."""
        if nbytes > self.nbytes:
            self.free()
            memory = self._device.upload_target(aligned(nbytes) * self._count, Stream.STEP)
            middle = memory.nbytes // 2 // ALIGNMENT * ALIGNMENT
            self._slots = [StepSlot(each) for each in (memory, memory[:middle], memory[middle:])]
        whole, first, second = self._slots
        if nbytes > first.memory.nbytes:
            self._wait(*self._slots)
            return whole
        self._slots = [whole, second, first]
        self._wait(whole, first)
        return first

    def free(self) -> None:
        """Frees device memory, once all has left it."""
        self._wait(*self._slots)
        self._device.access([each.memory for each in self._slots], Stream.STEP, write=True)  # which may use it next
        self._slots.clear()

    def _wait(self, *slots: StepSlot) -> None:
        for slot in slots:
            self._device.synchronize(slot.left, Wait.BRING_AFTER_TAKE)
            slot.left = None
            slot.alive.clear()
