"""Host memory of a layer: one block for its weights, and staging memory for its gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from sp_lightning.core.device.device import Device
from sp_lightning.core.device.host_memory import PinnedMemory
from sp_lightning.core.device.layout import bytes_of, lay_out, total_bytes, whole_pages
from sp_lightning.core.device.lease import Lease


class BlockMemory:
    """Host memory for the weights or the gradients of a layer.

    By default :attr:`seen`, :attr:`fetched` and :attr:`common` are the same memory. They differ in subclasses that share memory
    with other processes (``ranks``), in which user code writes to a private view. Subclasses in ``disk`` write the memory to a
    file between its uses (*page it out*).

    Args:
        device: allocates the memory.
        nbytes: the size of the memory in bytes.
        pin: True to page-lock the memory.

    Attributes:
        common: the memory that optimizers write and all processes see, flat ``uint8``, of ``nbytes`` bytes.
        pinned: True if ``common`` is page-locked.
    """

    common: Tensor
    pinned: bool
    _memory: PinnedMemory | None = None

    def __init__(self, device: Device, nbytes: int, pin: bool) -> None:
        self._device = device
        self._nbytes = nbytes
        self._pin = pin
        self.reallocate()

    @property
    def initial(self) -> Tensor | None:
        """The memory to which the initial values of parameters are copied; None if another process writes the same values."""
        return self.common

    @property
    def seen(self) -> Tensor:
        """The memory that the user's parameters are views of."""
        return self.common

    @property
    def fetched(self) -> Tensor:
        """The memory that uploads read."""
        return self.common

    def reallocate(self) -> None:
        """Allocates new memory for ``seen``. Tensors that view the old memory keep it, with its values."""
        self._memory = memory = PinnedMemory(self._device, self._nbytes, pin=self._pin)
        self.common = memory.bytes[: self._nbytes]
        self.pinned = memory.pinned

    def use(self) -> None:
        """Called before all of the memory is read or written. Subclasses read pages that were paged out.

        Raises:
            OSError: the pages could not be read.
        """

    def renew(self) -> None:
        """Called before all of the memory is overwritten. Subclasses need not read the old contents of pages."""

    def unpin(self) -> None:
        """Releases the page lock. The contents stay."""
        if self._memory is not None:
            self._memory.unpin()
            self.pinned = False


Allocate = Callable[[int, bool], BlockMemory]
"""Returns memory for a block. The arguments are the size in bytes, and True to page-lock the memory."""


# ---------------------------------------------------------------------- gradients


class GradientMemory:
    """Memory for the gradients of one layer, in the dtypes in which they are offloaded.

    The memory is taken from the staging when the first gradient is offloaded, for all trainable parameters at once. Parameters
    of the same dtype as the first gradient's parameter get memory in the dtype of that gradient, other parameters in their own
    dtype. A later gradient of another dtype gets memory of its own.

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
        """Returns memory of a parameter's shape, to which its gradient is offloaded. Takes the memory if there is none yet.

        Args:
            index: the index of the parameter.
            dtype: the dtype of the gradient.

        Returns:
            The memory; None if a tensor still holds an earlier gradient in that memory (gradient accumulation, or user code).
        """
        if self._staging.paged and not self._is_held():  # the layer's first gradient, so nobody reads the old contents
            for memory in self._memory:
                memory.renew()
        place = self._places.get((index, dtype))
        if place is None:
            self._allocate(index, dtype)
            place = self._places[index, dtype]
        lease, gradient = place
        return None if lease.in_use else gradient.data

    def _allocate(self, index: int, dtype: torch.dtype) -> None:
        """Allocates memory for a gradient. If it is the layer's first, allocates memory for all trainable parameters."""
        dtypes = {index: dtype}
        if not self._places:
            weight_dtype = self._parameters[index].dtype
            for other, parameter in enumerate(self._parameters):
                if parameter.requires_grad:
                    # Parameters of the same dtype are expected to have gradients of the same dtype.
                    dtypes[other] = dtype if parameter.dtype is weight_dtype else parameter.dtype
        like = [torch.empty_like(self._parameters[i], dtype=each, device="meta") for i, each in dtypes.items()]
        spans = lay_out(zip([self._names[i] for i in dtypes], like, strict=True))
        memory = self._staging.take(total_bytes(spans))
        self._memory.append(memory)
        for key, span in zip(dtypes.items(), spans, strict=True):
            lease = Lease(bytes_of(memory.common, span))
            self._places[key] = lease, lease.views(None, [replace(span, offset=0)])[0]

    def release(self) -> None:
        """Returns the memory to the staging. Does nothing if a tensor still holds one of the gradients."""
        if not self._is_held():
            self._places.clear()
            while self._memory:
                self._staging.give_back(self._memory.pop())

    def _is_held(self) -> bool:
        return any(lease.in_use for lease, _ in self._places.values())

    def use(self) -> bool:
        """Called before the gradients are read. Loads gradients that were paged out.

        Returns:
            True if the layer has gradients in memory that can be paged out. The next layer's :meth:`use` may page them out
            again, so the caller has to read the gradients layer by layer.
        """
        for memory in self._memory:
            memory.use()
        return self._staging.paged and bool(self._memory)

    def unpin(self) -> None:
        """Releases the page locks. The gradients stay."""
        for memory in self._memory:
            memory.unpin()


class Staging:
    """A pool of host memory for gradients, so that layers use the same memory one after another.

    Args:
        device: allocates the memory if ``allocate`` is None.
        pin: True to page-lock the memory.
        allocate: allocates memory that is paged out between its uses; None for ordinary host memory.

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
        """Page-locks other memory for gradients, in whole pages, until :meth:`unpin`."""
        self._locked.append(PinnedMemory(self._device, memory=memory, pin=self._pin))

    def unpin(self) -> None:
        """Frees the idle blocks, and releases the locks of :meth:`lock`."""
        self._free.clear()
        while self._locked:
            self._locked.pop().unpin()
