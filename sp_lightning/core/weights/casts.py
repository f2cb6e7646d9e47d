"""Casts: 16-bit copies that are uploaded in place of float32 weights, the masters, if autocast would cast the weights anyway.

The masters stay on the host, as the user's parameters. Their casts, in autocast's dtype, follow the layer's other weights in its
host block and in its slot. If a stand-in is given to a function that autocast runs in this dtype, the function gets the cast. For
any other function the master is uploaded, like every offloaded weight. Only the function gets the cast; modules hold the master.

A saved tensor of a slot is packed as its place in the slot, so that it has the present values when it is unpacked. Present values
are right for a weight itself, and after writes in place. They are wrong if plain autograd would hold memory of its own:

- a cast, because autocast makes a copy;
- a view of a weight (such as the transpose that a linear layer saves), if the weight was given other memory later
  (``param.data = other``).

For these tensors, the graph holds :class:`SavedValues`, which keep the old values when new ones take their place.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sp_lightning.core.device.device import Device
from sp_lightning.core.device.layout import ALIGNMENT, strided
from sp_lightning.core.device.lease import SavedView
from sp_lightning.core.torch_compat.cast_gradient import CastGradient
from sp_lightning.core.torch_compat.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.core.torch_compat.private import is_batched, transforms_active

LOWERED_FUNCTIONS: frozenset[Any] = frozenset({
    torch.nn.functional.linear, torch.conv1d, torch.conv2d, torch.conv3d,
    torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
})  # fmt: skip
"""Functions for which autocast casts every tensor, on the devices of :data:`TORCHS`. Others are asked: :func:`_lowers`."""

TORCHS = {"cpu", "cuda", "xpu"}
"""Types of devices whose lists of operators for autocast are in torch."""


@cache
def _lowers(kind: str, dtype: torch.dtype) -> bool:
    """Returns True if autocast of this type of device casts every tensor of a linear layer, and so probably of convolutions.

    A backend of another package (``PrivateUse1``) has a list of operators of its own, in which ``addmm`` may be missing.
    """
    with no_dispatch_modes(), no_inference_mode(), torch.no_grad():
        one = torch.ones(1, 1, device=kind)
        return torch.nn.functional.linear(one, one, one[0]).dtype is dtype


def autocast_would_cast(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns True if autocast now casts weights to ``dtype``, again for each use, so that casts can replace masters.

    In three cases the masters are needed, although autocast casts:

    - Autocast's cache is enabled. The cache keeps its casts when weights are written, and sums the gradients of all uses in the
      lower precision.
    - A transform of functorch runs. Transforms do not support an autograd function such as :class:`Cast`.
    - Autocast of this backend leaves out operators of :data:`LOWERED_FUNCTIONS`.
    """
    return (
        torch.is_autocast_enabled(device.type)
        and torch.get_autocast_dtype(device.type) is dtype
        and not torch.is_autocast_cache_enabled()
        and not transforms_active()
        and (device.type in TORCHS or _lowers(device.type, dtype))
    )


class Cast(torch.autograd.Function):
    """An autograd function from a master to a cast that exists already: the graph node that autocast's own cast would have."""

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
        # A copy, because hooks of nodes may hold autograd's tensor, and write it.
        return CastGradient(gradients[0].clone()), None


class SavedValues:
    """The values at one place of a layer's memory. Graphs that have saved some of these values hold this object.

    The layer has a list of such objects for its present values. When new values take their place (:func:`keep_saved_values`), the
    list gets a new object, and only graphs hold the old one.

    Args:
        begin: bytes from the start of the slot to the first value; a multiple of :data:`ALIGNMENT`.

    Attributes:
        begin: the argument.
        copy: the values' bytes on the host, flat ``uint8``, after new values have taken their place; None before.
        overwritten: the weight's name, if user code has written the weight's former memory since then; otherwise None.
    """

    def __init__(self, begin: int) -> None:
        self.copy: Tensor | None = None
        self.overwritten: str | None = None
        self.begin = begin

    def recall(self, device: Device, place: SavedView) -> Tensor:
        """Returns the values that were at a place of the slot, in new device memory.

        Raises:
            RuntimeError: the values are ``overwritten``.
        """
        assert self.copy is not None
        if self.overwritten is not None:
            raise RuntimeError(
                f"Parameter {self.overwritten!r} was given other memory (param.data = other) after a forward, and its memory of "
                "before was written through a view (old = param.data). Backward needs the values of the forward. Write a copy: "
                "old = param.data.clone()."
            )
        # The copy gets the alignment that the values had in the slot, because kernels are chosen by alignment.
        ahead = place.offset % ALIGNMENT
        last = sum((size - 1) * step for size, step in zip(place.shape, place.stride, strict=True))
        source = self.copy[place.offset - ahead - self.begin :][: ahead + (last + 1) * place.dtype.itemsize]
        memory = device.send(source)
        return strided(memory, ahead, place.dtype, place.shape, place.stride)


def are_saved(present: list[SavedValues], index: int) -> bool:
    """Returns True if a graph that is still alive has saved some of these present values."""
    return sys.getrefcount(present[index]) > _UNSAVED


_one = [SavedValues(0)]
_UNSAVED = sys.getrefcount(_one[0])
"""The reference count if no graph holds the object. It differs between versions of Python."""


def keep_saved_values(present: list[SavedValues], index: int, values: Tensor) -> None:
    """Keeps present values for the graphs that have saved some of them, before new values take their place.

    Args:
        present: the layer's list.
        index: the index of the values in the list.
        values: their bytes, flat ``uint8`` on the host. No other code writes this memory.
    """
    if are_saved(present, index):
        present[index].copy = values
        present[index] = SavedValues(present[index].begin)
