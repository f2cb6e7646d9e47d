"""Casts: 16-bit copies that are uploaded in place of float32 weights, the masters, if autocast would cast the weights anyway.

The masters stay on the host, as the user's parameters. Their casts, in autocast's dtype, follow the layer's other weights in its
host block and in its slot. If a stand-in is given to a function that autocast runs in this dtype, the function gets the cast. For
any other function the master is uploaded, like every offloaded weight. Only the function gets the cast; modules hold the master.

A saved tensor of a slot is packed as its place in the slot, so that it has the present values when it is unpacked. Plain autograd
holds memory of its own for a cast, because autocast makes a copy, and raises no error if the master is written later. Here the
cast is made again in its place, so the graph holds a :class:`SavedPlace`, which tells it: its backward raises autograd's error.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

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


class SavedPlace:
    """A place in a layer's memory from which graphs have saved tensors without a version counter. Those graphs hold this object.

    Such tensors are casts, and views of a weight's ``.data``. When other values are given to the place (new casts;
    ``param.data = other``), a new object takes the place of this one.

    Attributes:
        written: True if other values were given to the place since then.
    """

    __slots__ = ("written",)

    def __init__(self) -> None:
        self.written = False
