"""Data of layers on a disk: memory that is mapped from a scratch file, with the pages of a few layers in memory.

Weights, gradients and optimizer state have a file each. User code finds ordinary tensors. The system reads the pages that user
code touches, and writes changed pages to the file when their layer is evicted. So the engine need not notice when user code reads
or writes them. The disk space of a mapped file is reserved before it is mapped. A mapped file never shrinks.
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
from torch import Tensor

from sp_lightning.capabilities.disk.scratch_file import Extent, ScratchFile
from sp_lightning.capabilities.disk.state_placement import WINDOW, AccessPredictor
from sp_lightning.core.device.layout import PAGE, strided, whole_pages
from sp_lightning.core.plan.units import human_bytes
from sp_lightning.core.store.block_memory import BlockMemory
from sp_lightning.core.torch_compat.modes import no_inference_mode

_PAGE_OUT = 21  # MADV_PAGEOUT, from Linux 5.4 on
_POPULATE_READ = 22  # MADV_POPULATE_READ, from Linux 5.14 on. A failed read is an error, and not a signal
_AHEAD = 2**17  # Linux's default of a device's read_ahead_kb
_ZERO_RANGE = 0x10 | 0x01  # for fallocate: blocks stay allocated; their contents are neither written nor read
_WRITE_OUT = 1 | 2 | 4  # for sync_file_range: waits for writes in flight, begins the other writes, and waits for them


class MappedFile:
    """A scratch file whose parts are mapped, with few blocks in memory.

    Args:
        folder: the folder of the file.
        what: the contents of the file, for messages.
        window: the most bytes of blocks in memory, unless one block has more; None for ``WINDOW`` blocks of any size.

    Raises:
        OSError: the system cannot map files as this package needs it, or no file can be created in the folder.

    Attributes:
        read_bytes, written_bytes: the bytes of the blocks that were read and evicted so far.
    """

    def __init__(self, folder: Path, what: str = "weights", window: int | None = None) -> None:
        if not supported():
            raise OSError(errno.ENOSYS, "disk= needs Linux, because its files are mapped to memory. Leave disk= out")
        self._what, self._window = what, window
        self._file = ScratchFile(folder, what)
        self._lock = threading.RLock()
        self._in_memory: deque[MappedMemory] = deque()
        # By thread, because updates in the background use blocks in another order.
        self._uses = defaultdict[int, AccessPredictor[MappedMemory]](lambda: AccessPredictor(2))
        self._leaving: deque[Future[None]] = deque()
        self._failure: OSError | None = None
        self._threads = ThreadPoolExecutor(
            2, "superpipeline-mapped"
        )  # a block is read ahead while another one is written
        self.read_bytes = self.written_bytes = 0
        weakref.finalize(self, self._threads.shutdown, wait=False)

    def allocate(self, nbytes: int, pin: bool) -> MappedMemory:
        """Allocates memory for a block.

        Args:
            nbytes: the size in bytes.
            pin: ignored. A page lock would keep the pages in memory.

        Raises:
            OSError: the disk has no room, or its files cannot be mapped.
        """
        with self._lock:
            extent = self._file.allocate(nbytes)
        return MappedMemory(self, extent.offset, nbytes, map_pages(self._file, extent))

    def reserve(self, nbytes: int, others: int = 0) -> None:
        """Reserves disk space for memory that will be allocated. See :meth:`ScratchFile.reserve`."""
        self._file.reserve(nbytes, others)

    def use(self, memory: MappedMemory) -> None:
        """Reads a block's pages to memory, evicts the least recently used blocks, and prefetches the block predicted next.

        Raises:
            OSError: the read, or an earlier write, failed.
        """
        with self._lock:
            self.read_bytes += memory.nbytes * self._enter(memory)
            uses = self._uses[threading.get_ident()]
            uses.note(memory)
            following = next(uses.coming(), None)
        if number := populate(memory.common.data_ptr(), len(memory.pages)):
            raise self._failed("read", number)
        if following is not None and following is not memory:
            self._threads.submit(following.read_ahead)

    def renew(self, memory: MappedMemory) -> None:
        """Prepares a block that the caller is about to overwrite. Drops its contents, so that they are not read.

        Evicts the least recently used blocks, as :meth:`use`.

        Raises:
            OSError: an earlier write failed.
        """
        with self._lock:
            self._enter(memory)
        # An error is ignored: if the file system does not support this call, pages are read when they are written.
        libc.fallocate(self._file.descriptor, _ZERO_RANGE, memory.begin, len(memory.pages))

    def _enter(self, memory: MappedMemory) -> bool:
        """Makes a block the most recently used one, and evicts the others until the window suffices.

        Returns:
            True if the block was not in memory.

        Raises:
            OSError: an earlier write failed.
        """
        if self._failure is not None:
            raise self._failure
        while self._leaving and (len(self._leaving) > WINDOW or self._leaving[0].done()):
            self._written(self._leaving.popleft())
        came = memory not in self._in_memory
        if not came:
            self._in_memory.remove(memory)
        self._in_memory.append(memory)
        while len(self._in_memory) > 1 and self._exceeds_window():
            self._leave(self._in_memory.popleft())
        return came

    def _exceeds_window(self) -> bool:
        if self._window is None:
            return len(self._in_memory) > WINDOW
        return sum(memory.nbytes for memory in self._in_memory) > self._window

    def forget(self, memory: MappedMemory) -> None:
        """Drops all references to a block that is not used any more. The order of uses is learned again."""
        with self._lock:
            self._uses.clear()
            if memory in self._in_memory:
                self._in_memory.remove(memory)

    def leave(self) -> None:
        """Evicts all blocks, and waits until their pages are written.

        Raises:
            OSError: a write failed.
        """
        with self._lock:
            while self._in_memory:
                self._leave(self._in_memory.popleft())
        self.sync()

    def sync(self) -> None:
        """Waits for the writes of all evicted blocks.

        Raises:
            OSError: a write failed.
        """
        with self._lock:
            while self._leaving:
                self._written(self._leaving.popleft())
            if self._failure is not None:
                raise self._failure

    def _written(self, leaving: Future[None]) -> None:
        """Waits for the write of an evicted block. Raises its error, which each later call raises, too."""
        try:
            leaving.result()
        except OSError as error:
            self._failure = error  # the pages are lost
            raise

    def _leave(self, memory: MappedMemory) -> None:
        """Evicts a block: unmaps its pages, and writes them in a thread."""
        self.written_bytes += memory.nbytes
        # In a shared mapping this only unmaps the pages: the page cache keeps them with their changes.
        memory.advise(mmap.MADV_DONTNEED)
        self._leaving.append(self._threads.submit(self._write_out, memory))

    def _write_out(self, memory: MappedMemory) -> None:
        """Writes a block's changed pages from the page cache to the disk, and drops all its pages from the page cache."""
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
    """The memory of a block whose weights, gradients or optimizer state are on a disk.

    Attributes:
        begin: the offset of the memory in the file.
        nbytes: its size in bytes.
        pages: the mapping, from :func:`map_pages`.
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

    def part(self, offset: int, like: Tensor) -> Tensor:
        """Returns a part as a tensor with the shape, strides and dtype of ``like``, with a storage of its own.

        A checkpoint writes whole storages.
        """
        with no_inference_mode():
            flat = torch.frombuffer(self.pages, dtype=torch.uint8, count=like.nbytes, offset=offset)
        return strided(flat, 0, like.dtype, like.shape, like.stride())

    def contains(self, tensor: Tensor) -> bool:
        """Returns True if a tensor's memory begins in this memory."""
        return 0 <= tensor.data_ptr() - self.common.data_ptr() < self.nbytes

    def read_ahead(self) -> None:
        """Begins to read the pages to the page cache. Linux reads no more than :data:`_AHEAD` bytes of one call's pages ahead."""
        for begin in range(0, len(self.pages), _AHEAD):
            size = min(_AHEAD, len(self.pages) - begin)
            advise(self.common.data_ptr() + begin, size, mmap.MADV_WILLNEED)

    def advise(self, advice: int) -> int:
        """Calls :func:`~sp_lightning.capabilities.disk.mapped_file.advise` for all pages."""
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
"""The C library; None if it lacks a function that this file calls."""
with suppress(OSError, AttributeError, TypeError):
    libc = _load()


def supported() -> bool:
    """Returns True if the C library and Python have the functions and constants that this file needs, as on Linux."""
    return libc is not None and hasattr(mmap, "MADV_DONTFORK")


_mapped: dict[int, int] = {}
"""The end address of each mapping, by its first address. There is no lock: a forked process reads this, too, and a lock that
another thread held at the fork would never be released in it."""


def is_on_disk(tensor: Any) -> bool:
    """Returns True if a plain tensor or a storage is mapped from a scratch file, of this run or an earlier one."""
    if not _mapped:
        return False
    with torch.DisableTorchFunctionSubclass():  # does not read an OnDiskTensor
        address = tensor.data_ptr()
    # The keys only: making a list of pairs may start a garbage collection, whose finalizers remove entries.
    begins = sorted(_mapped)
    at = bisect_right(begins, address) - 1
    return at >= 0 and address < _mapped.get(begins[at], 0)


def map_pages(file: ScratchFile, extent: Extent) -> Any:
    """Maps a part of a file. Python's ``mmap`` is not used, because it would hold a file descriptor for each mapping.

    Args:
        file: the file.
        extent: the part. It is freed after it is unmapped.

    Returns:
        An object with the buffer protocol. The part stays mapped while this object, or a tensor that views it, exists.

    Raises:
        OSError: the system does not map the part.
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
    advise(address, size, mmap.MADV_DONTFORK)  # a forked process gets errors instead: see `away.note_on_disk`
    pages = _array_of(size).from_address(address)
    _mapped[address] = address + size
    finalizer = weakref.finalize(pages, _unmap, os.getpid(), address, extent)
    finalizer.atexit = False  # tensors may be read until the process ends
    return pages


@cache
def _array_of(size: int) -> Any:
    return type("Pages", (ctypes.c_char * size,), {})  # a class of Python, because finalizers need weak references


def _unmap(process: int, address: int, extent: Extent) -> None:
    if os.getpid() == process:  # a forked process has other memory at that address
        _mapped.pop(address, None)
        libc.munmap(address, extent.nbytes)


def page_out(address: int, nbytes: int) -> None:
    """Evicts the whole pages of a mapped area from memory. The system keeps the contents of private pages that were written."""
    begin, end = whole_pages(address), (address + nbytes) // PAGE * PAGE
    if end > begin:
        advise(begin, end - begin, _PAGE_OUT)


def populate(address: int, nbytes: int) -> int:
    """Reads the pages of a mapped area to memory, so that a failed read is no signal.

    Returns:
        The number of the error; 0 if the read succeeded.
    """
    begin = address // PAGE * PAGE
    number = advise(begin, address + nbytes - begin, _POPULATE_READ)
    if number == errno.EINVAL:  # an older kernel, which reads pages when they are touched
        return 0
    return errno.EIO if number == errno.EFAULT else number


def advise(address: int, nbytes: int, advice: int) -> int:
    """Calls ``madvise`` without the GIL. Returns the error number of the call; 0 if it succeeded."""
    return ctypes.get_errno() if libc.madvise(address, nbytes, advice) else 0
