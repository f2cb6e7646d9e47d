"""Editions: the values of weights as a graph has saved them, where plain autograd would not follow the weight either.

What autograd saves of a weight is packed as its place, and comes from wherever the layer is at that moment: it follows
the weight. That is right for the weight itself, and for what is written in place. It is wrong where plain autograd holds
other memory: autocast's copies, and views of a weight (the transpose that a linear layer saves) that was given other memory
since (``param.data = other``). Whoever is about to replace such values keeps them for the graph that needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor

from sp_lightning.device.device import Device
from sp_lightning.device.layout import ALIGNMENT, strided
from sp_lightning.device.modes import no_inference_mode


class Edition:
    """Values at one place of a layer's memory, which a graph has saved some of; it lives as long as they do.

    Args:
        begin: bytes from the start of the slot to the first of the values; a multiple of :data:`ALIGNMENT`.

    Attributes:
        kept: their bytes, flat, on the host, once others have taken their place; None while the slot has them.
    """

    def __init__(self, begin: int) -> None:
        self.kept: Tensor | None = None
        self._begin = begin

    def recall(
        self, device: Device, offset: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
    ) -> Tensor:
        """Some of the kept values, in memory of their own on the device; ``offset`` in bytes from the slot's start."""
        assert self.kept is not None
        ahead = offset % ALIGNMENT  # what is there has the alignment that it had: kernels choose by it
        last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        source = self.kept[offset - ahead - self._begin :][: ahead + (last + 1) * dtype.itemsize]
        memory = device.send(source)
        with no_inference_mode():
            return strided(memory, ahead, dtype, shape, stride)


class Editions:
    """The present edition of one place, if a graph has saved some of it.

    Args:
        begin: of the place; see :class:`Edition`.
    """

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self._now: ref[Edition] | None = None

    @property
    def saved(self) -> bool:
        """Whether a graph that lives has saved some of the present values."""
        return self._now is not None and self._now() is not None

    def now(self) -> Edition:
        """For what a graph saves now."""
        edition = self._now() if self._now is not None else None
        if edition is None:
            edition = Edition(self._begin)
            self._now = ref(edition)
        return edition

    def keep(self, values: Tensor) -> None:
        """Other values come: whoever has saved some of the present ones finds these, which nobody else writes."""
        edition = self._now() if self._now is not None else None
        if edition is not None:
            edition.kept = values
        self._now = None
