"""Writes files beside the files that they replace, and reads files that may be replaced meanwhile.

Files that killed writers have left are removed before the next one is written.
"""

from __future__ import annotations

import os
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
    """Creates a file beside the file that it will replace, and locks it. No other process writes it.

    Files that killed writers have left are removed first: their locks are free.
    """
    name = blake2s(os.fsencode(file.name), digest_size=8).hexdigest()  # the name may already have the greatest length
    for left in file.parent.iterdir():  # glob() would cache a compiled pattern for each name
        if not (left.name.startswith(f".{name}.") and left.suffix == ".part"):
            continue
        with suppress(FileNotFoundError), left.open("rb") as old:
            if _locked(old):  # its writer does not live any more
                left.unlink()
    while True:
        part = file.with_name(f".{name}.{uuid4().hex}.part")
        stream = part.open("xb")
        # Before it was locked, another process may have found it unlocked, and may have removed it.
        if _locked(stream) is not False and part.exists():
            return part, stream
        stream.close()


def _locked(stream: IO[bytes]) -> bool | None:
    """Locks a file until it is closed. Returns True; False if another process holds the lock, None if locks do not work."""
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
    """Writes the new name of a file to the disk, so that it survives a loss of power."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cause_of(error: BaseException, handled: BaseException | None = None) -> BaseException:
    """Returns the first error of ``torch.save``. When a write fails, it raises a second one, about the length of the file.

    Args:
        error: the error that was caught.
        handled: the error that was being handled before; it is not the cause.
    """
    while isinstance(error, RuntimeError) and error.__context__ not in (None, handled):
        error = error.__context__
    return error


def not_written(error: BaseException, path: Path, who: str = "") -> BaseException:
    """Returns the error to raise if a checkpoint could not be written. An error of the operating system names the file."""
    if not isinstance(error, OSError):
        return error
    kept = "; the previous one of this name is as it was" if path.exists() else ""
    return OSError(error.errno, f"The checkpoint could not be written: {who}{error.strerror or error}{kept}", str(path))


def identity_of(status: os.stat_result) -> tuple[int, int, int]:
    """Returns numbers of which one changes if a file is replaced or written."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_whole(path: Path, read: Callable[[], T]) -> T:
    """Calls ``read`` for a file or a folder, and calls it again if another one has taken its name meanwhile."""
    while True:
        before = identity_of(path.stat())
        try:
            found = read()
        except Exception:
            if before == identity_of(path.stat()):
                raise
        else:
            with suppress(FileNotFoundError):  # removed after it was read: the result is complete
                if before != identity_of(path.stat()):
                    continue
            return found
