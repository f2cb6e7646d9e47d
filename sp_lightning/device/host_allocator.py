"""What the C library does with host memory that is freed."""

from __future__ import annotations

import ctypes
import gc

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h
_LARGE = 2**20


def return_large_blocks() -> None:
    """Has the C library return every block of a MiB and more to the system as soon as it is freed, where it is glibc.

    glibc (2.36) keeps freed blocks of up to 32 MiB once it has seen some: hundreds of MiB, where tensors of a layer come and go.
    """
    try:
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)
    except (AttributeError, OSError, TypeError):  # another library
        return


def free_garbage() -> None:
    """Frees what only cycles of references hold, a run that is over, say, before somebody measures how much memory is left."""
    gc.collect()
    return_free_memory()


def return_free_memory() -> None:
    """Has the C library return what is free to the system, where it is glibc."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another library
        return
