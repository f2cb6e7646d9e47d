"""Host memory: page-locked (pinned) memory, which asynchronous copies need, and the return of free memory to the system."""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import os
import weakref
from bisect import bisect_left, insort
from collections import deque
from contextlib import suppress
from typing import Any

from torch import Tensor

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.device.layout import whole_pages

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h
_LARGE = 2**20
_ANOTHER_LIBRARY = AttributeError, OSError, TypeError


class PinnedMemory:
    """Host memory that is page-locked while this object lives, if the device supports it.

    Attributes:
        bytes: the memory, ``uint8``, page-aligned, at least ``nbytes`` long.
        pinned: True if the memory is page-locked; False if ``pin`` is False or the system refused.
        nbytes: size of ``bytes``.
        last: the event of the last copy from or to it, set by the user of the memory.

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
    """Unpins memory after all copies issued so far, so that the owner need not know the last one."""
    # A forked worker inherits the finalizer and a copy of the memory. It must not use the device.
    if os.getpid() != process:
        return
    for stream in (Stream.UPLOAD, Stream.DOWNLOAD):
        device.synchronize(device.record(stream), Wait.UNPIN_AFTER_COPY)
    device.unpin(memory)


# ---------------------------------------------------------------------- memory that is used again and again

# An idle buffer is used for something smaller, down to this share of its size.
_FILLED = 1 / 2


class HostRing:
    """A pool of host buffers, pinned and bounded.

    Args:
        device: the device that the transfers are from and to.
        pin: whether the memory is page-locked.
        limit: the most bytes that the ring takes; None for no limit.

    Attributes:
        pin: the same.
        nbytes: bytes that the ring has taken.
        peak_bytes: the most bytes that it had taken at once.
    """

    def __init__(self, device: Device, *, pin: bool, limit: int | None) -> None:
        self._device = device
        self.pin = pin
        self.limit = limit
        self._idle: list[PinnedMemory] = []  # the smallest first
        # A buffer is returned when a graph is freed, by any thread and at any moment, while the ring is in use, too. A
        # deque takes it without a lock.
        self._returned: deque[PinnedMemory] = deque()
        self.nbytes = 0
        self.peak_bytes = 0

    @property
    def free_bytes(self) -> float:
        """Bytes that are idle, or that the limit still allows."""
        idle = sum(buffer.nbytes for buffer in (*self._idle, *self._returned))
        return math.inf if self.limit is None else self.limit - self.nbytes + idle

    def take(self, nbytes: int) -> PinnedMemory | None:
        """Gives out a buffer of at least so many bytes; None if the limit leaves no memory for one.

        Who takes it notes the last transfer from or to it (:attr:`~sp_lightning.device.host_memory.PinnedMemory.last`).
        """
        while self._returned:
            insort(self._idle, self._returned.popleft(), key=_size)
        nbytes = whole_pages(nbytes)
        at = bisect_left(self._idle, nbytes, key=_size)
        if at < len(self._idle) and self._idle[at].nbytes * _FILLED <= nbytes:
            return self._idle.pop(at)
        while self.limit is not None and self.nbytes + nbytes > self.limit:
            if not self._idle:
                return None
            self._free(largest := self._idle.pop())
            self.nbytes -= largest.nbytes
        buffer = PinnedMemory(self._device, nbytes, pin=self.pin)
        self.nbytes += buffer.nbytes
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
        return buffer

    def give_back(self, buffer: PinnedMemory) -> None:
        """Takes a buffer back whose contents its taker does not need any more."""
        self._returned.append(buffer)

    def close(self) -> None:
        """Frees the idle buffers. A graph that outlives the run keeps its own."""
        for buffer in (*self._idle, *self._returned):
            self._free(buffer)
        self._idle.clear()
        self._returned.clear()

    def _free(self, buffer: PinnedMemory) -> None:
        """Makes sure that no copy uses a buffer any more."""
        self._device.synchronize(buffer.last, Wait.CLOSE_AFTER_STORE)
        self._device.access(buffer.bytes, None, write=True)


def _size(buffer: PinnedMemory) -> int:
    return buffer.nbytes


# ---------------------------------------------------------------------- the C library's free memory


def return_large_blocks() -> None:
    """Makes glibc return freed blocks of 1 MiB and more to the system at once. Does nothing with other C libraries.

    By default glibc (2.36) keeps freed blocks of up to 32 MiB: hundreds of MiB when tensors of layers are allocated and freed.
    """
    with suppress(*_ANOTHER_LIBRARY):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)


def return_pages(memory: Tensor) -> None:
    """Returns whole pages of unpinned memory to the system. They read as zeros afterwards."""
    with suppress(*_ANOTHER_LIBRARY):
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), mmap.MADV_DONTNEED
        )


def free_garbage() -> None:
    """Frees reference cycles (for example a finished run) before free memory is measured."""
    gc.collect()
    return_free_memory()


def return_free_memory() -> None:
    """Makes glibc return its free memory to the system. Does nothing with other C libraries."""
    with suppress(*_ANOTHER_LIBRARY):
        ctypes.CDLL(None).malloc_trim(0)
