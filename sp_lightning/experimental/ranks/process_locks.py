"""Detects processes of a node that have ended.

Connections do not show the end of a process at once: the workers of a DataLoader are forked, and keep the connections of a killed
rank open until the workers end. So each process holds a lock on its own byte of a file (POSIX record locks). The system releases
the lock of a process that ends, and forked processes do not inherit the lock.
"""

from __future__ import annotations

import os
from contextlib import suppress

with suppress(ImportError):  # Windows has no fcntl, and does not support several devices
    import fcntl


class ProcessLocks:
    """The locks of a node's processes. Takes the lock of this process.

    Before :meth:`ended` is called, all processes must have their locks: a process without its lock counts as ended.

    Args:
        descriptor: the descriptor of the file. No other code uses the file, because closing any descriptor of the file in this
            process releases this process's lock.
        rank: this process's number on its node.
        size: the number of the node's processes.
    """

    def __init__(self, descriptor: int, rank: int, size: int) -> None:
        self._file = descriptor
        self._others = [each for each in range(size) if each != rank]
        fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, rank)

    def ended(self) -> int | None:
        """Returns the number of a process that has ended; None if all other processes run."""
        for rank in self._others:
            with suppress(BlockingIOError):
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
                # Unlocked again, so that other processes find the byte unlocked as well.
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
                return rank
        return None

    def close(self) -> None:
        """Closes the file, which releases this process's lock."""
        os.close(self._file)
