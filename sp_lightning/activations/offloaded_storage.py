"""A storage that autograd has saved something of, on its way to the host and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef

from sp_lightning.device.torch_private import preserve_version_counter
from sp_lightning.store.host_ring import HostBuffer, HostRing


class OffloadedStorage:
    """What one storage held at one version: on the device until it is stored, on the host, and on the device again.

    Args:
        saved: the tensor that autograd has saved.
        source: the whole storage on the device, ``uint8``.
        buffer: where it goes on the host.
        ring: takes the buffer back when no graph needs this object any more.
        row: the row of the timeline in which its copies are noted.

    Attributes:
        identity: a weak reference to the storage: while it lives, no other storage gets the same number.
        nbytes: bytes of the storage.
        source: as given; None as soon as compute may use the memory for something else.
        stored: the event of the copy to the host.
        returned: the storage on the device again, ``uint8``, while backward is about to need it.
        arrived: the event of the copy from the host.
    """

    __slots__ = (
        "__weakref__",
        "_ring",
        "_versioned",
        "arrived",
        "buffer",
        "identity",
        "nbytes",
        "returned",
        "row",
        "source",
        "stored",
    )

    def __init__(self, saved: Tensor, source: Tensor, buffer: HostBuffer, ring: HostRing, row: int) -> None:
        self.identity = StorageWeakRef(source.untyped_storage())
        # A tensor that shares the version counter of the saved one, and no memory with it.
        self._versioned = saved.detach()
        self._versioned.data = saved.new_empty(0)
        self.nbytes = source.nbytes
        self.source: Tensor | None = source
        self.buffer = buffer
        self.stored: Any = None
        self.returned: Tensor | None = None
        self.arrived: Any = None
        self.row = row
        self._ring = ring

    @property
    def on_host(self) -> Tensor:
        """The whole storage on the host, ``uint8``."""
        return self.buffer.memory.bytes[: self.nbytes]

    @property
    def version(self) -> int:
        """The version of the saved tensor now, in-place writes since then included."""
        return self._versioned._version

    def counts_with(self, tensor: Tensor) -> bool:
        """Whether a write of a tensor shows in :attr:`version`.

        Not all views of one storage share a counter: each result of ``unsafe_chunk`` has its own.
        """
        with preserve_version_counter(tensor):
            before = self.version
            increment_version(tensor)
            return self.version != before

    def __del__(self) -> None:
        # The graph has let go of it. That may happen in any thread.
        self._ring.give_back(self.buffer)


class SavedReference(NamedTuple):
    """What the graph holds in place of a saved tensor: where the tensor lies in its storage, and its version then.

    Attributes:
        storage: what the tensor is a view of.
        version: the tensor's version when it was saved.
        offset: bytes from the start of the storage.
        stride: in elements.
    """

    storage: OffloadedStorage
    version: int
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
