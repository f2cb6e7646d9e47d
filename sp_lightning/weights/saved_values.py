"""Keeps values of weights that a graph has saved and that are about to be replaced.

What autograd saves of a weight is packed as its place, and unpacked from wherever the layer is at that moment. It therefore
follows the weight. That is right for the weight itself and for what is written in place. It is wrong where plain autograd
holds memory of its own: autocast's copies, and views (such as the transpose that a linear layer saves) of a weight that was
given other memory since (``param.data = other``). Whoever is about to replace such values keeps them for the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor

from sp_lightning.device.device import Device
from sp_lightning.device.layout import ALIGNMENT, strided
from sp_lightning.device.modes import no_inference_mode


class SavedValues:
    """Values at one place of a layer's memory, of which a graph has saved some. Only such graphs keep it alive.

    Args:
        begin: bytes from the start of the slot to the first value; a multiple of :data:`ALIGNMENT`.

    Attributes:
        kept: the values' bytes on the host, flat ``uint8``, once other values have taken their place; None before.
    """

    def __init__(self, begin: int) -> None:
        self.kept: Tensor | None = None
        self._begin = begin

    def recall(
        self, device: Device, offset: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
    ) -> Tensor:
        """Returns some of the kept values in new device memory; ``offset`` counts bytes from the start of the slot."""
        assert self.kept is not None
        ahead = offset % ALIGNMENT  # the values keep the alignment that they had, because kernels are chosen by it
        last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        source = self.kept[offset - ahead - self._begin :][: ahead + (last + 1) * dtype.itemsize]
        memory = device.send(source)
        with no_inference_mode():
            return strided(memory, ahead, dtype, shape, stride)


class PresentValues:
    """The present values of one place of a layer's memory.

    Args:
        begin: bytes from the start of the slot to the place; see :class:`SavedValues`.
    """

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self._now: ref[SavedValues] | None = None

    @property
    def saved(self) -> bool:
        """Whether a graph that is still alive has saved some of the present values."""
        return self._now is not None and self._now() is not None

    def now(self) -> SavedValues:
        """The present values, for a graph that saves some of them."""
        saved = self._now() if self._now is not None else None
        if saved is None:
            saved = SavedValues(self._begin)
            self._now = ref(saved)
        return saved

    def keep(self, values: Tensor) -> None:
        """Keeps the present values for the graphs that have saved some of them, before others take their place.

        Args:
            values: the bytes of the present values, flat ``uint8`` on the host. Nobody else writes this memory.
        """
        saved = self._now() if self._now is not None else None
        if saved is not None:
            saved.kept = values
        self._now = None
