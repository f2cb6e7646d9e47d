"""Weights and gradients on a disk: memory that is mapped from a scratch file, with the pages of a few layers resident.

User code finds ordinary tensors: the system reads pages that it touches, and pages that it writes are written to the file when
their layer is evicted. So reads and writes need no notice, and results cannot depend on them. Optimizer state has another file,
which is read and written past the page cache. The space of this file is reserved before it is mapped; it never shrinks.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
from bisect import bisect_right
from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sp_lightning.device.layout import PAGE, whole_pages
from sp_lightning.disk.direct_file import Extent, ScratchFile
from sp_lightning.disk.state_placement import WINDOW, AccessPredictor
from sp_lightning.plan.units import human_bytes
from sp_lightning.store.block_memory import BlockMemory

_PAGE_OUT = 21  # of Linux 5.4
_POPULATE_READ = 22  # of Linux 5.14; a failed read is an error then, not a signal
_ZERO_RANGE = 0x10 | 0x01  # of fallocate: blocks stay allocated; their contents are neither written nor read
_WRITE_OUT = 1 | 2 | 4  # wait for writes in flight, begin the others, wait for them


class MappedFile:
    """A scratch file whose parts are mapped.

    Args:
        folder: its folder.
        what: its contents, for messages.

    Attributes:
        read_bytes, written_bytes: the bytes that were requested to be read and written so far.
    """

    def __init__(self, folder: Path, what: str = "weights") -> None:
        self._what = what
        self._file = ScratchFile(folder, what, promised=True)
        self._lock = threading.RLock()
        self._in_memory: deque[MappedMemory] = deque()
        # By thread: updates in the background have another order.
        self._uses = defaultdict[int, AccessPredictor[MappedMemory]](lambda: AccessPredictor(2))
        self._leaving: deque[Future[None]] = deque()
        self._failure: OSError | None = None
        self._thread = ThreadPoolExecutor(1, "superpipeline-mapped")
        self.read_bytes = self.written_bytes = 0
        weakref.finalize(self, self._thread.shutdown, wait=False)

    def allocate(self, nbytes: int, pin: bool) -> MappedMemory:
        """Returns memory. It is never page-locked, which would keep it resident.

        Raises:
            OSError: the disk has no room, or its files cannot be mapped.
        """
        with self._lock:
            extent = self._file.allocate(nbytes)
        return MappedMemory(self, extent.offset, nbytes, map_pages(self._file, extent))

    def reserve(self, nbytes: int) -> None:
        """Reserves disk space for memory that will be allocated.

        Raises:
            OSError: the disk has no room.
        """
        self._file.reserve(nbytes)

    def use(self, memory: MappedMemory) -> None:
        """Brings a block's pages to memory, evicts the least recently used block, and reads the next one ahead.

        Raises:
            OSError: the read, or an earlier write, failed.
        """
        with self._lock:
            self.read_bytes += memory.nbytes * self._enter(memory)
            uses = self._uses[threading.get_ident()]
            uses.note(memory)
            following = next(uses.coming(), None)
        number = memory.advise(_POPULATE_READ)
        if number not in (0, errno.EINVAL):  # an older kernel reads pages when they are touched
            raise self._failed("read", errno.EIO if number == errno.EFAULT else number)
        if following is not None and following is not memory:
            following.advise(mmap.MADV_WILLNEED)

    def renew(self, memory: MappedMemory) -> None:
        """Prepares a block for writing all of it: its contents are dropped, and nothing is read.

        Raises:
            OSError: an earlier write failed.
        """
        with self._lock:
            self._enter(memory)
        # If the file system does not support that, pages are read when they are written.
        libc.fallocate(self._file.descriptor, _ZERO_RANGE, memory.begin, len(memory.pages))

    def _enter(self, memory: MappedMemory) -> bool:
        """Makes a block the most recently used one. Returns True if its pages have to be read."""
        if self._failure is not None:
            raise self._failure
        while self._leaving and (len(self._leaving) > WINDOW or self._leaving[0].done()):
            self._written(self._leaving.popleft())
        came = memory not in self._in_memory
        if not came:
            self._in_memory.remove(memory)
        self._in_memory.append(memory)
        while len(self._in_memory) > WINDOW:
            self._leave(self._in_memory.popleft())
        return came

    def leave(self) -> None:
        """Evicts all pages."""
        with self._lock:
            while self._in_memory:
                self._leave(self._in_memory.popleft())
        self.sync()

    def sync(self) -> None:
        """Waits for all writes.

        Raises:
            OSError: a write failed.
        """
        with self._lock:
            while self._leaving:
                self._written(self._leaving.popleft())
            if self._failure is not None:
                raise self._failure

    def _written(self, leaving: Future[None]) -> None:
        try:
            leaving.result()
        except OSError as error:
            self._failure = error  # the pages are lost
            raise

    def _leave(self, memory: MappedMemory) -> None:
        self.written_bytes += memory.nbytes
        # In a shared mapping this unmaps the pages; the page cache keeps what was written.
        memory.advise(mmap.MADV_DONTNEED)
        self._leaving.append(self._thread.submit(self._write_out, memory))

    def _write_out(self, memory: MappedMemory) -> None:
        descriptor, size = self._file.descriptor, len(memory.pages)
        if libc.sync_file_range(descriptor, memory.begin, size, _WRITE_OUT):
            raise self._failed("written", ctypes.get_errno())
        os.posix_fadvise(descriptor, memory.begin, size, os.POSIX_FADV_DONTNEED)

    def _failed(self, what: str, number: int) -> OSError:
        """Returns the error for a failed read or write."""
        return OSError(
            number,
            f"{self._what.capitalize()} on the disk could not be {what}: {os.strerror(number)}. The step was not finished; go on "
            "from the last checkpoint",
            self._file.path,
        )


class MappedMemory(BlockMemory):
    """The memory of a block whose weights or gradients are on a disk.

    Attributes:
        begin: its place in the file.
        nbytes: its size.
        pages: the mapping of :func:`map_pages`.
    """

    pinned = True  # avoids a warning: this memory is never page-locked

    def __init__(self, file: MappedFile, begin: int, nbytes: int, pages: Any) -> None:
        self._file = file
        self.nbytes = nbytes
        self._map(begin, pages)

    def _map(self, begin: int, pages: Any) -> None:
        self.begin, self.pages = begin, pages
        self.common = torch.frombuffer(pages, dtype=torch.uint8)[: self.nbytes]

    def reallocate(self) -> None:
        other = self._file.allocate(self.nbytes, False)
        self._map(other.begin, other.pages)

    def use(self) -> None:
        self._file.use(self)

    def renew(self) -> None:
        self._file.renew(self)

    def advise(self, advice: int) -> int:
        """Calls :func:`~sp_lightning.disk.mapped_file.advise` for all pages."""
        return advise(self.common.data_ptr(), len(self.pages), advice)


# ---------------------------------------------------------------------- pages, and their addresses


def _load() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    )  # fmt: skip
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


libc: Any = None
"""The C library; None if it lacks a function that is needed here."""
with suppress(OSError, AttributeError, TypeError):
    libc = _load()


def supported() -> bool:
    """Returns True if the system has what this file needs."""
    return libc is not None and hasattr(mmap, "MADV_DONTFORK")


_mapped: dict[int, int] = {}
"""The end of each mapping by its beginning. Any thread, or a forked process, may read it, so there is no lock."""


def is_on_disk(tensor: Any) -> bool:
    """Returns True if a plain tensor or a storage is mapped from a scratch file, of this run or an earlier one."""
    if not _mapped:
        return False
    with torch.DisableTorchFunctionSubclass():  # does not read an OnDiskTensor
        address = tensor.data_ptr()
    # A list of numbers: making a list of pairs may collect garbage, which may unmap.
    begins = sorted(_mapped)
    at = bisect_right(begins, address) - 1
    return at >= 0 and address < _mapped.get(begins[at], 0)


def map_pages(file: ScratchFile, extent: Extent) -> Any:
    """Maps a part of a file while a tensor views it. ``mmap`` would hold a descriptor for each mapping.

    Args:
        file: the file.
        extent: the part. Its place is free again after it is unmapped.

    Returns:
        An object with the buffer protocol.

    Raises:
        OSError: it cannot be mapped.
    """
    size = extent.nbytes
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file.descriptor, extent.offset)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(
            number,
            f"{human_bytes(size)} of a scratch file could not be mapped ({os.strerror(number)}); see vm.max_map_count and "
            "ulimit -v",
            file.path,
        )
    advise(address, size, mmap.MADV_DONTFORK)
    pages = _array_of(size).from_address(address)
    _mapped[address] = address + size
    finalizer = weakref.finalize(pages, _unmap, os.getpid(), address, extent)
    finalizer.atexit = False  # tensors may be read until the process ends
    return pages


@cache
def _array_of(size: int) -> Any:
    return type("Pages", (ctypes.c_char * size,), {})  # finalizers need a class that Python makes


def _unmap(process: int, address: int, extent: Extent) -> None:
    if os.getpid() == process:  # a forked process has other memory at that address
        _mapped.pop(address, None)
        libc.munmap(address, extent.nbytes)


def page_out(address: int, nbytes: int) -> None:
    """Evicts the whole pages of a mapped area. Private pages that were written are kept."""
    begin, end = whole_pages(address), (address + nbytes) // PAGE * PAGE
    if end > begin:
        advise(begin, end - begin, _PAGE_OUT)


def advise(address: int, nbytes: int, advice: int) -> int:
    """Calls ``madvise`` without the GIL. Returns its error number, or 0."""
    return ctypes.get_errno() if libc.madvise(address, nbytes, advice) else 0
