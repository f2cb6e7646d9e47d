"""A scratch file on a disk: without a name, page-aligned, with room that is taken before it is needed."""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from sp_lightning.device.layout import PAGE, whole_pages
from sp_lightning.plan.units import human_bytes
from sp_lightning.store.direct_file import THREADS, DirectFile, Transfer, aligned_memory, buffer_of, in_pieces


class Extent:
    """A part of a scratch file. Its place is free again once this object is gone.

    Attributes:
        offset, nbytes: where it is; both are multiples of a page.
    """

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes


_MESSAGES = (
    "A read from the scratch file failed",
    "A write to the scratch file failed",
    "The scratch file",
    ". The step was not finished; go on from the last checkpoint",
)


class ScratchFile(DirectFile):
    """A file for one run. A process that is killed leaves nothing: the file has no name.

    Args:
        folder: where it is.
        what: it has, for messages.
        promised: whether it is for mapped memory alone, which needs a file system that can promise room.

    Raises:
        OSError: it cannot be created there.

    Attributes:
        read_bytes, written_bytes: what was read and written so far.
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
        if self.direct and not self._works():
            self.direct = self._switch(direct=False)

    def _works(self) -> bool:
        """Tries whether a page can be written and read: some file systems say that only then."""
        memory = buffer_of(aligned_memory(PAGE))
        try:
            os.pwritev(self.descriptor, [memory], 0)
            return os.preadv(self.descriptor, [memory], 0) == PAGE
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False

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
            os.posix_fallocate(self.descriptor, self._reserved, wanted - self._reserved)
        except OSError as error:
            if not self._promised and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return
            os.ftruncate(self.descriptor, self._reserved)  # what it has taken of the rest is given back
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
        """Returns a part of the file that is not in use.

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
        """Begins to read bytes into memory; both begin at a page, and are whole pages."""
        self.read_bytes += memory.nbytes
        return Transfer(in_pieces(self._readers, lambda at, piece: self.read(piece, at), offset, memory))

    def begin_write(self, offset: int, memory: Tensor) -> Transfer:
        """Begins to write bytes from memory; both begin at a page, and are whole pages."""
        self.written_bytes += memory.nbytes
        return Transfer(in_pieces(self._writers, lambda at, piece: self.write(piece, at), offset, memory))


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


def _create(folder: Path) -> int:
    """Creates a file without a name, and returns its descriptor.

    Raises:
        OSError: it cannot be created there.
    """
    try:
        return _without_name(folder)
    except OSError as error:
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


def _without_name(folder: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
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


def _close(descriptor: int, threads: Sequence[ThreadPoolExecutor], process: int) -> None:
    for pool in threads if os.getpid() == process else ():  # a forked child has none of the threads
        pool.shutdown(wait=False)  # whatever is under way has the file, so nothing is
    os.close(descriptor)


def file_system(folder: Path) -> str:
    """The kind of file system that a folder is on, as Linux names it (``ext4``); an empty string if it is not known."""
    try:
        device = os.stat(folder).st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for fields in map(str.split, lines):
        if fields[2] == f"{os.major(device)}:{os.minor(device)}":
            return fields[fields.index("-") + 1]
    return ""
