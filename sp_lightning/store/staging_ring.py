"""Host memory that bytes pass through on their way from and to a disk. It is used again and again, and bounded."""

from __future__ import annotations

from torch import Tensor

from sp_lightning.device.layout import whole_pages
from sp_lightning.store.scratch import aligned_memory


class StagingRing:
    """A pool of buffers of whole pages.

    Args:
        limit: the most bytes of all buffers together. One larger buffer is lent if nothing else is.

    Attributes:
        nbytes: bytes of all buffers now.
        peak_bytes: the most bytes that they were.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
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
        self.nbytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
        return aligned_memory(nbytes)

    def free(self) -> None:
        """Frees the buffers that nobody has."""
        while self._idle:
            self.nbytes -= self._idle.pop().nbytes

    def give_back(self, buffer: Tensor) -> None:
        """Takes a buffer back that nobody reads or writes any more."""
        self._idle.append(buffer)
