"""Host memory that bytes pass through on their way from and to a disk. It is used again and again, and bounded."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakSet

from torch import Tensor

from sp_lightning.device.layout import whole_pages
from sp_lightning.store.direct_file import aligned_memory


class StagingRing:
    """A pool of buffers of whole pages. Whoever takes buffers, or gives them back, has its lock.

    Args:
        limit: the most bytes of all buffers together. One larger buffer is lent if nothing else is.

    Attributes:
        lock: the lock of all who use it.
        users: those who take buffers.
        nbytes: bytes of all buffers now.
        peak_bytes: the most bytes that they were.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lock = threading.RLock()
        self.users = WeakSet[Any]()
        self._idle: list[Tensor] = []
        self.nbytes = 0
        self.peak_bytes = 0

    def take(self, nbytes: int) -> Tensor | None:
        """Lends a buffer of at least so many bytes, in whole pages; None if the limit leaves no memory for it now."""
        nbytes = whole_pages(nbytes)
        for index, buffer in enumerate(self._idle):
            if buffer.nbytes == nbytes:
                return self._idle.pop(index)
        while self._idle and self.nbytes + nbytes > self.limit:
            self.nbytes -= self._idle.pop(0).nbytes
        if self.nbytes and self.nbytes + nbytes > self.limit:
            return None
        return self.take_more(nbytes)

    def take_more(self, nbytes: int) -> Tensor:
        """Lends a new buffer, whatever the limit is. It is freed once it is given back."""
        memory = aligned_memory(nbytes)
        self.nbytes += memory.nbytes
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
        return memory

    def free(self) -> None:
        """Frees the buffers that nobody has."""
        while self._idle:
            self.nbytes -= self._idle.pop().nbytes

    def give_back(self, buffer: Tensor) -> None:
        """Takes a buffer back that nobody reads or writes any more."""
        if self.nbytes > self.limit:
            self.nbytes -= buffer.nbytes
        else:
            self._idle.append(buffer)
