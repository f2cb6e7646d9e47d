"""A fence: what a process writes to shared memory is seen by others in the order in which it was written."""

from __future__ import annotations

import threading

_lock = threading.Lock()


def fence() -> None:
    """Orders what this thread has read and written before what it reads and writes next, on any processor.

    x86 does so by itself, ARM does not. Python has no word for it, but a lock has: what comes before its release is not done
    after it, what follows its acquisition is not done before it, and a release and an acquisition behind it keep their order.
    """
    with _lock:
        pass
    with _lock:
        pass
