"""Memory that processes share, and which pages of a private mapping this process has written.

A private mapping (``MAP_PRIVATE``) of a file or of shared memory shows the common values until a page is written. The system
copies that page first; from then on it belongs to this process. Linux reports such pages in ``/proc/self/pagemap``.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from contextlib import suppress

import numpy as np  # Lightning needs torchmetrics, which needs NumPy
import torch
from torch import Tensor

from sp_lightning.core.device.layout import PAGE, whole_pages

with suppress(ImportError):  # Windows has no fcntl, and shares no memory
    import fcntl

Page = tuple[int, int]
"""Consecutive pages: their first byte, and the byte behind the last. Counted from the start of the memory, or addresses."""

_TESTED_PAGE = 4096

# linux/fs.h: PAGEMAP_SCAN, from Linux 6.7 on.
_SCAN = 0xC0606610
_FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4
_REGIONS = 512
# Documentation/admin-guide/mm/pagemap.rst: bits of a page's entry.
_ENTRY_FILE, _ENTRY_SWAPPED, _ENTRY_PRESENT = 1 << 61, 1 << 62, -1 << 63


def supported() -> str:
    """Returns why memory cannot be shared on this system; an empty string if it can."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "memfd_create is missing: expected a recent Linux"
    if PAGE != _TESTED_PAGE:
        return f"its pages have {PAGE} bytes, and only pages of {_TESTED_PAGE} bytes were tried"
    return ""


def create(nbytes: int, name: str) -> int:
    """Creates memory that other processes can map, and returns its descriptor. The last process that closes it frees it.

    Args:
        nbytes: the size of the memory, a multiple of the page size. A page takes memory when it is first written.
        name: the name of the memory in ``/proc``.
    """
    descriptor = os.memfd_create(name)
    os.ftruncate(descriptor, nbytes)
    return descriptor


def written_pages(view: Tensor) -> list[Page]:
    """Returns the pages of a private mapping that this process has written.

    Args:
        view: the mapping or a part of it, flat ``uint8``, from the start of a page.
    """
    base = view.data_ptr()
    return [(first - base, last - base) for first, last in _written_addresses(base, base + view.nbytes)]


def was_written(tensor: Tensor) -> bool:
    """Returns True if this process has written a page of a tensor in a private mapping. Ordinary memory counts as written."""
    begin = tensor.data_ptr() // PAGE * PAGE
    return bool(_written_addresses(begin, begin + whole_pages(tensor.data_ptr() - begin + tensor.nbytes)))


def pages_in_memory(address: int, nbytes: int) -> int | None:
    """Counts the pages of a private mapping that are in memory; None if a page was written, or if Linux does not report all."""
    pages = whole_pages(address % PAGE + nbytes) // PAGE
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        entries = _entries(pagemap.fileno(), address, pages)
    if len(entries) != pages or _are_written(entries).any():
        return None
    return int((entries & _ENTRY_PRESENT != 0).sum())


def _written_addresses(begin: int, end: int) -> list[Page]:
    """Returns the written pages between two addresses. Linux reports them as present or swapped, and not as pages of a file."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        try:
            return list(_scan(pagemap.fileno(), begin, end))
        except OSError:  # an older Linux
            return list(_read(pagemap.fileno(), begin, end))


def _scan(pagemap: int, begin: int, end: int) -> Iterator[Page]:
    """Yields the written pages with one system call for many pages (Linux 6.7). Raises an OSError on an older Linux."""
    regions = np.empty((_REGIONS, 3), np.uint64)
    there, vector = _PRESENT | _SWAPPED, regions.ctypes.data
    while begin < end:
        # size, flags, start, end, walk_end, vec, vec_len, max_pages, inverted, mask, anyof_mask, return_mask
        asked = array("Q", [96, 0, begin, end, 0, vector, _REGIONS, 0, _FILE, _FILE, there, there])
        for first, last, _ in regions[: fcntl.ioctl(pagemap, _SCAN, asked)].tolist():
            yield first, last
        begin = asked[4]


def _read(pagemap: int, begin: int, end: int) -> Iterator[Page]:
    """Yields the written pages by reading the entry of each page."""
    for first in range(begin, end, step := PAGE << 20):
        written = _are_written(_entries(pagemap, first, min(step, end - first) // PAGE))
        edges = torch.nn.functional.pad(written.int(), (1, 1)).diff().nonzero().flatten().tolist()
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            yield first + start * PAGE, first + stop * PAGE


def _entries(pagemap: int, begin: int, pages: int) -> Tensor:
    """Returns the entries of pages, 64 bits each. There may be fewer entries than pages, if Linux does not report all pages."""
    found = os.pread(pagemap, 8 * pages, begin // PAGE * 8)
    return (
        torch.frombuffer(bytearray(found), dtype=torch.int64)
        if found
        else torch.empty(0, dtype=torch.int64, device="cpu")
    )


def _are_written(entries: Tensor) -> Tensor:
    return ((entries & (_ENTRY_PRESENT | _ENTRY_SWAPPED)) != 0) & ((entries & _ENTRY_FILE) == 0)
