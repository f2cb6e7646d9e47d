"""The memory of gradients on a disk: a scratch file's, of which few layers' are in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sp_lightning.device.device import Device
from sp_lightning.store.gradient_memory import GradientMemory, Memory, Staging
from sp_lightning.store.mapped_pages import note_on_disk
from sp_lightning.store.mapped_scratch import MappedFile


class GradientsOnScratch(GradientMemory):
    """The memory of one layer's gradients.

    They are written once they come, and read once for the update: what they had before is not read when others come.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter], staging: ScratchStaging) -> None:
        super().__init__(names, parameters, staging)
        note_on_disk(parameters)

    def target(self, index: int, dtype: torch.dtype) -> Tensor | None:
        if not self._held():  # the layer's first one of this backward
            for memory in self._memory:
                memory.renew()
        return super().target(index, dtype)

    def use(self) -> bool:
        for memory in self._memory:
            memory.use()
        return bool(self._memory)


class ScratchStaging(Staging):
    """The memory that layers' gradients have in a scratch file.

    Args:
        device: copies the gradients.
        file: the file, with room for all of them.
    """

    def __init__(self, device: Device, file: MappedFile) -> None:
        super().__init__(device, pin=False)
        self._file = file

    def of_layer(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> GradientMemory:
        return GradientsOnScratch(names, parameters, self)

    def take(self, nbytes: int) -> Memory:
        memory = super().take(nbytes)
        memory.renew()
        return memory

    def _allocate(self, nbytes: int) -> Memory:
        return self._file.allocate(nbytes, False)
