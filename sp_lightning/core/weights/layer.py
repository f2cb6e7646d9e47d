"""A streamed layer: parameters that are uploaded together, with their host memory and their slot on the device.

A layer has a :class:`Slot` while it is on the device, and always rows and casts. Most layers have :class:`AllRows` and
:class:`NoCasts`, which do nothing. Layers with masters have :class:`~sp_lightning.core.weights.host_casts.Casts` instead. A
capability may replace ``AllRows`` (:class:`~sp_lightning.core.model.rows.RowFinder`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sp_lightning.core.device.device import Stream
from sp_lightning.core.device.layout import Span
from sp_lightning.core.device.lease import Lease
from sp_lightning.core.plan.plan import Plan, PlannedLayer
from sp_lightning.core.store.block import HostBlock
from sp_lightning.core.weights.casts import SavedPlace
from sp_lightning.core.weights.gradient_roles import forget, widen
from sp_lightning.core.weights.parameter_group import ParameterGroup
from sp_lightning.core.weights.states import HOST, IN_USE, LayerState

Rows = frozenset[int] | None
"""The numbers of rows; None for all rows."""
NOTHING: frozenset[int] = frozenset()


class AllRows:
    """The rows of a layer that is uploaded whole: the interface of rows, with defaults that do nothing.

    Before calls that would be made for each use of a layer, the engine tests :attr:`StreamedLayer.whole`, which saves the calls.

    Attributes:
        ahead: the rows to prefetch.
        complete: True if the rows that the present use may read are in the layer's slot.
        sparse_on_device: True if the gradient is sparse on the device in this backward, although ``param.grad`` is dense.
        watches_calls: True if :meth:`begin_call` and :meth:`end_call` are to be called.
    """

    ahead: Rows = None
    complete = True
    sparse_on_device = False
    watches_calls = False

    def begin_step(self, *, training: bool) -> None:
        """Called when a step begins."""

    def begin_call(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None) -> None:
        """Called before each call of the layer's module, in the calling thread, before the layer is uploaded for the call."""

    def end_call(self) -> None:
        """Called after the latest call in this thread has returned or raised."""

    def need(self, rows: Rows) -> None:
        """Adds rows that the present or next use of the layer may read."""

    def begin_use(self) -> None:
        """Called when a use of the layer begins, after all calls of :meth:`need` for this use."""

    def end_use(self) -> None:
        """Called when a use of the layer has ended."""

    def send(self, slot: Slot, source: Tensor) -> int | None:
        """Uploads the needed rows to a slot. Returns the bytes copied from the host; None if the caller has to copy all rows."""
        return None

    def lost(self) -> None:
        """Called after an upload to the layer's slot has failed."""

    def may_compute_with_wrapped(self, use: Any, args: Sequence[Any], kwargs: Any) -> bool:
        """Returns True if the slot has all rows of a wrapped weight that an operation (``use``) reads.

        Otherwise the whole layer is attached for the operation.
        """
        return False

    def computed(self, func: Any, output: Any) -> None:
        """Called with the result of a function that was called with a wrapped weight."""

    def read_whole(self) -> None:
        """Called when an operation uses whole weights, so any row may get a gradient."""

    def saved_rows(self, index: int | None, view: Tensor | None = None, offset: int = 0) -> Rows:
        """Returns the rows that a tensor saved by autograd needs in backward.

        Args:
            index: the index of the parameter in which the tensor begins; None if it begins in no parameter, but in a cast.
            view: the tensor, a view of the slot's memory; None if the weight itself was saved.
            offset: bytes from the start of the slot to the view.
        """
        return None

    def completed(self, index: int, value: Tensor, slots: Collection[int]) -> Tensor:
        """Returns a weight with all rows, given its value on the device. Rows that the slot lacks are taken from the host.

        Args:
            index: the index of the weight.
            value: the value on the device.
            slots: the addresses of all slots. A value in other memory has all rows.

        Returns:
            The value itself, or a tensor on the host if rows were missing.
        """
        return value

    def gradient_rows(self, index: int) -> Rows:
        """Returns the rows of a complete gradient that may be nonzero, and forgets them."""
        return None

    def unpin(self) -> None:
        """Releases page locks of host memory."""


class NoCasts:
    """The casts of a layer whose weights are uploaded unchanged: the interface of casts, with defaults that do nothing."""

    current = True
    saved = False
    """True if autograd has saved views of casts."""

    def invalidate(self) -> None:
        """Marks the casts as out of date, because masters may have been written unnoticed."""

    def mark_current(self) -> None:
        """Records that an update or another process has cast the current masters."""

    def places(self, by: Stream) -> Mapping[int, Tensor]:
        """Returns the memory into which the stream ``by`` may write casts together with masters, by the id of the master."""
        return {}

    def refresh(self, by: Stream | None = None, *, but: Collection[int] = ()) -> None:
        """Casts the masters again if the casts are out of date."""

    def saved_place(self, offset: int) -> SavedPlace | None:
        """Returns the object that a graph holds if it saves a cast at byte ``offset`` of the slot; None if no cast is there."""
        return None

    def offer(self, views: Sequence[Tensor]) -> None:
        """Offers the casts on the device to functions, in place of masters. Called when the layer is attached."""

    def withdraw(self) -> None:
        """Withdraws the offered casts. Called when the layer is detached."""


@dataclass(eq=False)
class Slot:
    """Device memory for one layer.

    Attributes:
        ring: the index of the slot's ring in the plan; -1 for the slot of residents.
        memory: the slot's memory for transfers, flat ``uint8``.
        lease: the same memory for compute, as another storage whose owners can be counted.
        extra: True if the plan does not count the slot: all other slots were locked or held, or the slot was still viewed when
            the plan was replaced.
        layer: the layer whose weights are in the slot; None if the slot is empty or its values are out of date.
        locked: True if a layer in a locked state uses the slot. If user code gives a host weight other memory, the layer leaves
            the slot during the use. The slot then stays locked until the end of the use, which continues with the old values.
        stale: True if the host's weights of ``layer`` were written, or may have been, since the fetch. The next fetch of the
            layer uses the same slot, because tensors view the slot and must show the new values.
        filled: the event after the last transfer into the slot.
        idle: the event after the last kernel that used the slot. None while the slot is locked, and if tensors still viewed it
            at its release.
        sources: device tensors that the last transfer into the slot reads. They are kept until :attr:`Stream.STEP`, in which
            their memory may be used again, has waited for the transfer.
    """

    ring: int
    memory: Tensor
    lease: Lease
    extra: bool = False
    layer: StreamedLayer | None = None
    locked: bool = False
    stale: bool = False
    filled: Any = None
    idle: Any = None
    sources: Sequence[Tensor] = ()

    @property
    def viewed(self) -> bool:
        """True if a tensor of user code or of a graph views the slot after its last use, so no other layer may overwrite it."""
        return not self.locked and self.lease.in_use

    @property
    def overwritable(self) -> bool:
        """True if another layer may be fetched into the slot."""
        return not self.locked and not self.lease.in_use


class Kind(enum.Enum):
    """How a layer is uploaded to the device."""

    BLOCK = enum.auto()
    """It is uploaded into a slot of its ring for calls of its module."""
    MASTERS = enum.auto()
    """The float32 weights of a block that is uploaded as casts. They are uploaded only if an operation needs them in float32."""
    TABLE = enum.auto()
    """An embedding of which rows are uploaded. Only an operation other than a look-up uploads the whole weight."""
    RESIDENTS = enum.auto()
    """The weights outside all layers. They stay on the device during a step, in memory of their own."""


class StreamedLayer:
    """One layer: all data that the engine keeps about it.

    :attr:`state` tells where the layer's weights are. The device's copy is valid if :attr:`slot` is set and not ``stale``, and
    the copy is not :attr:`stale`. Code that writes the host's weights in a way that no version shows calls
    :meth:`invalidate`. Residents have a slot of their own, and :class:`~sp_lightning.core.weights.residents.Residents` keeps
    their copy up to date. The prefetch reads only ``slot``, so it may fetch a layer in vain, or miss one that is out of date.
    The use of the layer then fetches the layer.

    Args:
        index: the layer's index in :attr:`Plan.moving`. The index of the residents follows the last of these.
        kind: how the layer is uploaded to the device.
        planned: the place of each parameter in memory.
        block: the layer's memory on the host.
        parameters: the layer's device parameters.
        expert: True if the layer is an expert: it is uploaded only if a batch is routed to it.

    Attributes:
        spans: the place of each parameter, then of each cast, in a slot.
        casts: the 16-bit copies that are uploaded in place of masters: :class:`NoCasts` if the layer has no masters.
        masters: the layer of this layer's masters; None if there are no masters.
        with_masters: the layer and its masters, which are updated together.
        owner: for masters, the layer that they belong to; otherwise the layer itself. A layer is updated together with its
            owner, and its gradients are offloaded together with the owner's.
        rows: which rows of the layer are uploaded: :class:`AllRows`, unless a finder of rows has replaced this object.
        fetched_by_use: True for masters and tables: usually only single operations and look-ups use them, and not a whole module
            call. So they are not in the trace, are not prefetched, and are evicted after each use.
        whole: True if uploads into slots are whole and unchanged, so that rows and casts have nothing to do there. Frequent code
            tests this first, which saves calls. (The rows of a table that a batch looks up are in no slot.)
        state: where the layer's weights are: :class:`~sp_lightning.core.weights.states.LayerState`.
        slot: the slot that has the weights, after the event ``transfer``. If this is None, the weights are on the host alone.
        views: True if tensors that were made in an earlier use view the layer's slot.
        transfer: the event after the last transfer to the device.
        fetches: how often the layer was fetched.
        running_calls: the number of running module calls that use the layer. It is not released before these calls return.
        layout: a number that layers share if their parameters have the same places in a slot.
        visits: how often the forward of the running step has locked the layer.
        update: the update in the background that the engine has not waited for yet; None if there is none. Masters are updated
            with their owner.
        updated_early: True if the running backward has begun the update (``optimizer_overlap="backward"``). A later use of the
            layer in this backward is an error. Also True while a step tests whether backward uses the layer again (``needed``).
        needed: None except in such a test. If the layer is used again, it is called with the reason.
        downloaded: after an update on the device: the event after which the host has the results.
        stepped: after an update on the device: the event after its kernels.
        step_results: after an update on the device: its results in device memory, each tensor with its place in a slot. The
            layer's next fetch copies these tensors. Otherwise empty.
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
        if parameters is not None:  # a simulated layer has none
            parameters.layer = self
        self.casts = NoCasts()
        self.state: LayerState = IN_USE if kind is Kind.RESIDENTS else HOST
        self.views = False
        self.masters: StreamedLayer | None = None
        self.with_masters: tuple[StreamedLayer, ...] = (self,)
        self.expert = expert
        self.owner = self
        self.spans = (*planned.spans, *planned.casts)
        self.fetched_by_use = kind in (Kind.MASTERS, Kind.TABLE)
        self.rows = AllRows()
        self.whole = not planned.rows and planned.masters is None
        self.update: Future[None] | None = None
        self.downloaded: Any = None
        self.stepped: Any = None
        self.step_results: Sequence[tuple[Span, Tensor]] = ()
        self.slot: Slot | None = None
        self.transfer: Any = None
        self.fetches = 0
        self.running_calls = 0
        self.visits = 0
        self.layout = 0
        self.updated_early = False
        self.needed: Callable[[str], None] | None = None

    @property
    def name(self) -> str:
        """The name of the layer's module; if the layer belongs to no module, the name of its parameter."""
        return self.planned.name

    def use_gradients(self) -> bool:
        """If the gradients of the layer and of its masters are on a disk, loads them into host memory.

        Returns:
            True if the gradients of the next layer may take the same memory.
        """
        # A list, because `any` would stop at the first True, and leave members out.
        found = [member.block.gradients.use() for member in self.with_masters]
        return any(found)

    @property
    def stale(self) -> bool:
        """True if host weights were written since the upload, as version counters show, or were given other memory.

        For a layer with casts also if its casts are out of date.
        """
        block = self.block
        return self.parameters.host_written or block.addresses != block.absorbed_at or not self.casts.current

    def refuse_updated(self, why: str = "its weights were needed again") -> None:
        """Checks that the running backward has not updated the layer, because an operation needs the weights before the update.

        In a test (``needed``), a use is only reported.

        Raises:
            RuntimeError: the running backward has updated the layer.
        """
        owner = self.owner
        if owner.updated_early and owner.needed is not None:
            owner.needed(f"the gradients of layer {self.name!r} were complete when {why}")
        elif owner.updated_early:
            raise RuntimeError(
                f'optimizer_overlap="backward" had updated layer {self.name!r} when, in the same backward, '
                f'{why}. Some weights are already updated. Use SuperpipelineStrategy(optimizer_overlap="forward").'
            )

    def close(self) -> None:
        """Drops the device parameters at the end of the run. Host parameters get ordinary gradients of their own dtype."""
        self.parameters.close()
        self.rows.unpin()
        for parameter in self.block.parameters:
            widen(parameter)
            forget(parameter)

    def invalidate(self) -> None:
        """Marks the copy on the device as out of date, because the host's weights were written, or may have been.

        If tensors view the slot, the layer keeps the slot, which becomes stale: views of a weight must show its new values.
        Otherwise the layer leaves the slot.
        """
        # If ``share_memory_`` has moved the views to other memory, they do not show the slot's values in any case.
        if self.slot is not None and self.views and not self.slot.lease.moved:
            self.slot.stale = True
        else:
            self.leave_slot()

    def leave_slot(self) -> None:
        """Removes the layer from its slot, whose values are out of date. Views of the slot keep the old values.

        Called if weights have other memory now, or if no tensor views the slot.
        """
        if self.kind is Kind.RESIDENTS and self.slot is not None:
            self.slot.stale = True  # the next use of residents allocates another slot
            return
        if self.slot is not None:
            self.slot.layer = None
            self.evict()

    def evict(self) -> None:
        """Makes the layer HOST: another layer overwrites its slot, or the slot is freed."""
        self.slot = None
        self.views = False
        if not self.state.locked:  # a locked layer is in use, and `Slots.release` ends the use
            self.state = HOST


def kinds(plan: Plan) -> list[Kind]:
    """Returns the kind of each layer, in the order of :attr:`Plan.moving`. The residents are last."""
    counts = {
        Kind.BLOCK: plan.layers,
        Kind.MASTERS: plan.masters,
        Kind.TABLE: plan.tables,
        Kind.RESIDENTS: [plan.residents],
    }
    return [kind for kind, layers in counts.items() for _ in layers]
