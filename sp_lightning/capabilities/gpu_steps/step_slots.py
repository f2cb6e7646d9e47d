"""GPU memory in which layers are stepped: two slots, so that a layer is uploaded while another layer is downloaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.device.layout import ALIGNMENT, aligned


@dataclass(eq=False)
class StepSlot:
    """GPU memory for one update.

    Attributes:
        memory: flat ``uint8``.
        downloaded: the event after the download of the last update's results; None if the host has waited for it.
        results: the tensors that the download reads. They are kept until its end, because some of them are not in the slot.
    """

    memory: Tensor
    downloaded: Any = None
    results: list[Tensor] = field(default_factory=list)


class StepSlots:
    """The slots. A layer that is much larger than the others, for example an embedding, uses both.

    Args:
        device: allocates the memory.
        count: the number of slots of the largest layer's size. With one, each half has room for a layer of half that size.
    """

    def __init__(self, device: Device, count: int) -> None:
        self._device = device
        self._count = count
        # The slot of all memory, then its halves, the least recently used half first.
        self._slots: list[StepSlot] = []

    @property
    def nbytes(self) -> int:
        """The bytes of GPU memory that the slots take."""
        return self._slots[0].memory.nbytes if self._slots else 0

    def take(self, nbytes: int) -> StepSlot:
        """Returns a slot for an update: the least recently used half, or all of the memory if a half is too small.

        Waits until the results of the slot's last update are downloaded. If all of the memory is too small, allocates more.

        Args:
            nbytes: the bytes of the update's weights, gradients and state.
        """
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
