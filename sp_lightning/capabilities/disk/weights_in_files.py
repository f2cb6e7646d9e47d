"""Weights that stay in the user's files: finds and reads them, and has the block of a layer with such weights.

A weight has the values of a file if its memory is a private mapping of the file, and no page of this memory was written. This
package never writes the files.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from sp_lightning.capabilities.disk.mapped_file import page_out
from sp_lightning.core.device.layout import PAGE, bytes_of, whole_pages
from sp_lightning.core.device.pages import pages_in_memory, was_written
from sp_lightning.core.model.digests import digest_of_values, known_digests
from sp_lightning.core.model.found import Layer
from sp_lightning.core.store.block import HostBlock
from sp_lightning.core.store.block_memory import BlockMemory
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.trainer.part_files import identity_of


@dataclass(frozen=True)
class FilePlace:
    """The place of a weight in a file, contiguous and in its own dtype.

    Attributes:
        path: the file.
        offset: bytes from the beginning of the file. It need not be aligned.
        identity: numbers of the file when the place was found. One of them changes if the file is replaced or written.
    """

    path: str
    offset: int
    identity: tuple[int, int, int]

    @property
    def unchanged(self) -> bool:
        """True if the file was neither replaced nor written since the place was found.

        Raises:
            OSError: there is no file of this name.
        """
        return identity_of(os.stat(self.path)) == self.identity


class Mappings:
    """The files that are mapped to this process's memory, as Linux lists them.

    safetensors, ``torch.load(mmap=True)`` and transformers' ``from_pretrained`` map weights from files.

    Attributes:
        resident_bytes: the bytes in memory of weights that :meth:`place` has found.
    """

    def __init__(self) -> None:
        self.resident_bytes = 0
        self._mappings: list[tuple[int, int, int, int, str]] = []
        pages_in_memory(0, 1)  # raises an OSError if this process cannot read /proc/self/pagemap
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[4] != "0" and fields[1].endswith("p"):  # a private mapping of a file
                begin, end = (int(each, 16) for each in fields[0].split("-"))
                self._mappings.append((begin, end, int(fields[2], 16), int(fields[4]), fields[5]))

    def place(self, tensor: Tensor) -> FilePlace | None:
        """Returns the place of a tensor in a file; None if the tensor does not have the values of a file.

        Adds the bytes of the tensor that are in memory to :attr:`resident_bytes`.
        """
        address = tensor.data_ptr()
        index = bisect_right(self._mappings, address, key=itemgetter(0)) - 1
        if index < 0 or not tensor.nbytes:
            return None
        begin, end, offset, node, path = self._mappings[index]
        if address + tensor.nbytes > end or not os.path.isfile(path):
            return None
        identity = identity_of(os.stat(path))
        # If the file was replaced after it was mapped, the inode of its path differs, and no file of this path has these values.
        if identity[0] != node or (pages := pages_in_memory(address, tensor.nbytes)) is None:
            return None
        self.resident_bytes += PAGE * pages
        return FilePlace(path, offset + address - begin, identity)


class WeightReader:
    """Reads weights from the user's files in a thread, and drops what it has read from the page cache.

    Weights are copied to an aligned place: kernels compute other last bits at other alignments. They are read and not copied from
    their mapping, where the end of a file that was truncated is a signal instead of an error. Files stay open, so that a new file
    of the same name changes nothing. A file's size and the time of its last change are compared before and after each read.
    """

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}
        self._thread = ThreadPoolExecutor(1, "superpipeline-weights")

    def open(self, place: FilePlace) -> None:
        """Opens the file of a place, if it is not open already.

        Raises:
            OSError: the file was changed since the place was found, or cannot be opened.
        """
        if place.path not in self._descriptors:
            self._descriptors[place.path] = descriptor = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, descriptor)
            self._refuse_changed(place)

    def read(self, places: Sequence[FilePlace], targets: Sequence[Tensor]) -> Future[None]:
        """Begins to read weights to flat ``uint8`` memory.

        Args:
            places: the places of the weights. :meth:`open` has opened their files.
            targets: the memory for each weight.

        Returns:
            The read, whose errors are OSErrors.
        """
        return self._thread.submit(self._read, places, targets)

    def _read(self, places: Sequence[FilePlace], targets: Sequence[Tensor]) -> None:
        for place, target in zip(places, targets, strict=True):
            self._refuse_changed(place)
            array: Any = target.numpy()
            descriptor, done = self._descriptors[place.path], 0
            while done < target.nbytes:
                try:
                    count = os.preadv(descriptor, [memoryview(array)[done:]], place.offset + done)
                except OSError as error:
                    raise OSError(error.errno, f"Weights could not be read: {error.strerror}", place.path) from error
                if not count:
                    missing = target.nbytes - done
                    raise OSError(errno.EIO, f"This file of weights ends {missing} bytes too early", place.path)
                done += count
            self._refuse_changed(place)  # another program may have changed the file during the read
            os.posix_fadvise(descriptor, place.offset, target.nbytes, os.POSIX_FADV_DONTNEED)

    def _refuse_changed(self, place: FilePlace) -> None:
        """Raises an error if another program has changed a file since a place in it was found.

        Raises:
            OSError: the size of the file, or the time of its last change, differs.
        """
        if identity_of(os.fstat(self._descriptors[place.path])) != place.identity:
            raise OSError(
                errno.ESTALE,
                "This file of weights was changed while a run reads it. Run again, and write a new file beside it instead",
                place.path,
            )


# ---------------------------------------------------------------------- the block of a layer


class SparseMemory(BlockMemory):
    """The memory of a block most of whose weights are in files. Pages that are not written take no memory."""

    pinned = True  # avoids a warning: uploads read staging memory instead, which is page-locked

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.reallocate()

    def reallocate(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        pages = mmap.mmap(-1, whole_pages(self._nbytes), flags=flags)
        pages.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would take memory for pages that are not written
        self.common = torch.frombuffer(pages, dtype=torch.uint8)[: self._nbytes]


class FileBlock(HostBlock):
    """A block with memory for casts and for some weights. The other weights stay in the user's memory, mapped from files.

    User code finds ordinary parameters: the system reads the pages that user code touches, and copies pages that it writes. An
    upload reads files. A weight that was written is copied from memory.

    Args:
        layer, args, pin: as for :class:`~sp_lightning.core.store.block.HostBlock`. ``allocate`` is not called.
        reader: reads the files.
        places: the place of each parameter in a file; None for parameters that are copied to memory.

    Attributes:
        in_file: the indices of the parameters that have the values of their file.
        pin: True if the staging memory, which uploads read, is page-locked.
    """

    def __init__(
        self, layer: Layer, *args: Any, reader: WeightReader, places: Sequence[FilePlace | None], pin: bool
    ) -> None:
        self._places = {index: place for index, place in enumerate(places) if place is not None}
        # Keeps the mappings alive: graphs may need values that user code has replaced, and `_absorb` compares addresses, which
        # could be reused.
        with no_inference_mode(), torch.DisableTorchFunctionSubclass():
            self._mapped = {index: layer.parameters[index][1].data for index in self._places}
        self.in_file = set(self._places)
        self.pin = pin
        self._reader = reader
        planned, device, staging, _ = args
        super().__init__(layer, planned, device, staging, lambda nbytes, _: SparseMemory(nbytes), pin=pin)
        for index, place in self._places.items():
            parameter = self.parameters[index]
            _left_in_files[parameter] = place, parameter.data_ptr(), StorageWeakRef(parameter.untyped_storage())
            known_digests[parameter] = _digest
            page_out(parameter.data_ptr(), parameter.nbytes)

    def _absorb(self, index: int, into: Tensor | None) -> None:
        """Absorbs a parameter if its memory is not the mapping of its file. It is not in a file any more after that."""
        mapped = self._mapped.get(index)
        with torch.DisableTorchFunctionSubclass():
            at = self.parameters[index].data_ptr()
        if mapped is None or at != mapped.data_ptr():
            super()._absorb(index, into)
            self._mapped.pop(index, None)
            self.in_file.discard(index)

    def weight_bytes(self, index: int) -> Tensor:
        if index not in self._mapped:
            return super().weight_bytes(index)
        with no_inference_mode():
            return self._mapped[index].reshape(-1).view(torch.uint8)

    def read(self, memory: Tensor) -> Future[None]:
        """Begins to read weights from files to memory of the block's size, each weight to its place."""
        indices = sorted(self.in_file)
        targets = [bytes_of(memory, self.planned.spans[index]) for index in indices]
        return self._reader.read([self._places[index] for index in indices], targets)

    def complete(self, memory: Tensor) -> None:
        """Copies the other weights, and casts, to memory that :meth:`read` has filled.

        A weight whose mapping user code has written is copied from the mapping, now and later.
        """
        # The page table shows such writes. torch's versions do not: user code may write through NumPy.
        for index in self.in_file - self.retyped:
            if was_written(self._mapped[index]):
                self.in_file.discard(index)
        for index, span in enumerate(self.planned.spans):
            if index not in self.in_file:
                bytes_of(memory, span).copy_(self.weight_bytes(index))
        for span in self.planned.casts:
            bytes_of(memory, span).copy_(bytes_of(self.weights, span))


_left_in_files: Any = WeakIdKeyDictionary()
"""For each parameter that a run has left in a file: the place in the file, the address and the storage."""


def place_of(tensor: Tensor) -> FilePlace | None:
    """Returns the place of a parameter that a run has left in its file; None if it may not have the file's values any more."""
    if (left := _left_in_files.get(tensor)) is None:
        return None
    place, address, memory = left
    with torch.DisableTorchFunctionSubclass():
        # An address may be reused, and a parameter may view the same memory in another order.
        same = (
            not memory.expired() and memory == StorageWeakRef(tensor.untyped_storage()) and tensor.data_ptr() == address
        )
        in_order = same and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        try:
            return place if in_order and place.unchanged and not was_written(tensor) else None
        except OSError:  # the file was removed
            return None


_digests: dict[tuple[FilePlace, torch.dtype, torch.Size], str] = {}
"""The digests of weights that are in files. Each weight is read once."""


def _digest(tensor: Tensor) -> str:
    """Returns the digest of a parameter that a run has left in its file. Only the first call reads the weight from the file."""
    place = place_of(tensor)
    if place is None:
        return digest_of_values(tensor)
    key = place, tensor.dtype, tensor.shape
    if key not in _digests:
        _digests[key] = digest_of_values(tensor)
        page_out(tensor.data_ptr(), tensor.nbytes)
    return _digests[key]
