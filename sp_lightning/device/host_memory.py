"""Host memory: page-locked (pinned), which the device copies without the host's help; and given back to the system."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from contextlib import suppress
from typing import Any

from torch import Tensor

from sp_lightning.device.device import Device, Stream, Wait

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h
_LARGE = 2**20
_ANOTHER_LIBRARY = AttributeError, OSError, TypeError


class PinnedMemory:
    """Host memory that is page-locked while this object lives, where the device allows it.

    Attributes:
        bytes: the memory, ``uint8``, page-aligned, at least ``nbytes`` long.
        pinned: whether the memory is page-locked; False where ``pin`` is False or the system refused.
        nbytes: how long ``bytes`` is.
        last: the event of the last transfer from or to it, if its user notes that.

    Args:
        device: the device that copies from and to the memory.
        nbytes: how much is needed, in bytes.
        pin: whether to page-lock the memory.
        memory: memory that is there already, in whole pages, in place of new memory.
    """

    def __init__(self, device: Device, nbytes: int = 0, *, pin: bool, memory: Tensor | None = None) -> None:
        self.bytes = device.host_empty(nbytes, pin=pin) if memory is None else memory
        self.nbytes = self.bytes.nbytes
        self.pinned = pin and device.pin(self.bytes)
        self.last: Any = None
        # The finalizer holds the memory, so that it is unpinned before it is freed.
        self._finalizer = weakref.finalize(self, _unpin, device, self.bytes, os.getpid()) if self.pinned else None

    def unpin(self) -> None:
        """Gives the page lock back now. The memory and its contents stay."""
        if self._finalizer is not None:
            self._finalizer()


def _unpin(device: Device, memory: Tensor, process: int) -> None:
    """Unpins memory after every copy that was issued so far, so that its owner need not know which copy was the last."""
    # A forked worker inherits the finalizer and a copy of the memory. It can neither wait for the device nor unpin.
    if os.getpid() != process:
        return
    for stream in (Stream.UPLOAD, Stream.DOWNLOAD):
        device.synchronize(device.record(stream), Wait.UNPIN_AFTER_COPY)
    device.unpin(memory)


# ---------------------------------------------------------------------- what the C library does with memory that is freed


def return_large_blocks() -> None:
    """Has the C library return every block of a MiB and more to the system as soon as it is freed, where it is glibc.

    glibc (2.36) keeps freed blocks of up to 32 MiB once it has seen some: hundreds of MiB, where tensors of a layer come and go.
    """
    with suppress(*_ANOTHER_LIBRARY):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)


def free_garbage() -> None:
    """Frees what only cycles of references hold, a run that is over, say, before it is measured how much memory is left."""
    gc.collect()
    return_free_memory()


def return_free_memory() -> None:
    """Has the C library return what is free to the system, where it is glibc."""
    with suppress(*_ANOTHER_LIBRARY):
        ctypes.CDLL(None).malloc_trim(0)
