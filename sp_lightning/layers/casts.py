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
from typing import Any

import torch
from torch import Tensor

from sp_lightning.device.device import Device
from sp_lightning.device.layout import ALIGNMENT, strided
from sp_lightning.device.lease import SavedView
from sp_lightning.torch_compat.cast_gradient import CastGradient
from sp_lightning.torch_compat.private import is_batched, transforms_active

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
        if torch.is_grad_enabled() or is_batched(gradients[0]):  # create_graph=True; is_grads_batched=True
            return gradients[0].to(torch.float32), None
        return CastGradient(gradients[0].clone()), None  # others may hold and write autograd's, as hooks of nodes do


class SavedValues:
    """The values at one place of a layer's memory. Graphs that have saved some of them hold this object.

    The layer has a list of such objects, of the present values. Once other values take their place (:func:`keep_saved_values`),
    only graphs keep the object alive.

    Args:
        begin: bytes from the start of the slot to the first value; a multiple of :data:`ALIGNMENT`.

    Attributes:
        begin: the same.
        copy: the values' bytes on the host, flat ``uint8``, once other values have taken their place; None before.
        overwritten: the weight's name, if user code has written these values since then; otherwise None.
    """

    def __init__(self, begin: int) -> None:
        self.copy: Tensor | None = None
        self.overwritten: str | None = None
        self.begin = begin

    def recall(self, device: Device, place: SavedView) -> Tensor:
        """Returns some of these values, those that lay at a place of the slot, in new device memory.

        Raises:
            RuntimeError: they are ``overwritten``.
        """
        assert self.copy is not None
        if self.overwritten is not None:
            raise RuntimeError(
                f"Parameter {self.overwritten!r} was given other memory (param.data = other) after a forward, and its memory of "
                "before was written through a view (old = param.data). Backward needs the values of the forward. Write a copy: "
                "old = param.data.clone()."
            )
        # They keep the alignment that they had, because kernels are chosen by it.
        ahead = place.offset % ALIGNMENT
        last = sum((size - 1) * step for size, step in zip(place.shape, place.stride, strict=True))
        source = self.copy[place.offset - ahead - self.begin :][: ahead + (last + 1) * place.dtype.itemsize]
        memory = device.send(source)
        return strided(memory, ahead, place.dtype, place.shape, place.stride)


def are_saved(present: list[SavedValues], index: int) -> bool:
    """Whether a graph that is still alive has saved some of these present values."""
    return sys.getrefcount(present[index]) > _UNSAVED


_one = [SavedValues(0)]
_UNSAVED = sys.getrefcount(_one[0])
"""What is counted where no graph holds any. Versions of Python differ in it."""


def keep_saved_values(present: list[SavedValues], index: int, values: Tensor) -> None:
    """Keeps present values for the graphs that have saved some of them, before others take their place.

    Args:
        present: the layer's list.
        index: which of them.
        values: their bytes, flat ``uint8`` on the host. No other code writes this memory.
    """
    if are_saved(present, index):
        present[index].copy = values
        present[index] = SavedValues(present[index].begin)
