"""A streamed layer: what travels together, where it is on the host, and where its copy on the device is."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

from sp_lightning.plan.plan import PlannedLayer
from sp_lightning.store.block import HostBlock

if TYPE_CHECKING:
    from sp_lightning.weights.casts import WireFormat
    from sp_lightning.weights.embedding_rows import Table
    from sp_lightning.weights.parameter_group import ParameterGroup
    from sp_lightning.weights.slots import Slot


class Kind(enum.Enum):
    """How a layer comes to the device."""

    BLOCK = enum.auto()
    """It passes through the slots of its ring, as its module is called."""
    MASTERS = enum.auto()
    """The float32 weights of a block that travel as casts: they come only where something asks for them themselves."""
    TABLE = enum.auto()
    """An embedding of which rows travel; all of it comes only where something else asks for its weight."""
    RESIDENTS = enum.auto()
    """It stays on the device while a step runs, in memory of its own."""


class StreamedLayer:
    """One layer: everything that the engine knows about it.

    Whether the device's copy is valid has one answer: it is where :attr:`slot` is not None and the copy is not
    :attr:`outdated`. Whoever writes the host's weights unseen calls :meth:`invalidate`.

    Args:
        index: among the layers of :attr:`Plan.moving`; the residents' is one more.
        kind: how it comes.
        planned: where each of its parameters lies.
        block: its memory on the host.
        parameters: its device parameters.
        casts: what travels in place of its masters, if it has some.
        masters: the layer of those masters.
        expert: whether it only comes when something is routed to it.

    Attributes:
        spans: where each parameter, then each cast, lies in a slot.
        owner: the layer that it is updated with, and whose gradients leave with its own: itself, or that of its masters.
        table: of a table, how its rows are looked up.
        slot: the slot that holds its weights as the host has them, or will once ``transfer`` has happened.
        transfer: the event of its last transfer to the device.
        fetches: how often it was fetched.
        pins: how many running calls use it: while there are some it is not released.
        layout: equal for layers whose parameters lie alike in a slot.
        updated_early: whether the running backward has begun its update (``optimizer_overlap="backward"``).
    """

    def __init__(
        self,
        index: int,
        kind: Kind,
        planned: PlannedLayer,
        block: HostBlock,
        parameters: ParameterGroup,
        *,
        casts: WireFormat | None = None,
        masters: StreamedLayer | None = None,
        expert: bool = False,
    ) -> None:
        self.index = index
        self.kind = kind
        self.planned = planned
        self.block = block
        self.parameters = parameters
        self.casts = casts
        self.masters = masters
        self.expert = expert
        self.owner = self
        if masters is not None:
            masters.owner = self
        self.spans = (*planned.spans, *planned.casts)
        self.on_demand = kind in (Kind.MASTERS, Kind.TABLE)
        self.table: Table | None = None
        self.slot: Slot | None = None
        self.transfer: Any = None
        self.fetches = 0
        self.pins = 0
        self.layout = 0
        self.updated_early = False

    @property
    def name(self) -> str:
        """The module's, or the parameter's where it belongs to no layer's module."""
        return self.planned.name

    @property
    def family(self) -> tuple[StreamedLayer, ...]:
        """The layer and its masters: what is updated as one."""
        return (self,) if self.masters is None else (self, self.masters)

    @property
    def outdated(self) -> bool:
        """Whether the host's weights were written since the layer was fetched, as far as versions show it."""
        return self.parameters.stale or (self.casts is not None and not self.casts.current)

    def invalidate(self) -> None:
        """The host's weights have been or may have been written: the copy on the device is out of date."""
        slot, self.slot = self.slot, None
        if slot is not None:
            slot.layer = None
