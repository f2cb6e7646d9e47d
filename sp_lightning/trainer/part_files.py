"""Files that are written beside those that they will replace, and read again if they were replaced meanwhile.

What killed writers have left goes before the next one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2s
from pathlib import Path
from typing import IO, BinaryIO, TypeVar
from uuid import uuid4

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")


def create_part(file: Path) -> tuple[Path, BinaryIO]:
    """Creates a file beside the one that is to be written, which no other process writes.

    Files that others have left go first, if their writers were killed: those hold no locks any more.
    """
    name = blake2s(os.fsencode(file.name), digest_size=8).hexdigest()  # a file's name may be as long as names can be
    for left in file.parent.iterdir():  # glob() would keep a compiled pattern for each name
        if not (left.name.startswith(f".{name}.") and left.suffix == ".part"):
            continue
        with suppress(FileNotFoundError), left.open("rb") as old:
            if _locked(old):
                shutil.rmtree(beside(left), ignore_errors=True)
                if aside(left).exists() and not file.exists():
                    aside(left).rename(file)
                shutil.rmtree(aside(left), ignore_errors=True)
                left.unlink()
    while True:
        part = file.with_name(f".{name}.{uuid4().hex}.part")
        stream = part.open("xb")
        # Before it was locked, another process may have taken it for one that was left, and has removed it, or is about to.
        if _locked(stream) is not False and part.exists():
            return part, stream
        stream.close()


def beside(part: Path) -> Path:
    """The folder that belongs to such a file, and goes with it."""
    return part.with_suffix(".parts")


def aside(part: Path) -> Path:
    """Where a folder is for the moment in which another one takes its name."""
    return part.with_suffix(".old")


def _locked(stream: IO[bytes]) -> bool | None:
    """Locks a file until it is closed. Returns True; False if others hold it, None if no file can be locked."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def sync_folder(folder: Path) -> None:
    """Writes the new name to the disk, too, so that it survives a loss of power."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cause_of(error: BaseException, handled: BaseException | None = None) -> BaseException:
    """Returns the error that stopped ``torch.save``, which raises one about the file's length while handling it.

    Args:
        error: as it was caught.
        handled: the error that was under way before; it is not the cause.
    """
    while isinstance(error, RuntimeError) and error.__context__ not in (None, handled):
        error = error.__context__
    return error


def not_written(error: BaseException, path: Path, who: str = "") -> BaseException:
    """Returns what is raised where a checkpoint could not be written because of an error: that of a disk names the file."""
    if not isinstance(error, OSError):
        return error
    kept = "; the previous one of this name is as it was" if path.exists() else ""
    return OSError(error.errno, f"The checkpoint could not be written: {who}{error.strerror or error}{kept}", str(path))


def identity_of(status: os.stat_result) -> tuple[int, int, int]:
    """Returns numbers of which one changes if a file is replaced or written."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_whole(path: Path, read: Callable[[], T]) -> T:
    """Returns what ``read`` returns of a file or a folder; it reads again if another one has taken the name meanwhile."""
    while True:
        before = identity_of(path.stat())
        try:
            found = read()
        except Exception:
            if before == identity_of(path.stat()):
                raise
        else:
            with suppress(FileNotFoundError):  # removed since: what was read is whole
                if before != identity_of(path.stat()):
                    continue
            return found
