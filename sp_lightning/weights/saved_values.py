"""Keeps values of weights that a graph has saved and that are about to be replaced.

What autograd saves of a weight is packed as its place, and unpacked from wherever the layer is at that moment. It therefore
follows the weight. That is right for the weight itself and for what is written in place. It is wrong where plain autograd
holds memory of its own: autocast's copies, and views (such as the transpose that a linear layer saves) of a weight that was
given other memory since (``param.data = other``). Whoever is about to replace such values keeps them for the graph.
"""

from __future__ import annotations

import sys

from torch import Tensor

from sp_lightning.device.device import Device
from sp_lightning.device.layout import ALIGNMENT, strided
from sp_lightning.device.lease import SavedView
from sp_lightning.device.modes import no_inference_mode


class SavedValues:
    """Values at one place of a layer's memory, of which graphs may have saved some. Once others have taken their place,
    only such graphs keep it alive.

    Args:
        begin: bytes from the start of the slot to the first value; a multiple of :data:`ALIGNMENT`.

    Attributes:
        kept: the values' bytes on the host, flat ``uint8``, once other values have taken their place; None before.
    """

    def __init__(self, begin: int) -> None:
        self.kept: Tensor | None = None
        self._begin = begin

    def recall(self, device: Device, place: SavedView) -> Tensor:
        """Returns some of the kept values, those that lay at a place of the slot, in new device memory."""
        assert self.kept is not None
        # The values keep the alignment that they had, because kernels are chosen by it.
        ahead = place.offset % ALIGNMENT
        last = sum((size - 1) * step for size, step in zip(place.shape, place.stride, strict=True))
        source = self.kept[place.offset - ahead - self._begin :][: ahead + (last + 1) * place.dtype.itemsize]
        memory = device.send(source)
        with no_inference_mode():
            return strided(memory, ahead, place.dtype, place.shape, place.stride)


class PresentValues:
    """The present values of one place of a layer's memory.

    Args:
        begin: bytes from the start of the slot to the place; see :class:`SavedValues`.

    Attributes:
        now: the present values, for a graph that saves some of them.
    """

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self.now = SavedValues(begin)

    @property
    def saved(self) -> bool:
        """Whether a graph that is still alive has saved some of the present values."""
        return self._references > _UNSAVED

    @property
    def _references(self) -> int:
        return sys.getrefcount(self.now)

    def keep(self, values: Tensor) -> None:
        """Keeps the present values for the graphs that have saved some of them, before others take their place.

        Args:
            values: the bytes of the present values, flat ``uint8`` on the host. Nobody else writes this memory.
        """
        if self.saved:
            self.now.kept = values
            self.now = SavedValues(self._begin)


_UNSAVED = PresentValues(0)._references
"""What is counted where no graph holds any. Versions of Python differ in it."""
