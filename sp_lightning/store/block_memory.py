"""The memory of a host block, of this process alone or of all ranks of the node; and that in which its gradients arrive."""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from zlib import crc32

import torch
from torch import Tensor, nn

from sp_lightning.device.device import Device
from sp_lightning.device.host_memory import PinnedMemory, return_pages
from sp_lightning.device.layout import Span, bytes_of, lay_out, total_bytes, whole_pages
from sp_lightning.device.lease import Lease
from sp_lightning.device.pages import Page
from sp_lightning.ranks.ranks import Ranks
from sp_lightning.ranks.shared_memory import OwnView, SharedMemory, commit_or_drop


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


def shared_allocator(ranks: Ranks, device: Device, nbytes: int) -> Allocate:
    """Returns what allocates blocks in memory that all ranks of a node have in common. Collective.

    Args:
        ranks: those who share it.
        device: page-locks it.
        nbytes: of all blocks, each in whole pages.
    """
    memory, used = ranks.share(nbytes, "weights"), 0

    def allocate(nbytes: int, pin: bool) -> BlockMemory:
        nonlocal used
        begin, used = used, used + whole_pages(nbytes)
        return SharedBlockMemory(memory, begin, nbytes, device, pin=pin, primary=ranks.primary)

    return allocate


class SharedBlockMemory(BlockMemory):
    """The memory of one of several ranks. What its user code writes is this rank's own until an update.

    Args:
        memory: that of all blocks.
        begin, nbytes: this block's part.
        device: page-locks it.
        pin: whether it does.
        primary: whether this rank's parameters give the values.

    Attributes:
        view: this rank's view of the block, and of more.
        primary: whether what this rank writes counts.
        written: whether this rank has written pages of its own, as far as :meth:`look` has seen.
    """

    def __init__(
        self, memory: SharedMemory, begin: int, nbytes: int, device: Device, *, pin: bool, primary: bool
    ) -> None:
        self._shared = memory
        self.primary = primary
        self._begin, self._pages = begin, whole_pages(nbytes)
        self._nbytes = nbytes
        self._offset = begin  # in the view
        self.view = memory.own
        self.common = memory.common[begin : begin + nbytes]
        self.written = False
        self._memory = PinnedMemory(device, memory=memory.common[begin : begin + self._pages], pin=pin)
        self.pinned = self._memory.pinned

    @property
    def first(self) -> Tensor | None:
        return self.common if self.primary else None

    @property
    def seen(self) -> Tensor:
        return self.view.bytes[self._offset : self._offset + self._nbytes]

    @property
    def fetched(self) -> Tensor:
        """All of the block as this rank sees it, if it has written some of it."""
        return self.seen if self.written else self.common

    @property
    def area(self) -> tuple[OwnView, Page]:
        """The view, and where the block lies in it. Memory that the block has left to others is in no block's area."""
        return self.view, (self._offset, self._offset + self._pages)

    def look(self) -> bool:
        """Looks whether this rank has written the block."""
        self.written = bool(self.view.written(self._offset, self._offset + self._pages))
        return self.written

    def digest(self, spans: Sequence[Span]) -> int:
        """Returns a number that says at which of these places this rank has other values than all ranks, and which; 0 if none.

        What was written and put back is no other value.
        """
        view, (begin, end) = self.area
        found = 0
        for span in spans if view.written(begin, end) else ():
            if not torch.equal(bytes_of(self.seen, span), bytes_of(self.common, span)):
                found = view.checksum(begin + span.offset, span.nbytes, crc32(span.name.encode(), found))
        return found

    def anew(self) -> None:
        self.view.keep(self._offset, self._offset + self._pages)
        self.view = self._shared.view_anew(self._begin, self._begin + self._pages)
        self._offset = 0


def merge(blocks: Iterable[BlockMemory]) -> int:
    """Gives all ranks what the primary's user code has written of blocks, and drops what another rank's has.

    Returns:
        The bytes that this rank had written.
    """
    shared = [block for block in blocks if isinstance(block, SharedBlockMemory)]
    for block in shared:
        block.written = False
    return commit_or_drop([block.area for block in shared], commit=any(block.primary for block in shared))


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
