"""The casts of a layer on the host, which are made of its masters whenever those were written."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from sp_lightning.device.device import Device, Stream
from sp_lightning.device.layout import addresses, part, versions
from sp_lightning.layers.casts import SavedValues, are_saved, keep_saved_values
from sp_lightning.layers.layer import NoCasts, StreamedLayer
from sp_lightning.store.block import HostBlock
from sp_lightning.torch_compat.modes import no_inference_mode


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
        self._present = [SavedValues(self._begin)]
        self._made_of: tuple[list[int], list[int]] | None = None
        self._given = False  # whether the places were given to the update that is under way

    @property
    def current(self) -> bool:  # type: ignore[override]
        """Whether the casts agree with the masters, as far as versions and :meth:`invalidate` show it."""
        return self._made_of is not None and self._made_of == self._state()

    @property
    def saved(self) -> bool:  # type: ignore[override]
        """Whether a graph has saved views of the casts."""
        return are_saved(self._present, 0)

    def invalidate(self) -> None:
        """Notes that masters may have been written in a way that no version shows."""
        self._made_of = None

    def mark_current(self) -> None:
        """Notes that another process has cast the present masters."""
        self._made_of = self._state()

    def places(self, by: Stream, *, others: bool = True) -> Mapping[int, Tensor]:
        """Where ``by`` may put casts itself while it writes masters, by the master's ``id``. All count as out of date now.

        It may not if a graph has saved casts, and ``others`` come: :meth:`refresh` sees to it that the graph keeps their values.
        """
        self.invalidate()
        self._given = not (others and are_saved(self._present, 0))
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
            if not are_saved(self._present, 0):
                self._cast_into(wire, but if self._given else ())
            else:
                casts = wire.clone()
                self._cast_into(casts)
                if not torch.equal(casts, wire):
                    keep_saved_values(self._present, 0, wire[self._begin :].clone())
                    wire.copy_(casts)
        self._made_of = state

    def saved_values(self, offset: int) -> SavedValues | None:
        """The present values of the casts, if ``offset`` of the slot is among them; otherwise None."""
        return self._present[0] if offset >= self._begin else None

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
