"""Detects processes of a node that have ended.

Connections do not show it at once: the workers of a DataLoader are forked, and keep the connections of a killed rank open until
they end. So each process holds a lock on its own byte of a file. The system releases the lock of a process that ends, and forked
processes do not inherit it (POSIX record locks).
"""

from __future__ import annotations

import os
from contextlib import suppress

with suppress(ImportError):  # Windows has no fcntl, and no several devices
    import fcntl


class ProcessLocks:
    """The locks of a node's processes. All processes must have made one of these before :meth:`ended` is called.

    Args:
        descriptor: the file, which no other code uses: to close any descriptor of it releases this process's lock.
        rank: this process's number on its node.
        size: the number of the node's processes.
    """

    def __init__(self, descriptor: int, rank: int, size: int) -> None:
        self._file = descriptor
        self._others = [each for each in range(size) if each != rank]
        fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, rank)

    def ended(self) -> int | None:
        """Returns the number of a process that has ended; None if none has."""
        for rank in self._others:
            with suppress(BlockingIOError):
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
                return rank
        return None

    def close(self) -> None:
        """Releases this process's lock."""
        os.close(self._file)
