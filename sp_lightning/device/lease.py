"""Memory that is handed out, and of which one can tell later whether anybody still holds it."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from sp_lightning.device.layout import Span, strided, view
from sp_lightning.torch_compat.modes import no_inference_mode
from sp_lightning.torch_compat.private import storage_id, storage_use_count

MOST_SAVED = 256
"""How many different saved views a lease keeps. A model that slices its weights elsewhere in each step has no end of them."""


@dataclass(eq=False, slots=True)
class SavedView:
    """A view of a slot, as autograd saves it in each step. It is looked up by its identity, which takes the host least.

    Attributes:
        offset: bytes from the start of the memory.
        dtype, shape, stride: those of the view; strides in elements.
        again: whether the same object comes in each step, so that a lease may keep its view.
    """

    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    again: bool = True


class SavedViews:
    """The views that autograd saves of layers whose weights lie alike, an object for each."""

    def __init__(self) -> None:
        self._at: defaultdict[int, list[SavedView]] = defaultdict(list)
        self._count = 0

    def find(self, tensor: Tensor, offset: int) -> SavedView:
        """The view that a tensor is, which begins ``offset`` bytes into the memory."""
        dtype, shape, stride = tensor.dtype, tensor.shape, tensor.stride()
        known = self._at[offset]
        for saved in known:  # one or two; to compare takes the host less than to hash
            if saved.stride == stride and saved.shape == shape and saved.dtype is dtype:
                return saved
        saved = SavedView(offset, dtype, shape, stride, again=self._count < MOST_SAVED)
        if saved.again:
            known.append(saved)
            self._count += 1
        return saved


def lend(memory: Tensor) -> Tensor:
    """Returns a tensor with the same memory under a *new* storage.

    Once the new storage has expired (``StorageWeakRef``), no tensor can reach the memory through it any more.

    Args:
        memory: a flat ``uint8`` tensor on any device. It stays alive as long as the new storage does.
    """
    # The way through DLPack is the one that gives memory a second storage without a copy, on every device.
    with no_inference_mode():
        return from_dlpack(to_dlpack(memory))


class Lease:
    """Memory that is handed out again and again, each time only if no tensor holds any of it from before.

    The memory has a storage that belongs to the lease alone, so the owners of that storage are those who hold it.

    Attributes:
        memory: the memory under that storage.

    Args:
        memory: a flat ``uint8`` tensor on any device.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = lend(memory)
        self._storage = self.memory.untyped_storage()
        self._id = storage_id(self._storage)
        self._views: dict[Hashable, list[Tensor]] = {}
        self._saved: dict[SavedView, Tensor] = {}
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

    @property
    def moved(self) -> bool:
        """Whether the storage has moved to another address in place (``share_memory_``). Its views no longer see the memory."""
        return self._storage.data_ptr() != self._own[2]

    def in_use_beside(self, own: int) -> bool:
        """As :attr:`in_use`, but so many tensors are not counted that the lease's user has made itself."""
        tensors, objects, address = self._own
        return self._holders() != (tensors + own, objects, address)

    def _holders(self) -> tuple[int, int, int]:
        storage = self._storage
        return storage_use_count(self._id), sys.getrefcount(storage), storage.data_ptr()

    def views(self, key: Hashable, spans: Sequence[Span]) -> list[Tensor]:
        """Returns the parameters at ``spans``, which are made once for every ``key``.

        Callers use these tensors as a source of views and do not keep them: a kept one would not count as use.
        """
        if key not in self._views:
            self._views[key] = [view(self.memory, span) for span in spans]
            tensors, objects, address = self._own
            self._own = tensors + len(spans), objects, address
        return self._views[key]

    def saved(self, saved: SavedView) -> Tensor:
        """Returns a view of the memory, a tensor of its own each time, which counts as use.

        The same views are saved in every step. The first :data:`MOST_SAVED` of them are made once, and an alias of one
        takes a third of the time that a view takes.
        """
        found = self._saved.get(saved)
        if found is None:
            found = strided(self.memory, saved.offset, saved.dtype, saved.shape, saved.stride)
            if saved.again and len(self._saved) < MOST_SAVED:
                self._saved[saved] = found
                tensors, objects, address = self._own
                self._own = tensors + 1, objects, address
        return found.detach()


def shared(tensor: Tensor, beside: int = 0) -> bool:
    """True if the tensor's memory has more references, from other tensors or graphs, than this one and ``beside`` known ones."""
    storage = tensor.untyped_storage()
    # this tensor is one owner, the storage object in this function another: that of user code, if it has one
    return storage_use_count(storage_id(storage)) > 2 + beside or sys.getrefcount(storage) > _UNHELD


def _references(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


_UNHELD = _references(torch.empty(0))
"""References to a tensor's storage object as :func:`shared` counts them if nobody else has it."""


def held_elsewhere(named: Iterable[Mapping[Any, Any]]) -> bool:
    """Returns True if a tensor in these dictionaries, or its memory, has another reference."""
    for values in named:
        for value in values.values():
            if not isinstance(value, Tensor):
                continue
            # The dictionary refers to it, the variable of this loop, and the argument of the call.
            if sys.getrefcount(value) > 3 or (type(value) is Tensor and shared(value)):
                return True
    return False
