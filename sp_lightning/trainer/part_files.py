"""Creates each new file beside the file that it will replace, and reads files that may be replaced at the same time.

If a process was killed while it wrote such a file, the next writer removes the remains.
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
    """Creates a ``.part`` file in the folder of ``file``, and locks it until it is closed.

    Before that, removes part files of killed processes: such files are not locked.

    Args:
        file: the file that the part file will replace.

    Returns:
        The path of the part file, and the file opened for writing.
    """
    # A digest in place of the name: the name may have the greatest length already, and the part file's name is longer.
    name = blake2s(os.fsencode(file.name), digest_size=8).hexdigest()
    for left in file.parent.iterdir():  # glob() would cache a compiled pattern for each name
        if not (left.name.startswith(f".{name}.") and left.suffix == ".part"):
            continue
        with suppress(FileNotFoundError), left.open("rb") as old:
            if _locked(old):  # the process that wrote this file has ended
                left.unlink()
    while True:
        part = file.with_name(f".{name}.{uuid4().hex}.part")
        stream = part.open("xb")
        # Between creation and locking, another process may have found the file unlocked, and removed it. Then try another name.
        if _locked(stream) is not False and part.exists():
            return part, stream
        stream.close()


def _locked(stream: IO[bytes]) -> bool | None:
    """Tries to lock a file until it is closed. Returns True if the file is locked now, and False if another process locks it.

    None if the system or the file system does not support locks.
    """
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
    """Writes the entries of a folder to the disk, so that the new name of a file survives a loss of power."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cause_of(error: BaseException, handled: BaseException | None) -> BaseException:
    """Returns the cause of an error of ``torch.save``: after a failed write, it raises a second error, about the file's length.

    Args:
        error: the error that was caught.
        handled: the error that was being handled when saving began. It is not the cause.
    """
    while isinstance(error, RuntimeError) and error.__context__ not in (None, handled):
        error = error.__context__
    return error


def not_written(error: BaseException, file: Path) -> BaseException:
    """Returns the error to raise if a checkpoint could not be written.

    Args:
        error: the cause. An OSError is replaced by an OSError that names the file; other errors are returned unchanged.
        file: the file.
    """
    if not isinstance(error, OSError):
        return error
    kept = "; the previous one of this name is as it was" if file.exists() else ""
    return OSError(error.errno, f"The checkpoint could not be written: {error.strerror or error}{kept}", str(file))


def identity_of(status: os.stat_result) -> tuple[int, int, int]:
    """Returns numbers of a file. At least one of them changes if the file is replaced or written."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_whole(path: Path, read: Callable[[], T]) -> T:
    """Returns the result of ``read()``, and calls it again if the file was replaced or written in the meantime.

    Args:
        path: the file that ``read`` reads.
        read: reads it by its name, which it may open several times.
    """
    while True:
        before = identity_of(path.stat())
        try:
            found = read()
        except Exception:
            if before == identity_of(path.stat()):
                raise
        else:
            with suppress(FileNotFoundError):  # the file was removed after it was read: the result is complete
                if before != identity_of(path.stat()):
                    continue
            return found
