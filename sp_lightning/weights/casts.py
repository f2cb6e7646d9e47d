"""Casts: they travel in place of float32 weights, the masters, wherever autocast would cast those anyway.

The masters stay on the host, as the user's parameters. Their casts, in autocast's dtype, lie behind the layer's other
weights in its host block (the *wire*) and in its slot. A stand-in that is given to a function which autocast runs in
that dtype passes its cast to it. Given to anything else, it brings its master, as every weight does that is away. Only the
function itself sees the cast, and what autograd saves of a cast is packed as its place in the slot.

What is packed as its place follows the weight. That is right for the weight itself and for what is written in place. It is
wrong where plain autograd holds memory of its own: autocast's copies, and views (such as the transpose that a linear layer
saves) of a weight that was given other memory since (``param.data = other``). Their :class:`SavedValues` are kept for the
graph when others take their place.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sp_lightning.device.device import Device
from sp_lightning.device.layout import ALIGNMENT, strided
from sp_lightning.device.lease import SavedView
from sp_lightning.device.modes import no_inference_mode
from sp_lightning.device.torch_private import transforms_active

if TYPE_CHECKING:
    pass

LOWERED_FUNCTIONS: frozenset[Any] = frozenset({
    torch.nn.functional.linear, torch.conv1d, torch.conv2d, torch.conv3d,
    torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
})  # fmt: skip
"""The functions for which autocast casts every tensor, on every device."""


def autocast_would_cast(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether autocast casts weights to ``dtype`` now, anew for each use.

    Autocast's cache outlives writes and sums the gradients of all uses in the lower precision. With it autocast has to
    work on the masters, and so have functorch's transforms, which refuse an autograd function such as :class:`Cast`.
    """
    return (
        torch.is_autocast_enabled(device.type)
        and torch.get_autocast_dtype(device.type) is dtype
        and not torch.is_autocast_cache_enabled()
        and not transforms_active()
    )


class Cast(torch.autograd.Function):
    """Stands for a cast that exists already: the node in the graph that autocast's own cast would be."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, cast: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return cast.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if gradients[0] is None:
            return None, None
        wide = gradients[0].to(torch.float32)
        wide.came_from_cast = wide._version  # a sum with another gradient would be another tensor, or another version
        return wide, None


def came_from_cast(gradient: Tensor) -> bool:
    """Whether a float32 gradient came from a single :class:`Cast`, so that the lower precision holds all of it."""
    return getattr(gradient, "came_from_cast", None) == gradient._version


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
            values: the bytes of the present values, flat ``uint8`` on the host. No other code writes this memory.
        """
        if self.saved:
            self.now.kept = values
            self.now = SavedValues(self._begin)


_UNSAVED = PresentValues(0)._references
"""What is counted where no graph holds any. Versions of Python differ in it."""
