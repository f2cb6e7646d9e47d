"""A scratch file on a disk: without a name, page-aligned, read and written by a few threads, past the page cache where possible.

Kept libraries were looked at. kvikio and DeepNVMe bring bytes to a GPU's memory or need a compiler; bindings of io_uring
are compiled, too, and many containers forbid its calls; fsspec has no direct I/O. A few threads with ``preadv`` and
``pwritev`` on pieces of some MiB keep a drive's queue full, so the standard library is enough here.
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sp_lightning.device.layout import PAGE, whole_pages
from sp_lightning.plan.units import human_bytes

_PIECE = 8 * 2**20
"""Bytes that one call reads or writes. Several pieces are under way at once."""

_THREADS = 4
"""Reads, and as many writes, that are under way at once: enough for a fast drive's queue, and few beside the threads that
compute. They have threads of their own, because many drives, and limits of control groups, have a rate for each."""


def aligned_memory(nbytes: int) -> Tensor:
    """Returns whole pages of memory that begin at a page, which direct I/O needs.

    The pages are shared ones: a process that is forked while the disk writes them (a worker of a ``DataLoader``) has no copies.
    """
    return torch.frombuffer(mmap.mmap(-1, whole_pages(nbytes)), dtype=torch.uint8)


def _array(memory: Tensor) -> Any:
    return memory.numpy()


class Extent:
    """A part of a scratch file. Its place is free again once nobody has this object.

    Attributes:
        offset, nbytes: where it is; both are multiples of a page.
    """

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes


class Transfer:
    """Bytes on their way from or to the file.

    Args:
        pieces: the calls.
    """

    def __init__(self, pieces: Sequence[Future[None]]) -> None:
        self._pieces = pieces

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return all(piece.done() for piece in self._pieces)

    def then(self, call: Callable[[], None]) -> None:
        """Calls something once the last piece has been done: in a thread of the disk, or at once if all are done."""
        for piece in self._pieces:
            piece.add_done_callback(lambda _: call() if self.done else None)

    def settle(self) -> None:
        """Waits until no call is under way: until then the memory is in use, even if one has failed."""
        wait(self._pieces)

    def wait(self) -> None:
        """Waits until all bytes are there.

        Raises:
            OSError: a read or a write failed.
        """
        self.settle()
        for piece in self._pieces:
            piece.result()


class ScratchFile:
    """A file for one run. A process that is killed leaves nothing: the file has no name.

    Args:
        folder: where it is.

    Raises:
        OSError: it cannot be created there.

    Attributes:
        direct: whether reads and writes go past the page cache.
        read_bytes, written_bytes: what was read and written so far.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor, self.direct = _create(folder)
        self._end = self._reserved = 0
        self._free: dict[int, list[int]] = {}  # offsets by size
        self._threads = {call: ThreadPoolExecutor(_THREADS, "superpipeline-disk") for call in (_read, _write)}
        self.read_bytes = self.written_bytes = 0
        threads = tuple(self._threads.values())
        self._finalizer = weakref.finalize(self, _close, self._descriptor, threads, os.getpid())

    def reserve(self, nbytes: int, others: int = 0) -> None:
        """Takes so much of the disk now, so that it cannot be full later.

        Args:
            nbytes: how much.
            others: what the run has taken of the disk already, for the error.

        Raises:
            OSError: the disk has no room for it.
        """
        wanted = self._end + nbytes
        if wanted <= self._reserved:
            return
        try:
            os.posix_fallocate(self._descriptor, self._reserved, wanted - self._reserved)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):  # the file system cannot promise room
                return
            beside = (
                f" beside {human_bytes(others)} for weights and gradients, which the run has taken" if others else ""
            )
            what = f"optimizer state{beside}"
            raise no_room(error, self._descriptor, self._reserved, wanted, self._folder, what) from error
        self._reserved = wanted

    def allocate(self, nbytes: int) -> Extent:
        """Returns a part of the file that nobody has.

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

    def read(self, offset: int, memory: Tensor) -> Transfer:
        """Begins to read bytes into memory; both begin at a page, and are whole pages."""
        self.read_bytes += memory.nbytes
        return self._begin(_read, offset, memory)

    def write(self, offset: int, memory: Tensor) -> Transfer:
        """Begins to write bytes from memory; both begin at a page, and are whole pages."""
        self.written_bytes += memory.nbytes
        return self._begin(_write, offset, memory)

    def _begin(self, call: Callable[..., None], offset: int, memory: Tensor) -> Transfer:
        view = memoryview(_array(memory))
        parts = range(0, len(view), _PIECE)
        return Transfer(
            [
                self._threads[call].submit(
                    call, self._descriptor, view[at : at + _PIECE], offset + at, self.direct, self._folder
                )
                for at in parts
            ]
        )


def _read(descriptor: int, memory: memoryview, offset: int, direct: bool, folder: Path) -> None:
    begin, done = offset, 0
    while done < len(memory):
        try:
            count = os.preadv(descriptor, [memory[done:]], offset + done)
        except OSError as error:
            raise OSError(
                error.errno, f"A read from the scratch file failed: {error.strerror}. {_RESUME}", str(folder)
            ) from error
        if not count:
            raise OSError(
                errno.EIO, f"The scratch file ends {len(memory) - done} bytes too early. {_RESUME}", str(folder)
            )
        done += count
    if not direct:
        os.posix_fadvise(descriptor, begin, len(memory), os.POSIX_FADV_DONTNEED)


def _write(descriptor: int, memory: memoryview, offset: int, direct: bool, folder: Path) -> None:
    begin, done = offset, 0
    while done < len(memory):
        try:
            done += os.pwritev(descriptor, [memory[done:]], offset + done)
        except OSError as error:
            raise OSError(
                error.errno, f"A write to the scratch file failed: {error.strerror}. {_RESUME}", str(folder)
            ) from error
    if not direct:
        os.fdatasync(descriptor)  # pages that are not on the disk yet cannot leave the page cache
        os.posix_fadvise(descriptor, begin, len(memory), os.POSIX_FADV_DONTNEED)


_RESUME = "The step was not finished; go on from the last checkpoint"


def no_room(error: OSError, descriptor: int, size: int, wanted: int, folder: Path, what: str) -> OSError:
    """The error for a scratch file that cannot be made longer. What it has taken of the rest is given back.

    Args:
        error: the system's.
        descriptor, size: the file, and how long it was.
        wanted: how long it was to be.
        folder: where it is.
        what: it is for.
    """
    os.ftruncate(descriptor, size)
    status = os.statvfs(folder)
    free = size + status.f_bavail * status.f_frsize
    return OSError(
        error.errno,
        f"{human_bytes(wanted)} of scratch space are needed for {what}, and the disk has {human_bytes(free)} for it "
        f"({error.strerror}). {_MORE_ROOM}",
        str(folder),
    )


_MORE_ROOM = "Free some, name a folder on another disk (SuperpipelineStrategy(disk=FOLDER)), or give more host_memory"


def refuse_full(folder: Path, sizes: Mapping[str, int]) -> None:
    """Refuses a disk that has no room for all that a run will put there, before it has anything.

    Args:
        folder: where scratch files will be.
        sizes: bytes, by what they are for. Optimizer state, whose size the optimizers decide, is to come on top.

    Raises:
        OSError: there is no room.
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


def _create(folder: Path) -> tuple[int, bool]:
    """Creates a file without a name. Returns its descriptor, and whether it can be read and written directly."""
    with suppress(_Refused):  # the file system refuses direct I/O
        descriptor = create(folder, direct=True)
        if _works(descriptor):
            return descriptor, hasattr(os, "O_DIRECT")
        os.close(descriptor)
    return create(folder, direct=False), False


class _Refused(Exception):
    """The file system has no direct I/O."""


def create(folder: Path, *, direct: bool) -> int:
    """Creates a file without a name, and returns its descriptor.

    Raises:
        OSError: it cannot be created there.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | (getattr(os, "O_DIRECT", 0) if direct else 0)
    try:
        return _without_name(folder, flags)
    except OSError as error:
        if direct and error.errno == errno.EINVAL:
            raise _Refused from error
        remedy = _REMEDIES.get(error.errno or 0, _OTHER)
        raise OSError(
            error.errno,
            f"No file can be created in the folder that disk= names ({error.strerror}). {remedy}",
            str(folder),
        ) from error


_OTHER = "Name another folder: SuperpipelineStrategy(disk=FOLDER)"
_REMEDIES = {
    errno.ENOENT: "Create it (mkdir -p), or name another one: SuperpipelineStrategy(disk=FOLDER)",
    errno.EACCES: "See that you may write there, or name another one: SuperpipelineStrategy(disk=FOLDER)",
}


def _without_name(folder: Path, flags: int) -> int:
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except (AttributeError, OSError) as error:
        # The file system has no files without names, or the system has none: a kernel before 3.11 takes this for a folder.
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    created, name = tempfile.mkstemp(prefix=".superpipeline-", dir=folder)
    try:
        return os.open(name, flags)
    finally:
        os.close(created)
        os.unlink(name)


def _works(descriptor: int) -> bool:
    """Tries whether a page can be written and read: some file systems say that only then."""
    memory = memoryview(_array(aligned_memory(PAGE)))
    try:
        os.pwritev(descriptor, [memory], 0)
        return os.preadv(descriptor, [memory], 0) == PAGE
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False


def _close(descriptor: int, threads: Sequence[ThreadPoolExecutor], process: int) -> None:
    for pool in threads if os.getpid() == process else ():  # a forked child has none of the threads
        pool.shutdown()
    os.close(descriptor)


def file_system(folder: Path) -> str:
    """The kind of file system that a folder is on, as Linux names it (``ext4``); an empty string where nobody says."""
    try:
        device = os.stat(folder).st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for fields in map(str.split, lines):
        if fields[2] == f"{os.major(device)}:{os.minor(device)}":
            return fields[fields.index("-") + 1]
    return ""
