"""Host memory that all processes of a node have in common, and of which each has a view of its own.

Every process maps the same memory twice. What it writes through :attr:`SharedMemory.common` all of them see. Through
:attr:`SharedMemory.own` it sees the same values, but what it writes there stays its own: the system copies a page when it
is first written. That is what user code sees of a weight, so that each process has a replica, as with one copy per
process, and pays for pages that it writes alone.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4
from weakref import WeakSet
from zlib import crc32

import torch
from torch import Tensor

from sp_lightning.device.pages import Page, written_pages

with suppress(ImportError):  # Windows has none, and no devices that share memory
    import fcntl


class SharedMemory:
    """Memory of a node's processes.

    Attributes:
        nbytes: how much it is, in bytes, a multiple of the page size.
        common: all of it, flat ``uint8``: what is written here is seen by all processes.
        own: this process's view of all of it.

    Args:
        descriptor: the memory's file. The caller may close it afterwards.
        nbytes: a multiple of the page size.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._descriptor = os.dup(descriptor)
        self.bytes = mmap.mmap(descriptor, nbytes)
        with suppress(OSError):
            self.bytes.madvise(mmap.MADV_DONTFORK)  # workers of a DataLoader do not write it
        # A file of its own to lock: descriptors that were sent to processes are one open file.
        self._lock = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        _lockable.add(self)
        self.common = _tensor(self.bytes)
        self.own = OwnView(self._descriptor, self.common)

    def words(self, kind: str) -> memoryview:
        """The memory that all processes see, as numbers of 8 bytes (``"q"`` or ``"d"``)."""
        return memoryview(self.bytes).cast(kind)  # type: ignore[call-overload]

    @contextmanager
    def locked(self, until: Callable[[Callable[[], bool], str], None]) -> Iterator[None]:
        """While this is active no other process is here, nor another object for the same memory. It is not for two threads.

        The system gives the lock back for a process that ends. What was written under it the next one sees.

        Args:
            until: waits for a process that has the lock and stands still, as :meth:`sp_lightning.ranks.ranks.Ranks.until`.
        """
        if not self._lock_now():
            until(self._lock_now, "memory that another process has locked")
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _lock_now(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def view_anew(self, begin: int, end: int) -> OwnView:
        """Returns another view of a part of the memory, as :attr:`own` is one of all of it."""
        return OwnView(self._descriptor, self.common[begin:end], begin)

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            os.close(self._descriptor)
            os.close(self._lock)


_lockable: WeakSet[SharedMemory] = WeakSet()


def _forget_locks() -> None:
    """A forked process has the same open files: with them it would keep a lock whose process has ended."""
    for memory in list(_lockable):
        os.close(memory._lock)
        memory._lock = -1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


class OwnView:
    """A view of shared memory in which this process's writes stay its own. It sees the others' in pages it has not written.

    Attributes:
        bytes: the memory, flat ``uint8``.

    Args:
        descriptor: the memory's file.
        common: the part of the common memory that this is a view of.
        begin: where that part begins, a multiple of the page size.
    """

    def __init__(self, descriptor: int, common: Tensor, begin: int = 0) -> None:
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._memory = mmap.mmap(descriptor, common.nbytes, flags, mmap.PROT_READ | mmap.PROT_WRITE, offset=begin)
        self._common = common
        self.bytes = _tensor(self._memory)

    def written(self, begin: int = 0, end: int | None = None) -> list[Page]:
        """Returns the runs of pages that this process has written since they were last dropped."""
        return [(begin + first, begin + last) for first, last in written_pages(self.bytes[begin:end])]

    def drop(self, *parts: Page, commit: bool = False) -> int:
        """Forgets what this process has written in these parts, which do not overlap, or anywhere: it sees common values again.

        With ``commit`` all processes get it first. Neighbours cost one look. Returns the bytes.
        """
        areas: list[Page] = [] if parts else [(0, self.bytes.nbytes)]
        for begin, end in sorted(parts):
            neighbour = bool(areas) and areas[-1][1] == begin
            areas.append((areas.pop()[0] if neighbour else begin, end))
        pages = [run for area in areas for run in self.written(*area)]
        for begin, end in pages:
            if commit:
                self._common[begin:end].copy_(self.bytes[begin:end])
            self._memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        return sum(end - begin for begin, end in pages)

    def checksum(self, begin: int, nbytes: int, before: int = 0) -> int:
        """Returns a checksum of these bytes, and of what has the checksum ``before``."""
        return crc32(memoryview(self._memory)[begin : begin + nbytes], before)

    def keep(self, begin: int, end: int) -> None:
        """Makes all pages of a part this process's own: tensors in it keep their values, whatever other processes write later."""
        held = self.bytes[begin:end]
        held.copy_(held.clone())


def commit_or_drop(parts: Iterable[tuple[OwnView, Page]], *, commit: bool) -> int:
    """Commits or drops what this process has written in parts of several views: one look at each view. Returns the bytes."""
    by_view: dict[OwnView, list[Page]] = {}
    for view, part in parts:
        by_view.setdefault(view, []).append(part)
    return sum(view.drop(*each, commit=commit) for view, each in by_view.items())


def _tensor(memory: mmap.mmap) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


# ---------------------------------------------------------------------- from one process to the others
# They need no file system in common, and no name under which others could find the memory.


def hand_out(descriptor: int, number: int, announce: Callable[[str], object]) -> dict[int, int]:
    """Sends the descriptor of memory to other processes.

    Args:
        descriptor: the memory's.
        number: how many processes are to get it.
        announce: tells the others where they get it.

    Returns:
        The processes by their ranks.
    """
    processes: dict[int, int] = {}
    with socket.socket(socket.AF_UNIX) as server:
        token = f"superpipeline-{uuid4().hex}"
        server.bind(f"\0{token}")
        server.listen(number + 1)
        server.settimeout(_PATIENCE)
        announce(token)
        while len(processes) < number:
            connection, _ = server.accept()
            with connection:
                process, user, _ = _peer(connection)
                if user == os.getuid():
                    rank = struct.unpack("q", connection.recv(8))[0]
                    processes[rank] = process
                    socket.send_fds(connection, [b"."], [descriptor])
    return processes


def receive(token: str, rank: int) -> tuple[int, int]:
    """Returns a descriptor that another process hands out, and that process.

    Args:
        token: where it does.
        rank: this process's.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_PATIENCE)
        connection.connect(f"\0{token}")
        connection.sendall(struct.pack("q", rank))
        process = _peer(connection)[0]
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    return descriptors[0], process


_PATIENCE = 60.0
"""Seconds until a rank that does not come for shared memory is given up."""


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """Returns process, user and group at the other end of a connection, as this process numbers them."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))


# ---------------------------------------------------------------------- order

_lock = threading.Lock()


def publish(words: Any, index: int, number: int) -> None:
    """Writes a number for other processes, who see whatever was written before once they see it, on any processor.

    x86 keeps that order by itself, ARM does not. Python has no word for it, but a lock has: what comes before its release is not
    done after it, what follows its acquisition not before it, and a release and an acquisition behind it keep their order.
    """
    with _lock:
        pass
    with _lock:
        pass
    words[index] = number
