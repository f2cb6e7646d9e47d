"""Host memory of a layer: one block for its weights, and staging memory for its gradients."""

from __future__ import annotations

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
    """Host memory for the weights or the gradients of a layer. Subclasses share it with other processes, or page it out.

    Args:
        device: allocates the memory.
        nbytes: its size.
        pin: True to page-lock it.

    Attributes:
        common: the memory that optimizers write, flat ``uint8``, of ``nbytes`` bytes.
        pinned: True if ``common`` is page-locked.
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
        """The memory for the initial values of parameters; None if another process writes them."""
        return self.common

    @property
    def seen(self) -> Tensor:
        """The memory that the user's parameters are views of."""
        return self.common

    @property
    def fetched(self) -> Tensor:
        """The memory that uploads read."""
        return self.common

    def anew(self) -> None:
        """Replaces the memory of ``seen``. Tensors that view the old memory keep it, with its values."""
        self._memory = memory = PinnedMemory(self._device, self._nbytes, pin=self._pin)
        self.common = memory.bytes[: self._nbytes]
        self.pinned = memory.pinned

    def use(self) -> None:
        """Called before all of the memory is read or written. Pages that are elsewhere are brought.

        Raises:
            OSError: they could not be read.
        """

    def renew(self) -> None:
        """Called before all of the memory is written. Its old contents need not be brought."""

    def empty(self) -> None:
        """Returns the pages to the system. Their values are elsewhere; the caller writes them before anybody reads them again."""
        if self._memory is not None:
            self.unpin()
            return_pages(self._memory.bytes)

    def unpin(self) -> None:
        """Releases the page lock. The contents stay."""
        if self._memory is not None:
            self._memory.unpin()
            self.pinned = False


Allocate = Callable[[int, bool], BlockMemory]
"""Returns memory for a block, given its bytes and whether it is to be page-locked."""


# ---------------------------------------------------------------------- gradients


class GradientMemory:
    """Memory for the gradients of one layer, in the dtypes in which they are offloaded.

    It is taken when the first gradient is offloaded: for all trainable parameters at once, in their own dtypes or, if that is
    narrower, in the dtype of the first gradient. A later gradient of another dtype gets memory of its own.

    Args:
        names: the names of the parameters.
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
        """Returns memory of a parameter's shape for its gradient; None while a tensor holds an earlier gradient in it.

        Args:
            index: the index of the parameter.
            dtype: the dtype of its gradient.
        """
        if self._staging.paged and not self._held():  # the layer's first gradient of this backward
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
        """Returns the memory to the staging, unless a tensor still holds one of the gradients."""
        if not self._held():
            self._places.clear()
            while self._memory:
                self._staging.give_back(self._memory.pop())

    def _held(self) -> bool:
        return any(lease.in_use for lease, _ in self._places.values())

    def use(self) -> bool:
        """Brings the gradients to memory. Returns True if the next layer's gradients may take their place in memory."""
        for memory in self._memory:
            memory.use()
        return self._staging.paged and bool(self._memory)

    def unpin(self) -> None:
        """Releases the page locks. The gradients stay."""
        for memory in self._memory:
            memory.unpin()


class Staging:
    """A pool of host memory for gradients.

    Args:
        device: allocates the memory, unless ``allocate`` does.
        pin: True to page-lock it.
        allocate: allocates memory that is paged out between its uses; None for memory of the device.

    Attributes:
        paged: True if the memory is paged out between its uses.
    """

    def __init__(self, device: Device, *, pin: bool, allocate: Allocate | None = None) -> None:
        self._device = device
        self._pin = pin
        self._allocate = allocate or partial(BlockMemory, device)
        self.paged = allocate is not None
        self._free: defaultdict[int, list[BlockMemory]] = defaultdict(list)  # by size in bytes
        self._locked: list[PinnedMemory] = []

    def take(self, nbytes: int) -> BlockMemory:
        """Lends a block of at least ``nbytes`` bytes."""
        padded = whole_pages(nbytes)
        free = self._free[padded]
        memory = free.pop() if free else self._allocate(padded, self._pin)
        memory.renew()
        return memory

    def give_back(self, block: BlockMemory) -> None:
        """Takes a block back. It may be overwritten from now on."""
        self._free[block.common.nbytes].append(block)

    def lock(self, memory: Tensor) -> None:
        """Page-locks memory for gradients that somebody else has allocated, in whole pages, until :meth:`unpin`."""
        self._locked.append(PinnedMemory(self._device, memory=memory, pin=self._pin))

    def unpin(self) -> None:
        """Frees the idle blocks, and releases the locks of :meth:`lock`."""
        self._free.clear()
        while self._locked:
            self._locked.pop().unpin()
