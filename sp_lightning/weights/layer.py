"""A streamed layer: what travels together, where it is on the host, and where its copy on the device is."""

from __future__ import annotations

import enum
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from sp_lightning.plan.plan import PlannedLayer
from sp_lightning.store.block import HostBlock
from sp_lightning.weights.casts import NoCasts
from sp_lightning.weights.narrow_gradient import widen
from sp_lightning.weights.rows import AllRows

if TYPE_CHECKING:
    from sp_lightning.weights.parameter_group import ParameterGroup
    from sp_lightning.weights.slots import Slot


class Kind(enum.Enum):
    """How a layer comes to the device."""

    BLOCK = enum.auto()
    """It passes through the slots of its ring when its module is called."""
    MASTERS = enum.auto()
    """The float32 weights of a block that travel as casts. They come only if something asks for them themselves."""
    TABLE = enum.auto()
    """An embedding of which only rows travel. All of it comes only if something but a look-up asks for its weight."""
    RESIDENTS = enum.auto()
    """It stays on the device while a step runs, in memory of its own."""


class StreamedLayer:
    """One layer: everything that the engine knows about it.

    The device's copy is valid if :attr:`slot` is not None, nor ``stale``, and the copy is not :attr:`outdated`. Code that writes
    the host's weights in a way that no version shows calls :meth:`invalidate`. Residents have a slot of their own, which
    :class:`~sp_lightning.weights.residents.Residents` answers for. The prefetch asks for the slot alone: what it fetches in
    vain, or not at all, is found out when the layer is used.

    Args:
        index: its index in :attr:`Plan.moving`; that of the residents is the next one after the last.
        kind: how it comes to the device.
        planned: where each of its parameters lies.
        block: its memory on the host.
        parameters: its device parameters.
        expert: whether it comes only when something is routed to it.

    Attributes:
        spans: where each parameter, then each cast, lies in a slot.
        casts: what travels in place of its masters: :class:`NoCasts` unless it has any.
        masters: the layer of those masters; None if it has none.
        family: the layer and its masters, which are updated together.
        owner: the layer that it is updated with, and whose gradients leave together with its own. Of masters this is the
            layer that they belong to, otherwise the layer itself.
        rows: which rows come if something asks for the layer. Those of a table and of stacked experts set it to their own.
        whole: whether all of it comes, and as it is: it has neither casts nor rows, and neither has to be asked.
        update: its update in the background that the engine has not waited for yet. Masters have none of their own.
        slot: the slot that holds its weights as the host has them, or will hold them after the event ``transfer``.
        transfer: the event of its last transfer to the device.
        fetches: how often it was fetched.
        running_calls: how many running calls use it. It is not released before they have returned.
        layout: a number that layers share if their parameters lie alike in a slot.
        visits: how often the running step's forward has taken it into use.
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
        expert: bool = False,
    ) -> None:
        self.index = index
        self.kind = kind
        self.planned = planned
        self.block = block
        self.parameters = parameters
        self.casts = NoCasts()
        self.masters: StreamedLayer | None = None
        self.family: tuple[StreamedLayer, ...] = (self,)
        self.expert = expert
        self.owner = self
        self.spans = (*planned.spans, *planned.casts)
        self.on_demand = kind in (Kind.MASTERS, Kind.TABLE)
        self.rows = AllRows()
        self.whole = kind is not Kind.TABLE and not planned.rows and planned.masters is None
        self.update: Future[None] | None = None
        self.slot: Slot | None = None
        self.transfer: Any = None
        self.fetches = 0
        self.running_calls = 0
        self.visits = 0
        self.layout = 0
        self.updated_early = False

    @property
    def name(self) -> str:
        """The name of the layer's module, or of its parameter if that belongs to no layer's module."""
        return self.planned.name

    def use_gradients(self) -> bool:
        """Has the gradients of the layer and of its masters in memory. Returns whether any of them were on a disk."""
        found = [member.block.gradients.use() for member in self.family]
        return any(found)

    @property
    def outdated(self) -> bool:
        """Whether the host's weights were written since the layer was fetched, as far as versions show it."""
        return self.parameters.stale or not self.casts.current

    def close(self) -> None:
        """The run is over: drops the device parameters, and leaves ordinary ones on the host, whose gradients are wide."""
        self.parameters.close()
        self.rows.unpin()
        for parameter in self.block.parameters:
            widen(parameter)

    def invalidate(self) -> None:
        """Marks the device's copy as out of date, because the host's weights were or may have been written.

        A slot that is viewed after its use stays the layer's, and the layer will come to it again: views of a weight follow it.
        """
        if self.slot is None or not self.slot.escaped or self.slot.lease.moved:
            self.leave_slot()
        else:
            self.rows.drop_cached()
            self.slot.stale = True

    def leave_slot(self) -> None:
        """As :meth:`invalidate`, but weights were given other memory: views of the old one keep the old values."""
        if not self.whole:
            self.rows.drop_cached()
        if self.kind is Kind.RESIDENTS and self.slot is not None:
            self.slot.stale = True  # they take another one when they are used next
            return
        slot, self.slot = self.slot, None
        if slot is not None:
            slot.layer = None
