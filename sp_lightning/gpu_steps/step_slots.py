"""GPU memory in which layers are stepped: two slots, so that one layer is uploaded while another one is downloaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.device.layout import ALIGNMENT, aligned


@dataclass(eq=False)
class StepSlot:
    """GPU memory for one update.

    Attributes:
        memory: flat ``uint8``.
        downloaded: the event after the download of the last update's results; None after a wait for it.
        results: the tensors that are downloaded. They live until then, as some are not in the slot.
    """

    memory: Tensor
    downloaded: Any = None
    results: list[Tensor] = field(default_factory=list)


class StepSlots:
    """The slots. A layer that is much larger than the others, for example an embedding, uses both.

    Args:
        device: allocates them.
        count: the number of slots of the largest layer's size. With one, two of the other layers fit at once.
    """

    def __init__(self, device: Device, count: int) -> None:
        self._device = device
        self._count = count
        # The slot of all memory, then its halves, the least recently used half first.
        self._slots: list[StepSlot] = []

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that the slots take."""
        return self._slots[0].memory.nbytes if self._slots else 0

    def take(self, nbytes: int) -> StepSlot:
        """Returns the least recently used half, or both if one is too small, after its last update is downloaded."""
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
        """Waits for downloads, and frees the memory."""
        self._wait(*self._slots)
        self._device.access(
            [each.memory for each in self._slots], Stream.STEP, write=True
        )  # the stream that may use it next
        self._slots.clear()

    def _wait(self, *slots: StepSlot) -> None:
        for slot in slots:
            self._device.synchronize(slot.downloaded, Wait.BRING_AFTER_TAKE)
            slot.downloaded = None
            slot.results.clear()
