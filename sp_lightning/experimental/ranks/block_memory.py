"""Memory of host blocks that all ranks of a node share. Writes of user code are private to their rank until an update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from sp_lightning.core.device.device import Device
from sp_lightning.core.device.host_memory import PinnedMemory
from sp_lightning.core.device.layout import Span, bytes_of, part, whole_pages
from sp_lightning.core.device.pages import Page
from sp_lightning.core.store.block import HostBlock, refuse_other_form
from sp_lightning.core.store.block_memory import Allocate, BlockMemory
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.experimental.ranks.shared_memory import OwnView, SharedMemory, commit_or_drop


def shared_allocator(ranks: Any, device: Device, nbytes: int) -> Allocate:
    """Returns a function that allocates blocks in memory that all ranks of a node share. Collective.

    Args:
        ranks: the ranks.
        device: page-locks the memory.
        nbytes: the bytes of all blocks together, each block in whole pages.
    """
    memory, used = ranks.share(nbytes, "weights"), 0

    def allocate(nbytes: int, pin: bool) -> BlockMemory:
        nonlocal used
        begin, used = used, used + whole_pages(nbytes)
        return SharedBlockMemory(memory, begin, nbytes, device, pin=pin, fills=ranks.rank == 0)

    return allocate


class SharedBlockMemory(BlockMemory):
    """The memory of a block, shared by all ranks of the node. Writes of user code are private to a rank until an update.

    Args:
        memory: the shared memory of all blocks.
        begin, nbytes: the offset and the size of this block in the shared memory, in bytes.
        device: page-locks the block.
        pin: True to page-lock the block.
        fills: True if the initial values are copied from this rank's parameters.

    Attributes:
        view: this rank's private view. It shows all blocks at first, and only this block after :meth:`reallocate`.
        written: True if uploads read the private view, because this rank had private pages of the block at the last
            :meth:`look`, or has computed its own casts. :func:`merge` makes it False.
    """

    def __init__(
        self, memory: SharedMemory, begin: int, nbytes: int, device: Device, *, pin: bool, fills: bool
    ) -> None:
        self._shared = memory
        self._fills = fills
        self._begin, self._pages = begin, whole_pages(nbytes)
        self._nbytes = nbytes
        self._offset = begin  # of the block in the view
        self.view = memory.own
        self.common = memory.common[begin : begin + nbytes]
        self.written = False
        self._memory = PinnedMemory(device, memory=memory.common[begin : begin + self._pages], pin=pin)
        self.pinned = self._memory.pinned

    @property
    def initial(self) -> Tensor | None:
        return self.common if self._fills else None

    @property
    def seen(self) -> Tensor:
        return self.view.bytes[self._offset : self._offset + self._nbytes]

    @property
    def fetched(self) -> Tensor:
        """The memory that uploads read: the private view if :attr:`written` is True; else the shared memory."""
        return self.seen if self.written else self.common

    @property
    def area(self) -> tuple[OwnView, Page]:
        """The private view, and the first and last byte (exclusive) of the block's pages in the view."""
        return self.view, (self._offset, self._offset + self._pages)

    def look(self) -> bool:
        """Sets :attr:`written` to True if this rank has private pages of the block, otherwise to False. Returns it."""
        self.written = bool(self.view.written(self._offset, self._offset + self._pages))
        return self.written

    def digest(self, spans: Sequence[Span]) -> int:
        """Returns a checksum of the names and values of the weights that differ from the shared values; 0 if no weight differs.

        A weight that was changed and then restored does not differ.

        Args:
            spans: the names and places of the block's weights.
        """
        view, (begin, end) = self.area
        found = 0
        for span in spans if view.written(begin, end) else ():
            if not torch.equal(bytes_of(self.seen, span), bytes_of(self.common, span)):
                found = view.checksum(begin + span.offset, span.nbytes, crc32(span.name.encode(), found))
        return found

    def reallocate(self) -> None:
        self.view.keep(self._offset, self._offset + self._pages)  # tensors of user code may still view the old view
        self.view = self._shared.view_anew(self._begin, self._begin + self._pages)
        self._offset = 0


def merge(blocks: Sequence[SharedBlockMemory], *, commit: bool) -> int:
    """Drops this rank's private pages of blocks. With ``commit``, copies the pages to the shared memory before.

    Sets :attr:`SharedBlockMemory.written` to False.

    Returns:
        The bytes of the private pages that this rank had.
    """
    for block in blocks:
        block.written = False
    return commit_or_drop([block.area for block in blocks], commit=commit)


@contextmanager
def written_in_common(block: HostBlock) -> Iterator[None]:
    """A context for an optimizer's step: the parameters that it may write are views of the memory that all ranks share.

    Outside of the context, user code of each rank writes to its own view of that memory.

    Raises:
        RuntimeError: the optimizer has given a parameter another dtype or shape, which does not fit its place in the block.
    """
    # Optimizers step parameters with a gradient. A parameter that was frozen may have kept its gradient.
    stepped = [i for i, p in enumerate(block.parameters) if p.requires_grad or p.grad is not None]
    seen = {i: block.parameters[i].data for i in stepped if i not in block.retyped}
    common = {i: part(block.memory.common, block.planned.spans[i]) for i in seen}
    try:
        with no_inference_mode(), torch.no_grad():
            for index, memory in common.items():
                block.parameters[index].data = memory
        yield
        with no_inference_mode(), torch.no_grad():
            # If the optimizer has given a parameter other memory, its value is copied to all ranks.
            for index, memory in common.items():
                parameter = block.parameters[index]
                if parameter.data_ptr() != memory.data_ptr():
                    refuse_other_form(block, index, "given to it by the optimizer's step (param.data = other)")
                    memory.copy_(parameter.data)
    finally:
        with no_inference_mode(), torch.no_grad():
            for index, value in seen.items():
                block.parameters[index].data = value
