"""The memory of a host block: of this process alone, or of all ranks of the node."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from zlib import crc32

import torch
from torch import Tensor

from sp_lightning.device.device import Device
from sp_lightning.device.layout import Span, bytes_of, whole_pages
from sp_lightning.device.pinned import PinnedMemory
from sp_lightning.device.ranks import Ranks
from sp_lightning.device.shared_memory import OwnView, Page, SharedMemory, settle


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
        self._memory = PinnedMemory(self._device, self._nbytes, pin=self._pin)
        self.common = self._memory.bytes[: self._nbytes]
        self.pinned = self._memory.pinned

    def use(self) -> None:
        """Called before all of it is read or written, in case it is not in memory."""

    def renew(self) -> None:
        """Called before all of it is written, whatever it had."""

    def unpin(self) -> None:
        """Releases the page lock. The memory and its contents stay."""
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

    def unpin(self) -> None:
        """Nothing is page-locked."""


class SharedStore:
    """The memory of all blocks of a model, which all ranks of a node have in common.

    Args:
        ranks: those who share it.
        device: page-locks it.
        nbytes: of all blocks, each in whole pages.
    """

    def __init__(self, ranks: Ranks, device: Device, nbytes: int) -> None:
        self._device = device
        self._primary = ranks.primary
        self._memory = ranks.share(nbytes, "weights")
        self._blocks: list[SharedBlockMemory] = []
        self._used = 0

    def allocate(self, nbytes: int, pin: bool) -> BlockMemory:
        """Returns the memory of the next block."""
        begin, self._used = self._used, self._used + whole_pages(nbytes)
        block = SharedBlockMemory(self._memory, begin, nbytes, self._device, pin=pin, primary=self._primary)
        self._blocks.append(block)
        return block

    def merge(self) -> int:
        """Makes what the primary's user code has written everybody's, and forgets what another rank's has.

        Returns:
            The bytes that this rank had written.
        """
        return merge(self._blocks)


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
    """Does for some blocks what :meth:`SharedStore.merge` does for all."""
    shared = [block for block in blocks if isinstance(block, SharedBlockMemory)]
    for block in shared:
        block.written = False
    return settle([block.area for block in shared], commit=any(block.primary for block in shared))
