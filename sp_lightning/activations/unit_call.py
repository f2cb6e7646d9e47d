"""One call of a unit in a forward."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import nn

from sp_lightning.activations.offloaded_storage import OffloadedStorage


@dataclass(eq=False)
class UnitCall:
    """One call of a unit, and what autograd saves in it.

    Attributes:
        unit: the unit's name.
        module: the unit.
        row: the row of the timeline: the index of the unit's layer.
        previous: the call before this one in the same forward, whose backward comes after this one's.
        at_once: whether backward needs at once what is saved here, so that it is not worth to send it away.
        leaves: whether what is saved here leaves the device; the unit's mode says so.
        storages: the storages that have left, in that order.
        saved: bytes of the storages that were saved here first, whether they have left or not.
        inputs: bytes of the storages that this call was the first to be given.
    """

    unit: str
    module: nn.Module
    row: int
    previous: UnitCall | None = None
    at_once: bool = False
    leaves: bool = False
    storages: list[weakref.ref[OffloadedStorage]] = field(default_factory=list)
    saved: int = 0
    inputs: int = 0

    def needed(self) -> list[OffloadedStorage]:
        """The storages that the graph still holds, in the order in which backward needs them."""
        return [storage for reference in reversed(self.storages) if (storage := reference()) is not None]
