"""Memory that is handed out in such a way that one can tell later whether anybody still holds it."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence

from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from sp_lightning.device.layout import Span, view
from sp_lightning.device.modes import no_inference_mode
from sp_lightning.device.torch_private import storage_use_count


def lend(memory: Tensor) -> Tensor:
    """The same memory under a *new* storage.

    When the new storage has expired (``StorageWeakRef``), nobody can reach the memory through it any more.

    Args:
        memory: flat ``uint8`` tensor on any device; it stays alive as long as the new storage does.
    """
    return from_dlpack(to_dlpack(memory))


class Lease:
    """Memory that is handed out under a storage of its own, again and again, while nobody else holds any of it.

    Args:
        memory: flat ``uint8`` tensor on any device.
    """

    def __init__(self, memory: Tensor) -> None:
        with no_inference_mode():
            self.memory = lend(memory)
        self._storage = self.memory.untyped_storage()
        self._views: dict[Hashable, list[Tensor]] = {}
        self._own = self._holders()

    @property
    def in_use(self) -> bool:
        """Whether anybody but this object can reach the memory: any tensor or storage object, in Python or in C++.

        For good once the storage was moved elsewhere in place, as ``share_memory_`` does: others may have mapped it.
        """
        return self._holders() != self._own

    def _holders(self) -> tuple[int, int, int]:
        storage = self._storage
        return storage_use_count(storage), sys.getrefcount(storage), storage.data_ptr()

    def views(self, key: Hashable, spans: Sequence[Span]) -> list[Tensor]:
        """The parameters at ``spans``, made once for each ``key``. Nobody may keep them: that would not be seen."""
        if key not in self._views:
            with no_inference_mode():
                self._views[key] = [view(self.memory, span) for span in spans]
            tensors, objects, address = self._own
            self._own = tensors + len(spans), objects, address
        return self._views[key]


def shared(tensor: Tensor) -> bool:
    """Whether somebody else holds the memory of a tensor: another tensor, a graph."""
    storage = tensor.untyped_storage()
    return bool(storage_use_count(storage) > 2)  # the tensor, and the object here
