"""The casts of a layer in host memory. They are made again whenever the masters were written."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from sp_lightning.core.device.device import Device, Stream
from sp_lightning.core.device.layout import part, versions
from sp_lightning.core.device.lease import ALONE, references
from sp_lightning.core.store.block import HostBlock
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.core.weights.casts import SavedPlace
from sp_lightning.core.weights.layer import NoCasts, StreamedLayer


class Casts(NoCasts):
    """The casts of one layer, on the host.

    Args:
        block: the layer's block, which has memory for the casts after its weights.
        masters: the layer of the float32 parameters.
        device: records reads and writes.
    """

    def __init__(self, block: HostBlock, masters: StreamedLayer, device: Device) -> None:
        self._block = block
        self._layer = masters
        self._masters = masters.block
        self._device = device
        self._spans = list(zip(block.planned.casts, masters.planned.spans, strict=True))
        self._begin = block.planned.casts[0].offset
        self._present = [SavedPlace()]  # one object for all casts; graphs that have saved a cast hold it
        # The versions and addresses of the masters when the casts were made; None if the casts are out of date.
        self._made_of: tuple[list[int], list[int]] | None = None
        self._written_by_update = False  # True if the running update got places(), and so writes casts itself

    @property
    def current(self) -> bool:  # type: ignore[override]
        """True if neither versions nor :meth:`invalidate` show that the masters were written since the casts were made."""
        return self._made_of is not None and self._made_of == self._state()

    @property
    def saved(self) -> bool:  # type: ignore[override]
        """True if a graph has saved views of the casts."""
        return references(self._present, 0) > ALONE

    def invalidate(self) -> None:
        """Marks the casts as out of date, because masters may have been written in a way that no version shows."""
        self._made_of = None

    def mark_current(self) -> None:
        """Marks the casts as current, because an update or another process has cast the present masters."""
        self._made_of = self._state()

    def places(self, by: Stream) -> Mapping[int, Tensor]:
        """Returns the memory to which the stream ``by`` may write casts together with masters, by the id of the master.

        Marks the casts as out of date. The caller writes the masters next, and then calls :meth:`refresh` or
        :meth:`mark_current`. If a graph has saved casts, returns no places: :meth:`refresh` then finds out whether the casts
        change.

        Args:
            by: the stream that writes.
        """
        self.invalidate()
        self._written_by_update = not self.saved
        if not self._written_by_update:
            return {}
        self._device.access(self._block.weights, by, write=True)
        masters = zip(self._masters.parameters, self._spans, strict=True)
        return {id(master): part(self._block.weights, cast) for master, (cast, _) in masters}

    def refresh(self, by: Stream | None = None, *, but: Collection[int] = ()) -> None:
        """Casts the masters of the layer again, unless the casts are :attr:`current`.

        If a graph has saved casts whose values change, its backward will raise autograd's error. The caller has waited for the
        last transfer that reads the casts.

        Args:
            by: the stream that casts: the background's, or None for the host.
            but: ids of masters to leave out, because the update has written their casts if it got :meth:`places`.
        """
        if self.current:
            return
        state = self._state()
        self._device.access(self._masters.weights, by, write=False)
        self._device.access(self._block.weights, by, write=True)
        memory = self._block.weights
        with no_inference_mode(), torch.no_grad():
            if not self.saved:
                self._cast_into(memory, but if self._written_by_update else ())
            else:  # a graph has saved casts, which may be equal to the new ones: masters that are frozen, or were only read
                casts = memory.clone()
                self._cast_into(casts)
                if not torch.equal(casts, memory):
                    memory.copy_(casts)
                    self._present[0].written = True
                    self._present[0] = SavedPlace()
        self._made_of = state

    def saved_place(self, offset: int) -> SavedPlace | None:
        """Returns the object that a graph holds if it saves a cast at byte ``offset`` of the slot; None if no cast is there."""
        return self._present[0] if offset >= self._begin else None

    def offer(self, views: Sequence[Tensor]) -> None:
        """Offers views of the casts on the device in place of the masters, if the casts are current.

        No casts are offered while the masters are on the device, where user code may write them.
        """
        group = self._layer.parameters
        group.sync_requires_grad()
        group.casts = views if self.current and self._layer.slot is None else None

    def withdraw(self) -> None:
        """Withdraws the casts, because the layer is detached."""
        self._layer.parameters.casts = None

    def _cast_into(self, memory: Tensor, but: Collection[int] = ()) -> None:
        """Casts the masters into a block's memory, except masters whose ids are in ``but``."""
        for master, (cast, span) in zip(self._masters.parameters, self._spans, strict=True):
            if id(master) not in but:
                part(memory, cast).copy_(part(self._masters.weights, span))

    def _state(self) -> tuple[list[int], list[int]]:
        """Returns the versions and addresses of the masters now. Equal ones show that the masters were not written since."""
        return versions(self._masters.parameters), self._masters.addresses
