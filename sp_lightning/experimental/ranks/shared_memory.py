"""Host memory that all processes of a node share, and of which each process has a private view.

Each process maps the same memory twice. All processes see writes to :attr:`SharedMemory.common`. :attr:`SharedMemory.own` shows
the same values, but writes to it are private: the system copies a page when it is first written (copy on write). User code sees
weights through the private view. So each process has a replica of the weights, but only the pages that it writes take further
memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from zlib import crc32

import torch
from torch import Tensor

from sp_lightning.core.device.pages import Page, written_pages


class SharedMemory:
    """Memory that the processes of a node share.

    Attributes:
        nbytes: the size in bytes, a multiple of the page size.
        common: the whole memory, flat ``uint8``. All processes see writes to it.
        own: this process's private view of the whole memory.

    Args:
        descriptor: the descriptor of the memory. The caller may close it afterwards, because this object duplicates it.
        nbytes: the size in bytes, a multiple of the page size.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._descriptor = os.dup(descriptor)
        self._mapping = mmap.mmap(descriptor, nbytes)
        with suppress(OSError):
            self._mapping.madvise(mmap.MADV_DONTFORK)  # forked workers of a DataLoader do not write the memory
        self.common = _tensor(self._mapping)
        self.own = OwnView(self._descriptor, self.common)

    def view_anew(self, begin: int, end: int) -> OwnView:
        """Returns a new private view of a part of the memory, which shows the shared values. ``begin`` is a multiple of pages."""
        return OwnView(self._descriptor, self.common[begin:end], begin)

    def free(self, begin: int, end: int) -> None:
        """Gives whole pages back to the system, and makes their values zero, also in views whose pages were not written."""
        self._mapping.madvise(mmap.MADV_REMOVE, begin, end - begin)

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            os.close(self._descriptor)


class OwnView:
    """A private view of shared memory (copy on write). Pages that this process has not written show the shared values.

    Attributes:
        bytes: the view, flat ``uint8``.

    Args:
        descriptor: the descriptor of the memory.
        common: the part of the shared memory that the view shows.
        begin: the offset of this part in the memory, a multiple of the page size.
    """

    def __init__(self, descriptor: int, common: Tensor, begin: int = 0) -> None:
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._memory = mmap.mmap(descriptor, common.nbytes, flags, mmap.PROT_READ | mmap.PROT_WRITE, offset=begin)
        self._common = common
        self.bytes = _tensor(self._memory)

    def written(self, begin: int = 0, end: int | None = None) -> list[Page]:
        """Returns the pages of a part of the view that this process has written since they were last dropped."""
        return [(begin + first, begin + last) for first, last in written_pages(self.bytes[begin:end])]

    def drop(self, *parts: Page, commit: bool = False) -> int:
        """Drops this process's private pages, so that the view shows the shared values again. Returns the bytes of these pages.

        Args:
            parts: parts of the view that do not overlap. Without parts, all of the view.
            commit: True to copy the pages to shared memory first.
        """
        areas: list[Page] = [] if parts else [(0, self.bytes.nbytes)]
        for begin, end in sorted(parts):
            # Adjacent parts are joined, because each call of `written` reads pages with a system call.
            neighbour = bool(areas) and areas[-1][1] == begin
            areas.append((areas.pop()[0] if neighbour else begin, end))
        pages = [run for area in areas for run in self.written(*area)]
        for begin, end in pages:
            if commit:
                self._common[begin:end].copy_(self.bytes[begin:end])
            self._memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        return sum(end - begin for begin, end in pages)

    def checksum(self, begin: int, nbytes: int, before: int = 0) -> int:
        """Returns a checksum of these bytes that continues the checksum ``before``."""
        return crc32(memoryview(self._memory)[begin : begin + nbytes], before)

    def keep(self, begin: int, end: int) -> None:
        """Makes all pages of a part private, so that tensors in the part keep their values when other processes write."""
        held = self.bytes[begin:end]
        held.copy_(held.clone())  # a write of the same values is enough: the system copies each page that is written


def commit_or_drop(parts: Iterable[tuple[OwnView, Page]], *, commit: bool) -> int:
    """Drops private pages in parts of several views, as :meth:`OwnView.drop` does, with one call for each view.

    Args:
        parts: the views, and the first and last byte (exclusive) of each part.
        commit: True to copy the pages to shared memory first.

    Returns:
        The bytes of the private pages.
    """
    by_view: dict[OwnView, list[Page]] = {}
    for view, part in parts:
        by_view.setdefault(view, []).append(part)
    return sum(view.drop(*each, commit=commit) for view, each in by_view.items())


def _tensor(memory: mmap.mmap) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)
