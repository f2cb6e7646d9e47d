"""Which weights are nowhere but in a file: their memory is a mapping of it, and nobody has written them."""

from __future__ import annotations

import os
import weakref
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sp_lightning.device.layout import PAGE, whole_pages

_ENTRY = 8
"""Bytes that Linux says of one page in ``pagemap``."""

_SWAPPED, _OF_FILE = 1 << 62, 1 << 61
"""Bits of an entry. The highest one says that the page is in memory, so that the entry is negative then."""


@dataclass(frozen=True)
class FilePlace:
    """Where a weight is in a file, contiguous and in its own dtype.

    Attributes:
        path: the file.
        offset: bytes from its beginning, aligned to nothing.
        identity: what changes if the file is replaced or written.
    """

    path: str
    offset: int
    identity: tuple[int, int, int]


class Mappings:
    """The files that are mapped to this process's memory, as Linux lists them.

    safetensors, ``torch.load(mmap=True)`` and transformers' ``from_pretrained`` leave weights so. A page that was written has
    been copied; until then it is the file's.

    Attributes:
        resident_bytes: bytes of files in the memory of the weights that :meth:`place` has found.
    """

    def __init__(self) -> None:
        self.resident_bytes = 0
        self._begins: list[int] = []
        self._mappings: list[tuple[int, int, int, str]] = []
        self._pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._pages)
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[4] != "0" and fields[1].endswith("p"):
                begin, end = (int(each, 16) for each in fields[0].split("-"))
                self._begins.append(begin)
                self._mappings.append((end, int(fields[2], 16), int(fields[4]), fields[5]))

    def place(self, tensor: Tensor) -> FilePlace | None:
        """Where the bytes of a tensor are in a file; None if they are anywhere else, too."""
        address = tensor.data_ptr()
        index = bisect_right(self._begins, address) - 1
        if index < 0 or not tensor.nbytes:
            return None
        end, offset, node, path = self._mappings[index]
        if address + tensor.nbytes > end or not os.path.isfile(path):
            return None
        identity = identity_of(os.stat(path))
        # A file that was replaced since it was mapped has another node: these values are in no file any more.
        if identity[0] != node or not self._unwritten(address, tensor.nbytes):
            return None
        return FilePlace(path, offset + address - self._begins[index], identity)

    def _unwritten(self, address: int, nbytes: int) -> bool:
        first = address // PAGE
        count = whole_pages(address + nbytes - first * PAGE) // PAGE
        pages = torch.frombuffer(bytearray(os.pread(self._pages, count * _ENTRY, first * _ENTRY)), dtype=torch.int64)
        present = pages < 0
        if ((present | (pages & _SWAPPED != 0)) & (pages & _OF_FILE == 0)).any():
            return False
        self.resident_bytes += PAGE * int(present.sum())
        return len(pages) == count


def identity_of(status: os.stat_result) -> tuple[int, int, int]:
    """What changes if a file is replaced or written."""
    return status.st_ino, status.st_size, status.st_mtime_ns
