"""Memory of a host block: that of its weights, and that in which its gradients arrive."""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from sp_lightning.device.device import Device
from sp_lightning.device.host_memory import PinnedMemory, return_pages
from sp_lightning.device.layout import bytes_of, lay_out, total_bytes, whole_pages
from sp_lightning.device.lease import Lease


class BlockMemory:
    """Host memory of a block: of a layer's weights, or of its gradients. Here it is this process's alone, and always there.

    Args:
        device: allocates it.
        nbytes: how much.
        pin: whether it is page-locked.

    Attributes:
        common: what optimizers write, flat ``uint8``, of the block's size.
        pinned: whether ``common`` is page-locked.
    """

    common: Tensor
    pinned: bool
    _memory: PinnedMemory | None = None

    def __init__(self, device: Device, nbytes: int, pin: bool) -> None:
        self._device = device
        self._nbytes = nbytes
        self._pin = pin
        self.anew()

    @property
    def first(self) -> Tensor | None:
        """Where the values that parameters have at first go; None if another process has them."""
        return self.common

    @property
    def seen(self) -> Tensor:
        """What the user's parameters are views of."""
        return self.common

    @property
    def fetched(self) -> Tensor:
        """What transfers to the device read."""
        return self.common

    def anew(self) -> None:
        """Takes other memory for ``seen``. Tensors in that of before keep their values as long as there are any."""
        self._memory = memory = PinnedMemory(self._device, self._nbytes, pin=self._pin)
        self.common = memory.bytes[: self._nbytes]
        self.pinned = memory.pinned

    def use(self) -> None:
        """Called before all of it is read or written, in case it is not in memory."""

    def renew(self) -> None:
        """Called before all of it is written, whatever it had."""

    def empty(self) -> None:
        """Returns the pages to the system. What they had is elsewhere, and is written here before anybody reads it again."""
        if self._memory is not None:
            self.unpin()
            return_pages(self._memory.bytes)

    def unpin(self) -> None:
        """Releases the page lock, if there is one. The memory and its contents stay."""
        if self._memory is not None:
            self._memory.unpin()
            self.pinned = False


Allocate = Callable[[int, bool], BlockMemory]
"""Returns memory for a block: so many bytes, page-locked or not."""


class SparseMemory(BlockMemory):
    """Memory of a block most of whose weights are elsewhere: pages that are not written take no memory."""

    pinned = True  # what fetches read is

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.anew()

    def anew(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        pages = mmap.mmap(-1, whole_pages(self._nbytes), flags=flags)
        pages.madvise(mmap.MADV_NOHUGEPAGE)
        self.common = torch.frombuffer(pages, dtype=torch.uint8)[: self._nbytes]


# ---------------------------------------------------------------------- gradients


class GradientMemory:
    """Memory for one layer's gradients, in the dtypes in which they come: pinned, or on a disk.

    It is taken when the first gradient comes: for all trainable parameters at once, in their own dtypes or in that of the
    first gradient if this is narrower. A parameter whose gradient comes otherwise later gets memory of its own then.
    On a disk they are written once they come, and read once for the update: what was there before is not read when they come.

    Args:
        names: the parameters' names.
        parameters: the user's parameters.
        staging: lends the memory.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter], staging: Staging) -> None:
        self._names = names
        self._parameters = parameters
        self._staging = staging
        self._memory: list[BlockMemory] = []
        self._places: dict[tuple[int, torch.dtype], tuple[Lease, Tensor]] = {}

    def target(self, index: int, dtype: torch.dtype) -> Tensor | None:
        """Returns memory with a parameter's shape; None while a tensor still holds an earlier gradient in it.

        Args:
            index: of the parameter.
            dtype: in which its gradient comes.
        """
        if self._staging.on_disk and not self._held():  # the layer's first one of this backward
            for memory in self._memory:
                memory.renew()
        place = self._places.get((index, dtype))
        if place is None:
            self._allocate(index, dtype)
            place = self._places[index, dtype]
        lease, gradient = place
        return None if lease.in_use else gradient.data

    def _allocate(self, index: int, dtype: torch.dtype) -> None:
        dtypes = {index: dtype}
        if not self._places:
            own = self._parameters[index].dtype
            trainable = ((i, p.dtype) for i, p in enumerate(self._parameters) if p.requires_grad)
            dtypes |= {i: dtype if each is own else each for i, each in trainable}
        like = [torch.empty_like(self._parameters[i], dtype=each, device="meta") for i, each in dtypes.items()]
        spans = lay_out(zip([self._names[i] for i in dtypes], like, strict=True))
        memory = self._staging.take(total_bytes(spans))
        self._memory.append(memory)
        for key, span in zip(dtypes.items(), spans, strict=True):
            lease = Lease(bytes_of(memory.common, span))
            self._places[key] = lease, lease.views(None, [replace(span, offset=0)])[0]

    def release(self) -> None:
        """Gives the memory to other layers, unless a tensor still holds one of the gradients."""
        if not self._held():
            self._places.clear()
            while self._memory:
                self._staging.give_back(self._memory.pop())

    def _held(self) -> bool:
        """Whether a tensor holds one of the gradients."""
        return any(lease.in_use for lease, _ in self._places.values())

    def use(self) -> bool:
        """Has the gradients in memory, because they are going to be read or written. Returns whether they were on a disk."""
        for memory in self._memory:
            memory.use()
        return self._staging.on_disk and bool(self._memory)

    def unpin(self) -> None:
        """Releases the page locks. Gradients stay where they are."""
        for memory in self._memory:
            memory.unpin()


class Staging:
    """Host memory for gradients, which layers use one after the other.

    Args:
        device: allocates it.
        pin: whether it is page-locked.
        on_disk: allocates memory that is on a disk, in place of the device.

    Attributes:
        on_disk: whether it is on a disk.
    """

    def __init__(self, device: Device, *, pin: bool, on_disk: Allocate | None = None) -> None:
        self._device = device
        self._pin = pin
        self._allocate = on_disk or partial(BlockMemory, device)
        self.on_disk = on_disk is not None
        self._free: defaultdict[int, list[BlockMemory]] = defaultdict(list)  # by their size in bytes
        self._locked: list[PinnedMemory] = []

    def take(self, nbytes: int) -> BlockMemory:
        """Returns a block of at least ``nbytes`` bytes."""
        padded = whole_pages(nbytes)
        free = self._free[padded]
        memory = free.pop() if free else self._allocate(padded, self._pin)
        memory.renew()
        return memory

    def give_back(self, block: BlockMemory) -> None:
        """Takes a block back, which may be overwritten from now on."""
        self._free[block.common.nbytes].append(block)

    def lock(self, memory: Tensor) -> None:
        """Page-locks memory that gradients are to come to and that is there already, in whole pages, until :meth:`unpin`."""
        self._locked.append(PinnedMemory(self._device, memory=memory, pin=self._pin))

    def unpin(self) -> None:
        """Frees all blocks that are not lent, and releases the locks of :meth:`lock`."""
        self._free.clear()
        while self._locked:
            self._locked.pop().unpin()
