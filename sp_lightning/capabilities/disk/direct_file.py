"""Files that are read and written past the page cache if the file system allows it, in pieces, by a few threads.

A scratch file is such a file without a name. Its parts are page-aligned, and its disk space is reserved in advance.

Libraries were considered. kvikio and DeepNVMe read to GPU memory or need a compiler. Bindings of io_uring are compiled, and many
containers forbid its calls. fsspec has no direct I/O. A few threads with ``preadv`` and ``pwritev`` on pieces of some MiB keep
the queue of a drive full, so the standard library is enough.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sp_lightning.core.device.layout import PAGE, whole_pages
from sp_lightning.core.plan.units import human_bytes

with suppress(ImportError):  # Windows has no fcntl and no direct I/O
    import fcntl

PIECE = 8 * 2**20
"""Bytes that one call reads or writes. Several pieces are in flight at once."""

THREADS = 4
"""The number of threads that read, and of threads that write: enough to fill the queue of a fast drive, and few compared to the
threads that compute. Reads and writes have separate threads, because many drives and control groups limit the rate of each
separately."""


def aligned_memory(nbytes: int) -> Tensor:
    """Returns at least ``nbytes`` bytes of page-aligned memory in whole pages, flat ``uint8``, as direct I/O needs it.

    The mapping is shared. A private mapping would be copied on write if a process (a ``DataLoader`` worker) is forked during a
    transfer, and direct I/O could then use the wrong copy (``man 2 open``).
    """
    return torch.frombuffer(mmap.mmap(-1, whole_pages(nbytes)), dtype=torch.uint8)


class Transfer:
    """Reads or writes in flight.

    Args:
        pieces: the futures of the calls that read or write a piece each.
    """

    def __init__(self, pieces: Sequence[Future[None]]) -> None:
        self._pieces = pieces

    @property
    def done(self) -> bool:
        """True if :meth:`wait` would not block."""
        return all(piece.done() for piece in self._pieces)

    def then(self, call: Callable[[], None]) -> None:
        """Calls ``call`` when all pieces are done: in a thread of the disk, or at once if they are done already.

        ``call`` may run several times, for example if two pieces end at the same time.
        """
        for piece in self._pieces:
            piece.add_done_callback(lambda _: call() if self.done else None)

    def finish(self) -> None:
        """Waits until all pieces have ended, successfully or not. From then on this transfer does not use the memory."""
        wait(self._pieces)

    def wait(self) -> None:
        """Waits until all bytes are transferred.

        Raises:
            OSError: a read or a write failed.
        """
        self.finish()
        for piece in self._pieces:
            piece.result()


def in_pieces(
    threads: ThreadPoolExecutor, call: Callable[[int, Tensor], None], offset: int, memory: Tensor
) -> list[Future[None]]:
    """Divides memory into pieces of :data:`PIECE` bytes, and submits a call for each.

    Args:
        threads: run the calls.
        call: is called with the offset of a piece in the file, and the piece.
        offset: the offset of ``memory`` in the file.
        memory: flat ``uint8``.
    """
    return [threads.submit(call, offset + at, memory[at : at + PIECE]) for at in range(0, memory.nbytes, PIECE)]


class DirectFile:
    """An open file that is read and written past the page cache if the file system allows it.

    Args:
        descriptor: the descriptor of the file.
        path: the path that errors show.
        messages: the parts of error messages: a read failed, a write failed, the subject of "ends too early", and a remedy.

    Attributes:
        direct: True if reads and writes bypass the page cache.
    """

    def __init__(self, descriptor: int, path: str, messages: tuple[str, str, str, str]) -> None:
        self.descriptor = descriptor
        self.path = path
        self._messages = messages
        self.direct = self._switch(direct=True)

    def _switch(self, *, direct: bool) -> bool:
        """Turns direct I/O on or off. Returns True if it is on."""
        try:
            flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
        except (AttributeError, OSError):  # the system or the file system has no direct I/O
            return False
        return direct

    def read(self, memory: Tensor, offset: int, needed: int | None = None) -> None:
        """Reads whole pages to page-aligned memory.

        Args:
            memory: flat ``uint8``.
            offset: the offset of the pages in the file.
            needed: the number of bytes that must be read. It may be less than ``memory``, because the file may end within the
                last page. None: all bytes of ``memory``.

        Raises:
            OSError: the disk failed, or the file ends before ``needed`` bytes.
        """
        view, done = buffer_of(memory), 0
        needed = memory.nbytes if needed is None else needed
        unread, _, short, remedy = self._messages
        while done < needed:
            try:
                count = os.preadv(self.descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise OSError(error.errno, f"{unread}: {error.strerror}{remedy}", self.path) from error
            if done + count < needed:
                if count < (PAGE if self.direct else 1):  # the file has ended
                    missing = needed - done - count
                    raise OSError(errno.EIO, f"{short} ends {missing} bytes too early{remedy}", self.path)
                if self.direct:
                    count = count // PAGE * PAGE  # direct I/O: the next read must begin at a page
            done += count
        self._leave_cache(offset, memory.nbytes)

    def write(self, memory: Tensor, offset: int) -> None:
        """Writes page-aligned memory in whole pages.

        Raises:
            OSError: the disk failed.
        """
        view, done = buffer_of(memory), 0
        while done < len(view):
            try:
                done += os.pwritev(self.descriptor, [view[done:]], offset + done)
            except OSError as error:
                _, unwritten, _, remedy = self._messages
                raise OSError(error.errno, f"{unwritten}: {error.strerror}{remedy}", self.path) from error
        if not self.direct:
            os.fdatasync(self.descriptor)  # the page cache cannot drop dirty pages
        self._leave_cache(offset, memory.nbytes)

    def _leave_cache(self, offset: int, nbytes: int) -> None:
        if not self.direct:
            os.posix_fadvise(self.descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


def buffer_of(memory: Tensor) -> memoryview:
    """Returns flat ``uint8`` host memory as a buffer for system calls."""
    array: Any = memory.numpy()
    return memoryview(array)


# ---------------------------------------------------------------------- scratch files


@dataclass(eq=False)
class Extent:
    """A part of a scratch file. The part may be allocated again after this object is deleted.

    Attributes:
        offset, nbytes: the offset and the size of the part, multiples of a page.
    """

    offset: int
    nbytes: int


_MESSAGES = (
    "A read from the scratch file failed",
    "A write to the scratch file failed",
    "The scratch file",
    ". The step was not finished; go on from the last checkpoint",
)


class ScratchFile(DirectFile):
    """A temporary file of one run. It has no name, so a killed process leaves nothing behind.

    Args:
        folder: the folder in which the file is created.
        what: the contents of the file, for messages.
        promised: True if the file is only mapped. Then its disk space must be reserved, and direct I/O is off.

    Raises:
        OSError: the file cannot be created.

    Attributes:
        read_bytes, written_bytes: the bytes whose read or write has begun so far.
    """

    def __init__(self, folder: Path, what: str = "optimizer state", *, promised: bool = False) -> None:
        super().__init__(_create(folder), str(folder), _MESSAGES)
        self._what, self._promised = what, promised
        self._end = self._reserved = 0
        self._free: dict[int, list[int]] = {}  # offsets by size
        self._readers = ThreadPoolExecutor(THREADS, "superpipeline-disk")
        self._writers = ThreadPoolExecutor(THREADS, "superpipeline-disk")
        self.read_bytes = self.written_bytes = 0
        weakref.finalize(self, _close, self.descriptor, (self._readers, self._writers), os.getpid())
        # A mapped file needs reserved space, and no direct I/O. If a file system cannot reserve space, glibc writes single bytes
        # to the file instead, which direct I/O does not allow.
        if self.direct and (promised or not self._works()):
            self.direct = self._switch(direct=False)

    def _works(self) -> bool:
        """Returns True if direct I/O works. Writes and reads a page, because some file systems refuse direct I/O only then."""
        memory = buffer_of(aligned_memory(PAGE))
        try:
            os.pwritev(self.descriptor, [memory], 0)
            return os.preadv(self.descriptor, [memory], 0) == PAGE
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False

    def reserve(self, nbytes: int, others: int = 0) -> None:
        """Reserves disk space, so that the disk cannot be full later.

        Args:
            nbytes: the bytes to reserve after the parts that are allocated.
            others: the bytes that the run has taken in other files, for the error.

        Raises:
            OSError: the disk has no room. A file system that cannot reserve space is an error only for a mapped file.
        """
        wanted = self._end + nbytes
        if wanted <= self._reserved:
            return
        try:
            os.posix_fallocate(self.descriptor, self._reserved, wanted - self._reserved)
        except OSError as error:
            if not self._promised and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return
            os.ftruncate(self.descriptor, self._reserved)  # frees the space that the failed call has reserved
            status = os.statvfs(self.path)
            free = human_bytes(self._reserved + status.f_bavail * status.f_frsize)
            what = self._what
            if others:
                what += f" beside {human_bytes(others)} for weights and gradients, which the run has taken"
            raise OSError(
                error.errno,
                f"{human_bytes(wanted)} of scratch space are needed for {what}, and the disk has {free} for it "
                f"({error.strerror}). {_MORE_ROOM}",
                self.path,
            ) from error
        self._reserved = wanted

    def allocate(self, nbytes: int) -> Extent:
        """Returns a free part of the file.

        Raises:
            OSError: the disk is full.
        """
        nbytes = whole_pages(nbytes)
        free = self._free.setdefault(nbytes, [])
        if not free:
            self.reserve(nbytes)
            free.append(self._end)
            self._end += nbytes
        extent = Extent(free.pop(), nbytes)
        weakref.finalize(extent, free.append, extent.offset).atexit = False
        return extent

    def begin_read(self, offset: int, memory: Tensor) -> Transfer:
        """Begins to read whole pages into page-aligned memory."""
        self.read_bytes += memory.nbytes
        return Transfer(in_pieces(self._readers, lambda at, piece: self.read(piece, at), offset, memory))

    def begin_write(self, offset: int, memory: Tensor) -> Transfer:
        """Begins to write page-aligned memory in whole pages."""
        self.written_bytes += memory.nbytes
        return Transfer(in_pieces(self._writers, lambda at, piece: self.write(piece, at), offset, memory))


_MORE_ROOM = "Free some, name a folder on another disk (SuperpipelineStrategy(disk=FOLDER)), or give more host_memory"


def refuse_full(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raises an error if the disk has no room for the scratch files of a run. Called before any of them is created.

    Args:
        folder: the folder of the scratch files.
        sizes: the bytes of the files by their use, without optimizer state, whose size is not known yet.

    Raises:
        OSError: the disk has no room.
    """
    status = os.statvfs(folder)
    needed, free = sum(sizes.values()), status.f_bavail * status.f_frsize
    if needed > free:
        parts = " and ".join(f"{human_bytes(nbytes)} for {what}" for what, nbytes in sizes.items() if nbytes)
        raise OSError(
            errno.ENOSPC,
            f"{parts} of scratch space are needed, and optimizer state comes on top; the disk has {human_bytes(free)}. "
            f"{_MORE_ROOM}",
            str(folder),
        )


def _create(folder: Path) -> int:
    """Creates a file without a name, and returns its descriptor.

    Raises:
        OSError: it cannot be created.
    """
    try:
        return _without_name(folder)
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "Name another folder")
        raise OSError(
            error.errno,
            f"No file can be created in the folder that disk= names ({error.strerror}). {remedy}: "
            "SuperpipelineStrategy(disk=FOLDER)",
            str(folder),
        ) from error


_REMEDIES = {
    errno.ENOENT: "Create it (mkdir -p), or name another one",
    errno.EACCES: "See that you may write there, or name another one",
}


def _without_name(folder: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except (AttributeError, OSError) as error:
        # The file system or the system has no files without names. A kernel before 3.11 takes the flag for O_DIRECTORY (EISDIR).
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    created, name = tempfile.mkstemp(prefix=".superpipeline-", dir=folder)
    try:
        return os.open(name, flags)
    finally:
        os.close(created)
        os.unlink(name)


def _close(descriptor: int, threads: Sequence[ThreadPoolExecutor], process: int) -> None:
    for pool in threads if os.getpid() == process else ():  # a forked process does not have the threads
        pool.shutdown(wait=False)  # a transfer holds the file, so no transfer is in flight when the file is deleted
    os.close(descriptor)


def file_system(folder: Path) -> str:
    """Returns the type of a folder's file system (``ext4``); an empty string if it is unknown."""
    try:
        device = os.stat(folder).st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for fields in map(str.split, lines):
        if fields[2] == f"{os.major(device)}:{os.minor(device)}":
            return fields[fields.index("-") + 1]
    return ""
