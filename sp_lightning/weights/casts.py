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
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sp_lightning.device.device import Device, Stream
from sp_lightning.device.layout import ALIGNMENT, addresses, part, strided, versions
from sp_lightning.device.lease import SavedView
from sp_lightning.device.modes import no_inference_mode
from sp_lightning.device.torch_private import transforms_active
from sp_lightning.store.block import HostBlock

if TYPE_CHECKING:
    from sp_lightning.weights.layer import StreamedLayer

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


class NoCasts:
    """The casts of a layer whose weights travel as they are: there are none, and none is ever out of date."""

    current = True

    def invalidate(self) -> None:
        """Nothing depends on masters."""

    def mark_current(self) -> None:
        """Nothing depends on masters."""

    def places(self, by: Stream) -> Mapping[int, Tensor]:
        """No places."""
        return {}

    def refresh(self, by: Stream | None = None, *, but: Collection[int] = ()) -> None:
        """Nothing is cast."""

    def saved_values(self, offset: int) -> SavedValues | None:
        """No part of the slot has casts."""
        return None

    def offer(self, views: Sequence[Tensor]) -> None:
        """The layer is on the device: nothing stands for masters there."""

    def withdraw(self) -> None:
        """The layer leaves the device."""


class Casts(NoCasts):
    """The casts of one layer, on the host.

    Args:
        block: the layer's block, which has room for the casts behind its weights.
        masters: the layer of the float32 parameters.
        device: is told of reads and writes.
    """

    def __init__(self, block: HostBlock, masters: StreamedLayer, device: Device) -> None:
        self._block = block
        self._layer = masters
        self._masters = masters.block
        self._device = device
        self._spans = list(zip(block.planned.casts, masters.planned.spans, strict=True))
        self._begin = block.planned.casts[0].offset
        self._present_values = PresentValues(self._begin)
        self._made_of: tuple[list[int], list[int]] | None = None
        self._given = False  # whether the places were given to the update that is under way

    @property
    def current(self) -> bool:  # type: ignore[override]
        """Whether the casts agree with the masters, as far as versions and :meth:`invalidate` show it."""
        return self._made_of is not None and self._made_of == self._state()

    def invalidate(self) -> None:
        """Notes that masters may have been written in a way that no version shows."""
        self._made_of = None

    def mark_current(self) -> None:
        """Notes that another process has cast the present masters."""
        self._made_of = self._state()

    def places(self, by: Stream) -> Mapping[int, Tensor]:
        """Where ``by`` may put casts itself while it writes masters, by the master's ``id``. All count as out of date now.

        It may not if a graph has saved casts: :meth:`refresh` sees to it that the graph keeps their values.
        """
        self.invalidate()
        self._given = not self._present_values.saved
        if not self._given:
            return {}
        self._device.access(self._block.weights, by, write=True)
        masters = zip(self._masters.parameters, self._spans, strict=True)
        return {id(master): part(self._block.weights, cast) for master, (cast, _) in masters}

    def refresh(self, by: Stream | None = None, *, but: Collection[int] = ()) -> None:
        """Casts the masters of the layer anew, unless the casts are :attr:`current`.

        The caller has waited for the last transfer that reads the casts, and the layer is not in use on the device.

        Args:
            by: the stream that casts: the background's, or None for the host.
            but: masters, by ``id``, whose casts are in their :meth:`places` already if there were any.

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
            if not self._present_values.saved:
                self._cast_into(wire, but if self._given else ())
            else:
                casts = wire.clone()
                self._cast_into(casts)
                if not torch.equal(casts, wire):
                    self._present_values.keep(wire[self._begin :].clone())
                    wire.copy_(casts)
        self._made_of = state

    def saved_values(self, offset: int) -> SavedValues | None:
        """The present values of the casts, if ``offset`` of the slot is among them; otherwise None."""
        return self._present_values.now if offset >= self._begin else None

    def offer(self, views: Sequence[Tensor]) -> None:
        """Lets views of the casts stand for the masters, unless those are on the device, where they may be written."""
        group = self._layer.parameters
        group.sync_requires_grad()
        group.casts = views if self._layer.slot is None and self.current else None

    def withdraw(self) -> None:
        """The casts leave the device."""
        self._layer.parameters.casts = None

    def _cast_into(self, wire: Tensor, but: Collection[int] = ()) -> None:
        for master, (cast, span) in zip(self._masters.parameters, self._spans, strict=True):
            if id(master) not in but:
                part(wire, cast).copy_(part(self._masters.weights, span))

    def _state(self) -> tuple[list[int], list[int]]:
        masters = self._masters.parameters
        return versions(masters), addresses(masters)
