"""Memory of slots that tensors use, and a check whether such a tensor still exists.

A slot can be overwritten only if no tensor of user code or of autograd still uses it. torch counts the owners of a storage, so
each slot is lent under a storage of its own.
"""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from sp_lightning.core.device.layout import Span, strided, view
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.core.torch_compat.private import storage_id, storage_use_count

MOST_SAVED = 256
"""The most saved views that a lease keeps. The limit is needed if a model slices its weights differently in each step."""


@dataclass(eq=False, slots=True)
class SavedView:
    """Describes a view of a slot that autograd saves in each step. A lease looks it up by its identity, which is fastest.

    Attributes:
        offset: bytes from the start of the memory.
        dtype, shape, stride: the dtype, the shape and the strides (in elements) of the view.
        again: True if :class:`SavedViews` returns this object in each step, so that a lease may keep its view.
    """

    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    again: bool = True


class SavedViews:
    """The views that autograd saves of layers with equal layouts, with one :class:`SavedView` for equal views."""

    def __init__(self) -> None:
        self._at: defaultdict[int, list[SavedView]] = defaultdict(list)
        self._count = 0

    def find(self, tensor: Tensor, offset: int) -> SavedView:
        """Returns the object that describes a tensor, which starts ``offset`` bytes into the memory. Keeps new objects."""
        dtype, shape, stride = tensor.dtype, tensor.shape, tensor.stride()
        known = self._at[offset]
        for saved in known:  # one or two: comparing them is faster than hashing
            if saved.stride == stride and saved.shape == shape and saved.dtype is dtype:
                return saved
        saved = SavedView(offset, dtype, shape, stride, again=self._count < MOST_SAVED)
        if saved.again:
            known.append(saved)
            self._count += 1
        return saved


def lend(memory: Tensor) -> Tensor:
    """Returns a tensor of the same memory under a *new* storage.

    When the new storage has expired (``StorageWeakRef``), no tensor can reach the memory through this storage.

    Args:
        memory: a flat ``uint8`` tensor on any device. The new storage keeps it alive.
    """
    # DLPack is the only way to give memory a second storage without a copy on every device.
    with no_inference_mode():
        return from_dlpack(to_dlpack(memory))


class Lease:
    """Memory that is lent repeatedly, each time only if no tensor of the previous loan is left.

    The memory has a storage of its own, so the owners of that storage are the users of the memory.

    Attributes:
        memory: the memory under its own storage.

    Args:
        memory: a flat ``uint8`` tensor on any device.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = lend(memory)
        self._storage = self.memory.untyped_storage()
        self._id = storage_id(self._storage)
        self._views: dict[Hashable, list[Tensor]] = {}
        self._saved: dict[SavedView, Tensor] = {}
        self._own = self.holders()  # the owners that belong to the lease itself; any others are users

    @property
    def in_use(self) -> bool:
        """True if a tensor or storage outside of the lease, in Python or in C++, can reach the memory.

        After ``share_memory_`` has moved the storage to another address, the result stays True: other processes may have mapped
        the storage.
        """
        storage = self._storage
        tensors, objects, address = self._own
        return (  # the same as `holders`, inlined: this runs several times per layer call
            storage_use_count(self._id) != tensors
            or sys.getrefcount(storage) != objects
            or storage.data_ptr() != address
        )

    @property
    def moved(self) -> bool:
        """True if ``share_memory_`` has moved the storage to another address. The storage's views no longer see the memory."""
        return self._storage.data_ptr() != self._own[2]

    def in_use_beside(self, own: int) -> bool:
        """Does the same as :attr:`in_use`, without counting ``own`` tensors that the caller has made."""
        tensors, objects, address = self._own
        return self.holders() != (tensors + own, objects, address)

    def users(self) -> list[Tensor]:
        """Returns the Python tensors over the memory, without the lease's own. It looks at all objects of the process.

        Tensors that only C++ holds, as autograd does, are not among them.
        """
        own = {id(each) for views in ([self.memory], *self._views.values(), self._saved.values()) for each in views}
        with torch.DisableTorchFunctionSubclass():
            return [each for each in gc.get_objects() if issubclass(type(each), Tensor) and self._has(each, own)]

    def _has(self, tensor: Tensor, own: Container[int]) -> bool:
        try:
            return id(tensor) not in own and storage_id(tensor.untyped_storage()) == self._id
        except (RuntimeError, NotImplementedError, ValueError):  # it has no memory
            return False

    def holders(self) -> tuple[int, int, int]:
        """Returns how many tensors own the storage, how many references the storage object has, and the storage's address."""
        storage = self._storage
        return storage_use_count(self._id), sys.getrefcount(storage), storage.data_ptr()

    def views(self, key: Hashable, spans: Sequence[Span]) -> list[Tensor]:
        """Returns the parameters at ``spans``, made once for each ``key``.

        Callers make views of these tensors, and must not keep the tensors themselves: these do not count as use.
        """
        if key not in self._views:
            self._views[key] = [view(self.memory, span) for span in spans]
            tensors, objects, address = self._own
            self._own = tensors + len(spans), objects, address
        return self._views[key]

    def saved(self, saved: SavedView) -> Tensor:
        """Returns a new tensor for a saved view. As long as the tensor lives, the memory is :attr:`in_use`.

        The same views are saved in each step. The lease keeps the first :data:`MOST_SAVED` of them: an alias of a kept view takes
        a third of the time of a new view. The kept views do not count as use.
        """
        found = self._saved.get(saved)
        if found is None:
            found = strided(self.memory, saved.offset, saved.dtype, saved.shape, saved.stride)
            if saved.again and len(self._saved) < MOST_SAVED:
                self._saved[saved] = found
                tensors, objects, address = self._own
                self._own = tensors + 1, objects, address  # `found` is one more owner of the storage
        return found.detach()


def shared(tensor: Tensor, beside: int = 0) -> bool:
    """Returns True if other tensors or graphs hold the tensor's memory, apart from this tensor and ``beside`` known ones."""
    storage = tensor.untyped_storage()
    # This tensor is one owner. The storage object is the second: Python has one object per storage, for all code.
    return storage_use_count(storage_id(storage)) > 2 + beside or sys.getrefcount(storage) > _UNHELD


def _references(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


_UNHELD = _references(torch.empty(0, device="cpu"))
"""The reference count of a storage object in :func:`shared` if no other code refers to the object."""


def held_elsewhere(named: Iterable[Mapping[Any, Any]], known: Container[int]) -> bool:
    """Returns True if a tensor in these dictionaries, or its memory, has another reference.

    Args:
        named: the dictionaries.
        known: the ``id`` of each tensor to which the package itself has one more reference.
    """
    for values in named:
        for name in values:
            count = references(values, name)
            value = values[name]
            has_memory = type(value) is Tensor and value.layout is torch.strided
            held = count > ALONE + (id(value) in known) or (has_memory and shared(value))
            if isinstance(value, Tensor) and held:
                return True
            del value  # one more reference if a later name has the same tensor
    return False


def references(container: Any, key: Any) -> int:
    """Returns the number of references to ``container[key]``. It is :data:`ALONE` if only the container has one."""
    return sys.getrefcount(container[key])


ALONE = references([torch.empty(0, device="cpu")], 0)
"""Measured, because versions of Python differ in the references that a call takes."""
