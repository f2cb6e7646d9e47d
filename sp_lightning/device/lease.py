"""Memory that is handed out, and of which one can tell later whether anybody still holds it."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from sp_lightning.device.layout import Span, strided, view
from sp_lightning.device.modes import no_inference_mode
from sp_lightning.device.torch_private import storage_id, storage_use_count

MOST_SAVED = 64
"""How many different saved views a lease keeps. A model that slices its weights elsewhere in each step has no end of them."""


def lend(memory: Tensor) -> Tensor:
    """Returns a tensor with the same memory under a *new* storage.

    Once the new storage has expired (``StorageWeakRef``), nobody can reach the memory through it any more.

    Args:
        memory: a flat ``uint8`` tensor on any device. It stays alive as long as the new storage does.
    """
    # The way through DLPack is the one that gives memory a second storage without a copy, on every device.
    return from_dlpack(to_dlpack(memory))


class Lease:
    """Memory that is handed out again and again, each time only if nobody holds any of it from before.

    The memory has a storage that belongs to the lease alone, so the owners of that storage are those who hold it.

    Attributes:
        memory: the memory under that storage.

    Args:
        memory: a flat ``uint8`` tensor on any device.
    """

    def __init__(self, memory: Tensor) -> None:
        with no_inference_mode():
            self.memory = lend(memory)
        self._storage = self.memory.untyped_storage()
        self._id = storage_id(self._storage)
        self._views: dict[Hashable, list[Tensor]] = {}
        self._saved: dict[Hashable, Tensor] = {}
        self._own = self._holders()

    @property
    def in_use(self) -> bool:
        """Whether anybody but the lease can reach the memory, through a tensor or a storage, in Python or in C++.

        This stays True once the storage has moved to another address in place, as ``share_memory_`` moves it: other
        processes may have mapped it.
        """
        storage = self._storage
        tensors, objects, address = self._own
        return (  # as _holders counts, without a call for it: it is asked several times for each layer
            storage_use_count(self._id) != tensors
            or sys.getrefcount(storage) != objects
            or storage.data_ptr() != address
        )

    def _holders(self) -> tuple[int, int, int]:
        storage = self._storage
        return storage_use_count(self._id), sys.getrefcount(storage), storage.data_ptr()

    def views(self, key: Hashable, spans: Sequence[Span]) -> list[Tensor]:
        """Returns the parameters at ``spans``, which are made once for every ``key``.

        Callers use these tensors as a source of views and do not keep them: a kept one would not count as use.
        """
        if key not in self._views:
            with no_inference_mode():
                self._views[key] = [view(self.memory, span) for span in spans]
            tensors, objects, address = self._own
            self._own = tensors + len(spans), objects, address
        return self._views[key]

    def saved(self, offset: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
        """Returns a view of the memory, a tensor of its own each time, which counts as use.

        The same views are saved in every step. The first :data:`MOST_SAVED` of them are made once, and an alias of one
        takes a third of the time that a view takes.

        Args:
            offset: bytes from the start of the memory.
            dtype, shape, stride: those of the view; strides in elements.
        """
        key = offset, dtype, shape, stride
        found = self._saved.get(key)
        if found is None:
            with no_inference_mode():
                found = strided(self.memory, offset, dtype, shape, stride)
            if len(self._saved) < MOST_SAVED:
                self._saved[key] = found
                tensors, objects, address = self._own
                self._own = tensors + 1, objects, address
        return found.detach()


def shared(tensor: Tensor) -> bool:
    """Whether anybody beside this tensor holds its memory, as another tensor or a graph may."""
    storage = tensor.untyped_storage()
    return (
        storage_use_count(storage_id(storage)) > 2
    )  # this tensor is one owner, the storage object in this function another
