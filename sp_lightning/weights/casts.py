"""Casts: what travels in place of float32 weights wherever autocast would cast them anyway.

The masters stay on the host, as the user's parameters. Their casts, in autocast's dtype, lie behind the layer's other
weights in its host block (the *wire*) and in its slot. A stand-in that is given to a function which autocast runs in
that dtype hands over its cast; given to anything else it brings its master, as a weight that is away does. So nobody sees
a cast but the function itself, and what autograd saves of one is packed as its place in the slot.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from sp_lightning.device.device import Device
from sp_lightning.device.layout import part
from sp_lightning.device.modes import no_inference_mode
from sp_lightning.device.torch_private import transforms_active
from sp_lightning.device.waits import Stream
from sp_lightning.store.block import HostBlock
from sp_lightning.weights.saved_values import Edition, Editions

LOWERED_FUNCTIONS: frozenset[Any] = frozenset({
    torch.nn.functional.linear, torch.conv1d, torch.conv2d, torch.conv3d,
    torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
})  # fmt: skip
"""Functions whose every tensor autocast casts, on every device."""


def autocast_would_cast(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether autocast casts weights to ``dtype`` now, anew for each use.

    With autocast's cache, which outlives writes and sums the gradients of all uses in the lower precision, it is to work
    on the masters; so are functorch's transforms, which take no autograd function of ours.
    """
    return (
        torch.is_autocast_enabled(device.type)
        and torch.get_autocast_dtype(device.type) is dtype
        and not torch.is_autocast_cache_enabled()
        and not transforms_active()
    )


class Cast(torch.autograd.Function):
    """A master's cast that is there already: the node that autocast's own cast would be in the graph."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, cast: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return cast.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if gradients[0] is None:
            return None, None
        wide = gradients[0].to(torch.float32)
        wide.came_from_cast = wide._version  # the sum with another one would be another tensor, or version
        return wide, None


def came_from_cast(gradient: Tensor) -> bool:
    """Whether a float32 gradient is what a single :class:`Cast` has sent: then the lower precision holds all of it."""
    return getattr(gradient, "came_from_cast", None) == gradient._version


class WireFormat(Protocol):
    """What travels in place of a layer's masters. Today: their casts."""

    @property
    def current(self) -> bool:
        """Whether what would travel is made of the masters as they are, as far as versions and :meth:`doubt` show it."""

    def doubt(self) -> None:
        """Masters may have been written unseen."""

    def refresh(self, by: Stream | None = None) -> None:
        """Makes anew what travels, unless it is :attr:`current`."""

    def edition(self, offset: int) -> Edition | None:
        """For what a graph saves at ``offset`` of the slot: the present values, if they are made of masters."""


class Casts:
    """The casts of one layer, on the host: the :class:`WireFormat` of mixed precision.

    Args:
        block: the layer's, whose wire has room for them.
        masters: the block of the float32 parameters.
        device: the seam.
    """

    def __init__(self, block: HostBlock, masters: HostBlock, device: Device) -> None:
        self._block = block
        self._masters = masters
        self._device = device
        self._spans = list(zip(block.planned.casts, masters.planned.spans, strict=True))
        self._begin = block.planned.casts[0].offset
        self._editions = Editions(self._begin)
        self._made_of: list[tuple[int, int]] | None = None

    @property
    def current(self) -> bool:
        """Whether they are those of the masters, as far as versions and :meth:`doubt` show it."""
        return self._made_of is not None and self._made_of == self._state()

    def doubt(self) -> None:
        """Masters may have been written unseen."""
        self._made_of = None

    def refresh(self, by: Stream | None = None) -> None:
        """Cast all masters of the layer anew, unless :attr:`current`. Not while the layer is used on the device.

        The host has waited for the last transfer that reads them.

        Args:
            by: the background; None for the host.

        Raises:
            RuntimeError: a master has another dtype or shape now; see :meth:`HostBlock.adopt`.
        """
        if self.current:
            return
        state = self._state()
        self._device.access(self._masters.weights, by, write=False)
        self._device.access(self._block.weights, by, write=True)
        wire = self._block.weights
        with no_inference_mode(), torch.no_grad():
            if not self._editions.saved:
                self._cast_into(wire)
            else:
                casts = wire.clone()
                self._cast_into(casts)
                if not torch.equal(casts, wire):
                    self._editions.keep(wire[self._begin :].clone())
                    wire.copy_(casts)
        self._made_of = state

    def edition(self, offset: int) -> Edition | None:
        """For what a graph saves at ``offset`` of the slot: the present casts, if it lies among them."""
        return self._editions.now() if offset >= self._begin else None

    def _cast_into(self, wire: Tensor) -> None:
        for cast, master in self._spans:
            part(wire, cast).copy_(part(self._masters.weights, master))

    def _state(self) -> list[tuple[int, int]]:
        return [(master._version, master.data_ptr()) for master in self._masters.parameters]
