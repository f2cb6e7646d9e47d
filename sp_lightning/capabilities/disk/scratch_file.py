"""Scratch files: temporary files without a name, whose parts are mapped to memory. Their disk space is reserved in advance."""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sp_lightning.core.device.layout import whole_pages
from sp_lightning.core.plan.units import human_bytes


@dataclass(eq=False)
class Extent:
    """A part of a scratch file. The part may be allocated again after this object is deleted.

    Attributes:
        offset, nbytes: the offset and the size of the part, multiples of a page.
    """

    offset: int
    nbytes: int


class ScratchFile:
    """A temporary file of one run. It has no name, so a killed process leaves nothing behind.

    Args:
        folder: the folder in which the file is created.
        what: the contents of the file, for messages.

    Raises:
        OSError: the file cannot be created.

    Attributes:
        descriptor: the descriptor of the file.
        path: the path that errors show.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self.descriptor = _create(folder)
        self.path = str(folder)
        self._what = what
        self._end = self._reserved = 0
        self._free: dict[int, list[int]] = {}  # offsets by size
        weakref.finalize(self, os.close, self.descriptor)

    def reserve(self, nbytes: int, others: int = 0) -> None:
        """Reserves disk space, so that the disk cannot be full later.

        Args:
            nbytes: the bytes to reserve after the parts that are allocated.
            others: the bytes that the run has taken in other files, for the error.

        Raises:
            OSError: the disk has no room, or its file system cannot reserve space.
        """
        wanted = self._end + nbytes
        if wanted <= self._reserved:
            return
        try:
            os.posix_fallocate(self.descriptor, self._reserved, wanted - self._reserved)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                raise OSError(
                    error.errno,
                    f"{human_bytes(wanted)} of scratch space are needed for {self._what}, and the file system cannot reserve "
                    f"space ({error.strerror}). Name a folder on another disk: SuperpipelineStrategy(disk=FOLDER)",
                    self.path,
                ) from error
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
