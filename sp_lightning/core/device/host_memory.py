"""Host memory: page-locked (pinned) memory, which asynchronous copies need, and the return of free memory to the system."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from contextlib import suppress
from typing import Any

from torch import Tensor

from sp_lightning.core.device.device import Device, Stream, Wait

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h
_LARGE = 2**20
_ANOTHER_LIBRARY = AttributeError, OSError, TypeError  # raised if the C library is not glibc


class PinnedMemory:
    """Host memory that is page-locked while this object lives, if the device supports it.

    Attributes:
        bytes: the memory, ``uint8``, page-aligned, at least ``nbytes`` long.
        pinned: True if the memory was page-locked at first; False if ``pin`` is False or the system refused. :meth:`unpin` does
            not change it.
        nbytes: size of ``bytes``.
        last: the event of the last copy from or to the memory. The code that uses the memory sets it.

    Args:
        device: the device that copies from and to the memory.
        nbytes: size in bytes.
        pin: True to page-lock the memory.
        memory: existing memory, in whole pages, to use instead of new memory.
    """

    def __init__(self, device: Device, nbytes: int = 0, *, pin: bool, memory: Tensor | None = None) -> None:
        self.bytes = device.host_empty(nbytes, pin=pin) if memory is None else memory
        self.nbytes = self.bytes.nbytes
        self.pinned = pin and device.pin(self.bytes)
        self.last: Any = None
        # The finalizer holds a reference, so that the memory is unpinned before it is freed.
        self._finalizer = weakref.finalize(self, _unpin, device, self.bytes, os.getpid()) if self.pinned else None

    def unpin(self) -> None:
        """Releases the page lock now. The memory and its contents stay."""
        if self._finalizer is not None:
            self._finalizer()


def _unpin(device: Device, memory: Tensor, process: int) -> None:
    """Waits for all copies issued so far, so that the owner need not know the last copy, and unpins the memory."""
    # A forked worker inherits the finalizer and a copy of the memory. It must not use the device.
    if os.getpid() != process:
        return
    for stream in (Stream.UPLOAD, Stream.DOWNLOAD):
        device.synchronize(device.record(stream), Wait.UNPIN_AFTER_COPY)
    device.unpin(memory)


# ---------------------------------------------------------------------- the C library's free memory


def return_large_blocks() -> None:
    """Makes glibc return freed blocks of 1 MiB and more to the system at once. Does nothing with other C libraries.

    By default glibc (2.36) keeps freed blocks of up to 32 MiB: hundreds of MiB when tensors of layers are allocated and freed.
    """
    with suppress(*_ANOTHER_LIBRARY):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)


def free_garbage() -> None:
    """Frees reference cycles (a finished run), and returns free memory to the system. Called before free memory is measured."""
    gc.collect()
    return_free_memory()


def return_free_memory() -> None:
    """Makes glibc return its free memory to the system. Does nothing with other C libraries."""
    with suppress(*_ANOTHER_LIBRARY):
        ctypes.CDLL(None).malloc_trim(0)
