"""Pages of files that are mapped as the memory of tensors: which addresses they have, and that forked processes lack them."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from sp_lightning.device.layout import PAGE, whole_pages
from sp_lightning.device.metadata import UNCHANGED_BY_UPDATES

_PAGE_OUT = 21  # of Linux 5.4
_tensor_grad: Any = Tensor.grad


def _load() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    )  # fmt: skip
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


libc: Any = None
"""The C library; None where it lacks what is needed here."""
with suppress(OSError, AttributeError, TypeError):
    libc = _load()


def supported() -> bool:
    """Whether the system has what this needs."""
    return libc is not None and hasattr(mmap, "MADV_DONTFORK")


class _NotHere(Tensor):
    """A tensor whose values are on a disk, in a forked process."""

    _what: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in UNCHANGED_BY_UPDATES:
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise RuntimeError(
            f"This {cls._what} is on a disk, in a file of the process that trains. A forked process cannot read it: read it "
            "before the fork (clone())."
        )


class _WeightNotHere(_NotHere, nn.Parameter):
    _what = "weight"


class _GradientNotHere(_NotHere):
    _what = "gradient"


_noted: Any = WeakIdKeyDictionary()
"""Parameters that were noted to be on a disk, or to have their gradients there."""


def note_on_disk(parameters: Sequence[nn.Parameter]) -> None:
    """Notes parameters whose memory, or whose gradients', is mapped from a scratch file. A forked process does not have it."""
    for parameter in parameters:
        _noted[parameter] = True


def is_on_disk(tensor: Any) -> bool:
    """Whether the memory of a plain tensor, or of a storage, is mapped from a scratch file, of this run or an earlier one."""
    if not _mappings.ends:
        return False
    with torch.DisableTorchFunctionSubclass():  # a stand-in is not brought by this
        return _mappings.have(tensor.data_ptr())


class _Mappings:
    """The addresses that are mapped now. Any thread may ask, and a forked process; so nobody waits for a lock.

    Attributes:
        ends: where each mapping ends, by where it begins.
    """

    def __init__(self) -> None:
        self.ends: dict[int, int] = {}
        self._versions = count()
        self._version = -1
        self._sorted: tuple[int, list[int]] = -1, []

    def add(self, begin: int, end: int) -> None:
        self.ends[begin] = end
        self._version = next(self._versions)

    def remove(self, begin: int) -> None:
        self.ends.pop(begin, None)
        self._version = next(self._versions)

    def have(self, address: int) -> bool:
        """Whether an address is in one of them."""
        version = self._version
        if self._sorted[0] != version:
            self._sorted = version, sorted(self.ends)
        begins = self._sorted[1]
        at = bisect_right(begins, address)
        return at > 0 and address < self.ends.get(begins[at - 1], 0)


_mappings = _Mappings()


def map_pages(descriptor: int, begin: int, size: int, gone: Callable[[], None]) -> Any:
    """Maps whole pages of a file, as long as somebody has a tensor of them. ``mmap`` would hold a descriptor for each mapping.

    Args:
        descriptor, begin, size: what of which file.
        gone: called once they are mapped no longer.

    Returns:
        An object with the buffer protocol.

    Raises:
        OSError: they cannot be mapped.
    """
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, begin)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    advise(address, size, mmap.MADV_DONTFORK)
    pages = _array_of(size).from_address(address)
    _mappings.add(address, address + size)
    finalizer = weakref.finalize(pages, _unmap, os.getpid(), address, size, gone)
    finalizer.atexit = False  # others may read them until the process ends
    return pages


@cache
def _array_of(size: int) -> Any:
    return type("Pages", (ctypes.c_char * size,), {})  # a class of Python's own may have finalizers


def _unmap(process: int, address: int, size: int, gone: Callable[[], None]) -> None:
    if os.getpid() != process:  # a forked process has other things at that address
        return
    _mappings.remove(address)
    libc.munmap(address, size)
    gone()


def let_go(address: int, nbytes: int) -> None:
    """Has pages leave memory that a file has, too, but for those that have other bytes as well; what was written is kept."""
    begin, end = whole_pages(address), (address + nbytes) // PAGE * PAGE
    if end > begin:
        advise(begin, end - begin, _PAGE_OUT)


def advise(address: int, nbytes: int, advice: int) -> int:
    """Tells the system what becomes of pages, without holding up Python's other threads. Returns its error, or 0."""
    return ctypes.get_errno() if libc.madvise(address, nbytes, advice) else 0


def _after_fork() -> None:
    for parameter in list(_noted):
        with torch.DisableTorchFunctionSubclass():
            gradient = _tensor_grad.__get__(parameter)
        if gradient is not None and is_on_disk(gradient):
            gradient.__class__ = _GradientNotHere
        if is_on_disk(parameter):
            parameter.__class__ = _WeightNotHere


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
