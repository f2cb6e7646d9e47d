"""Host memory that is page-locked while somebody has it."""

from __future__ import annotations

import os
import weakref

from torch import Tensor

from sp_lightning.device.device import Device
from sp_lightning.device.waits import Stream, Wait


class PinnedMemory:
    """Host memory that is page-locked while this object lives, where the device allows it.

    Attributes:
        bytes: ``uint8``, page-aligned.
        pinned: whether page-locking succeeded; False without ``pin``.
    """

    def __init__(self, device: Device, nbytes: int, *, pin: bool) -> None:
        self.bytes = device.host_empty(nbytes, pin=pin)
        self.pinned = pin and device.pin(self.bytes)
        # The finalizer holds the memory, so that it is unpinned before it is freed.
        self._finalizer = weakref.finalize(self, _unpin, device, self.bytes, os.getpid()) if self.pinned else None

    def unpin(self) -> None:
        """Give the page lock back; the memory stays as it is."""
        if self._finalizer is not None:
            self._finalizer()


def _unpin(device: Device, memory: Tensor, process: int) -> None:
    """Unpin memory once nothing is copied any more: whoever lets go of it need not know of its last copy."""
    if os.getpid() != process:  # a forked worker has a copy of the memory, and can neither wait nor unpin
        return
    for stream in (Stream.UPLOAD, Stream.DOWNLOAD):
        device.synchronize(device.record(stream), Wait.UNPIN_AFTER_COPY)
    device.unpin(memory)
