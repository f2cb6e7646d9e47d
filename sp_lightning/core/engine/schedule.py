"""Schedule: which layers are fetched, locked, attached, rested and released, and when.

- :class:`Trace` is the order in which batches use layers.
- :class:`Prefetch` chooses which layers are fetched next, and into which slots.
- :class:`Residency` moves layers between their states (:mod:`~sp_lightning.core.weights.states`).

:class:`~sp_lightning.core.weights.bound_weights.BoundWeights` attaches device parameters to slots, and
:class:`~sp_lightning.core.weights.ring.BlockSource` provides the bytes on the host that a transfer reads. The planner's
simulator runs these very classes, with other ones in place of these two, and a device that only counts time. The caller
holds the engine's lock.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, filterfalse, islice
from operator import attrgetter, itemgetter
from typing import Generic, TypeVar

from sp_lightning.core.messages import WRITTEN_IN_CALL
from sp_lightning.core.plan.plan import Plan, schedule
from sp_lightning.core.weights.bound_weights import BoundWeights
from sp_lightning.core.weights.layer import NOTHING, Slot, StreamedLayer
from sp_lightning.core.weights.ring import BlockSource, Slots
from sp_lightning.core.weights.states import IN_USE, RESTING, VIEWED

L = TypeVar("L", bound=Hashable)


class Trace(Generic[L]):
    """The order in which a phase (``train``, ``validate``, …) uses layers, and the position of the running batch in it.

    A batch is expected to use layers in the order of the batch before. A wrong trace (conditional layers, several forwards) costs
    fetches on demand, never a result.

    For example, the last training batch has used the layers A B C and, in backward, C B A. Then, with inf for "no further use"::

        _expected           A B C C B A
        _uses               A: 0 5 inf inf     B: 1 4 inf inf     C: 2 3 inf inf
        _uses_in_cycle      A: 0 5 6 11 …      B: 1 4 7 10 …      C: 2 3 8 9 …      (the indices of two rounds)

    After ``visit(A)`` and ``visit(B)``, ``_at`` is 2. ``next_uses(A)`` is 5 - 2 = 3 and inf: three uses of other layers come
    before A is used again, and then A is not used any more. If the trace is ``cyclic``, the second number is 6 - 2 = 4.

    Args:
        order: the order that is expected of the first batch.
        ring: returns the ring of a layer. Uses are counted by ring (:meth:`ordinal`).

    Attributes:
        distinct: by ring, the number of layers in the order.
        cyclic: True if the order repeats: copies stay valid for the next batch, or the running batch has begun the order again.
        may_go_on: True if a batch may begin the order again at its end, as generation does for each token.
        unexpected: the layer that was used last, if no further use of it was expected; else None.
    """

    def __init__(self, order: Iterable[L], ring: Callable[[L], int] = lambda layer: 0) -> None:
        self._ring = ring
        self.distinct = dict[int, int]()
        self._ordinals: list[int] = []  # for each index of the order, the ordinal number of that use (see `ordinal`)
        self._length: dict[int, int] = {}  # by ring, the layers of all rounds of the order
        self._before = Counter[int]()  # the same of all orders before this one
        self._expected: list[L] = []
        self._uses: dict[L, list[float]] = {}  # the indices of each layer's uses in the order, and twice inf
        self._uses_in_cycle: dict[L, list[float]] = {}  # the same for two rounds of the order
        self._recorded: list[L] = list(order)  # the layers that the running batch has used
        self._at = 0  # the index in the order of the next use that is expected
        self.cyclic = False
        self.may_go_on = False
        self.unexpected: L | None = None
        self.start()

    def start(self) -> None:
        """Sets the order of the last batch as the expected one, and goes to its start.

        Called for a new batch, or for fetches before it.
        """
        if self._recorded:
            self._before.update(self._length)
        if self._recorded and self._recorded != self._expected:
            self._expected = self._recorded
            self._uses = {layer: [] for layer in self._expected}
            for index, layer in enumerate(self._expected):
                self._uses[layer].append(index)
            length = len(self._expected)
            self._uses_in_cycle = {
                layer: [*uses, *(index + length for index in uses), *_NEVER] for layer, uses in self._uses.items()
            }
            self._number()
            for uses in self._uses.values():
                uses += _NEVER
        self._recorded = []
        self._at = 0
        self.unexpected = None

    def _number(self) -> None:
        """Numbers the uses of the order: see :meth:`ordinal`."""
        members: dict[int, list[L]] = {}
        for layer in self._uses:
            members.setdefault(self._ring(layer), []).append(layer)
        self.distinct = {ring: len(layers) for ring, layers in members.items()}
        self._length = {}
        self._ordinals = [0] * len(self._expected)
        for ring, layers in members.items():
            often = [len(self._uses[layer]) for layer in layers]
            rounds = max({*often}, key=often.count)  # generation uses most layers once for each token
            self._length[ring] = rounds * len(layers)
            for rank, layer in enumerate(layers):
                for at, index in enumerate(self._uses[layer]):
                    self._ordinals[int(index)] = at * rounds // len(self._uses[layer]) * len(layers) + rank

    def order(self) -> list[L]:
        """Returns the order of the running batch so far; if it has used no layer, the order of the batch before."""
        return self._recorded or self._expected

    def visit(self, layer: L) -> None:
        """Records that a layer is used now, and moves the position behind the layer's next expected use in the order.

        If no further use of the layer is expected, the position does not change.
        """
        self._recorded.append(layer)
        uses = self._uses.get(layer, _NEVER)
        index = uses[bisect_left(uses, self._at)]
        # At the end of the order, a layer that is in the order begins it again.
        if self.may_go_on and uses[0] < self._at == len(self._expected):
            index, self.cyclic = uses[0], True
            self._before.update(self._length)
        self.unexpected = layer if index == math.inf else None
        if index != math.inf:
            self._at = int(index) + 1

    def next_use(self, layer: L) -> float:
        """Returns the number of uses of other layers before the next use of ``layer``; infinite if none is expected."""
        return self.next_uses(layer)[0]

    def next_uses(self, layer: L) -> tuple[float, float]:
        """Returns :meth:`next_use`, and the same for the use after that one."""
        uses = (self._uses_in_cycle if self.cyclic else self._uses).get(layer, _NEVER)
        index = bisect_left(uses, self._at)
        return uses[index] - self._at, uses[index + 1] - self._at

    def ordinal(self, layer: L, uses: int) -> int:
        """Returns the ordinal number of a layer's use, counted from the first batch: each round uses each layer of a ring once.

        If a round uses a layer several times (a tied weight), all these uses have the number of the first one.

        Args:
            layer: the layer.
            uses: the number of uses of other layers before the use, as :meth:`next_use` returns it.
        """
        orders, index = divmod(self._at + uses, len(self._expected))
        ring = self._ring(layer)
        return self._before[ring] + orders * self._length[ring] + self._ordinals[index]

    def coming(self, there: Callable[[L], object], wanted: Callable[[L], bool], most: int) -> list[tuple[L, int]]:
        """Returns the next wanted layers, each once, with the number of uses of other layers before each.

        Args:
            there: returns a true value for a layer that is on the device. Such layers are left out. The function is called for
                hundreds of layers, so it should not be a Python function.
            wanted: returns True for a layer to return. The function is called for absent layers only.
            most: the largest number of layers to return.
        """
        distances: dict[L, int] = {}
        ahead: Iterable[L] = islice(self._expected, self._at, None)
        for layer in filterfalse(there, chain(ahead, self._expected[: self._at]) if self.cyclic else ahead):
            if layer not in distances and wanted(layer):
                distances[layer] = int(self.next_uses(layer)[0])
                if len(distances) == most:
                    break
        return list(distances.items())


_NEVER = [math.inf, math.inf]  # two, because `next_uses` reads the next use and the one after it


class Prefetch:
    """Chooses transfers for one plan, along a trace for each phase (``train``, ``validate``, …).

    The slot is Belady's choice along the trace: overwriting the layer with the farthest next use needs the fewest fetches. There
    are three refinements:

    - A slot whose layer is used even later may become free soon. If the fetch would still overlap with the computation of a layer
      then, the fetch waits for that slot.
    - Up to k' layers are one transfer. It waits for slots for all of them only if its first layer is used so late that k' uses
      still overlap with it then.
    - In inference, copies stay valid. Belady's choice then keeps neighbouring layers: nothing is copied while they compute, and
      later layers are awaited. So the uses that find their layer absent are spread over the forward instead (:meth:`_stays`).

    Args:
        plan: the rings.
        slots: the slots of the rings.
        layers: the plan's layers by index.
        ready: returns True if a layer's weights on the host are current, so that a fetch does not wait.

    Attributes:
        rings: the indices of the rings that have slots.
    """

    def __init__(
        self, plan: Plan, slots: Slots, layers: Sequence[StreamedLayer], ready: Callable[[StreamedLayer], bool]
    ) -> None:
        self._ready = ready
        self._slots = slots
        self._layers = layers
        self._training = False
        self.follow(plan)
        self._traces: dict[str, Trace[StreamedLayer]] = {}
        self.trace = Trace[StreamedLayer](())
        """The order of the running batch."""

    def follow(self, plan: Plan) -> None:
        """Replaces the plan by another plan of the same layers. Later transfers are chosen for the new plan."""
        self._plan = plan
        self.rings = [index for index, ring in enumerate(plan.rings) if ring.slots]
        # Not of experts and of layers that are uploaded by rows, because the batch decides which of them are used.
        routed = {layer.ring for index, layer in enumerate(plan.layers) if index in plan.experts or layer.rows}
        self._spread = {*self.rings} - routed

    def start(self, phase: str, *, training: bool) -> None:
        """Begins a batch, with the trace of its phase. The first batch is expected to run forward and, in training, backward."""
        self._training = training
        if phase not in self._traces:
            self._traces[phase] = Trace(self._schedule(training), attrgetter("planned.ring"))
        self.trace = self._traces[phase]
        self.trace.start()
        self.trace.cyclic = False
        self.trace.may_go_on = not training

    def order(self, phase: str) -> Iterator[StreamedLayer]:
        """Returns the layers in the order of the phase's running or last batch. Before the first batch: in a forward's order."""
        trace = self._traces.get(phase)
        return iter(self._schedule(False) if trace is None else trace.order())

    def _schedule(self, training: bool) -> list[StreamedLayer]:
        return [self._layers[index] for index in schedule(self._plan, training=training)]

    def _wanted(self, ring: int, layer: StreamedLayer) -> bool:
        """Returns True if an absent layer is worth a prefetch.

        An expert is prefetched only in training, where a batch has many tokens, so that the expert is probably used again. A step
        of generation has few tokens. A layer of which rows are uploaded is prefetched if its ``rows`` expect some rows.
        """
        if layer.planned.ring != ring:
            return False
        return layer.rows.ahead != NOTHING if layer.planned.rows else self._training or not layer.expert

    def _unwanted(self, ring: int, layer: StreamedLayer) -> bool:
        """Returns True if an absent layer of the ring is not worth a prefetch, and is fetched on demand, if at all."""
        return layer.planned.ring == ring and not self._wanted(ring, layer)

    def next(self, ring: int) -> tuple[list[tuple[StreamedLayer, Slot]], bool]:
        """Returns the next transfer of a ring that can begin now: at most its next k' absent layers, with the slots for them.

        The caller issues the transfer before it calls this again.

        Returns:
            - The pairs of layer and slot. A layer that has to wait, for its slot or for its update, ends the transfer. If it is
              better to wait for that slot, there are no pairs.
            - True if another transfer may follow at once. False if a layer has to wait, or if each other slot is locked or has a
              layer that is needed sooner than the last layer of this transfer. The layers of the next transfer are needed even
              later, so they may not overwrite such a slot.
        """
        size = min(self._plan.k_prime, self._plan.rings[ring].slots)
        pairs: list[tuple[StreamedLayer, Slot]] = []
        coming = self.trace.coming(_slot_of, partial(self._wanted, ring), size)
        slots = list(self._slots.planned[ring]) if coming else []
        if (unexpected := self.trace.unexpected) is not None:
            # The next use may be unexpected, too, and its fetch on demand overwrites this slot. A layer that was prefetched into
            # it would then be evicted before its use, and prefetched again, once for each unexpected use.
            slots = [slot for slot in slots if slot.layer is not unexpected]
        if coming and self._plan.experts:
            self._reserve_slot(ring, slots, before=coming[0][1])
        more = False
        best: Slot | None
        for layer, uses_before in coming:
            best, wait, more = self._choose(slots, float(uses_before))
            # A slot with views (VIEWED) is left out. This is tested last, because the test takes longer than to choose a slot.
            while best is not None and best.viewed:
                slots.remove(best)
                best, wait, more = self._choose(slots, float(uses_before))
            if best is None or wait or not self._ready(layer):
                return [] if best is not None and coming[0][1] >= wait + size else pairs, False
            slots.remove(best)
            pairs.append((layer, best))
        return pairs, more

    def _reserve_slot(self, ring: int, slots: list[Slot], *, before: int) -> None:
        """Reserves a slot for the next layer that is fetched on demand, if that layer is used sooner than those to prefetch.

        The fetch on demand overwrites a slot in any case. A layer that was prefetched into this slot would be overwritten before
        its use, and fetched again. One slot is enough, because each layer on demand overwrites the one before it.

        Args:
            ring: the ring.
            slots: the slots for prefetches. The reserved slot is removed from the list.
            before: the number of uses before the first use of a layer to prefetch.
        """
        unwanted = self.trace.coming(_slot_of, partial(self._unwanted, ring), 1)
        if unwanted and unwanted[0][1] < before:
            best, _, _ = self._choose(slots, float(unwanted[0][1]))
            if best is not None:
                slots.remove(best)

    def _choose(self, slots: Sequence[Slot], needed: float) -> tuple[Slot | None, int, bool]:
        """Chooses the slot to overwrite for a new layer. ``needed``: the number of uses before the new layer's next use.

        The *gain* of a slot is the number of uses before the next use of its present layer. The slot with the largest gain is
        overwritten, if the gain is larger than ``needed``: its present layer is used after the new one.

        If the present layer is used before the new layer, with another use between the two, the slot may be overwritten after
        that use. Its gain is then the number of uses before the use after that one. A locked slot may be overwritten after its
        present use, if another use comes before the new layer.

        Returns:
            - The slot with the largest gain; None if no gain is larger than ``needed``.
            - The number of uses, with the present one, after which that slot may be overwritten; 0 if it may be overwritten now.
            - True if another slot may be overwritten now, with a gain larger than ``needed``.
        """
        if self.trace.cyclic and slots and slots[0].ring in self._spread:
            return self._choose_spread(slots, needed)
        first_empty = None
        for slot in slots:
            if slot.layer is None and not slot.locked:
                if first_empty is not None:
                    return first_empty, 0, True  # nothing gains more; there may be hundreds of slots
                first_empty = slot
        best, most, waits, free = None, needed, 0, 0
        for slot in slots:
            gain: float
            if slot.layer is None:
                gain, wait = math.inf, int(slot.locked)
            else:
                soon, later = self.trace.next_uses(slot.layer)
                if slot.locked:
                    gain, wait = (soon if needed >= 1 else -1), 1
                elif soon > needed:
                    gain, wait = soon, 0
                else:  # the present layer is used before the new one
                    gain, wait = (later if soon <= needed - 2 else -1), int(soon) + 1
            free += not wait and gain > needed
            if gain > most or (gain == most and not wait and waits and best is not None):
                best, most, waits = slot, gain, wait
        return best, waits, free > 1

    def _choose_spread(self, slots: Sequence[Slot], needed: float) -> tuple[Slot | None, int, bool]:
        """Does the same as :meth:`_choose`, among the slots whose layers do not stay. Never chooses a slot to wait for."""
        free = []
        for slot in slots:
            gain = math.inf if slot.layer is None else self.trace.next_use(slot.layer)
            if gain > needed and not slot.locked and not self._stays(slot.layer, gain):
                free.append((gain, slot))
        return max(free, key=_gain)[1] if free else None, 0, len(free) > 1

    def _stays(self, layer: StreamedLayer | None, next_use: float) -> bool:
        """Returns True if a layer keeps its slot until its next use, where batches of inference go round and round.

        While one layer computes, one slot is being filled. So of ``of`` uses, ``absent`` have to be uploaded for. A layer is
        overwritten after its use if the next use is of the layer that was fetched last: its slot is filled while that layer
        computes. If the uses to upload for are spread evenly, the uploads never pause, and no layer is uploaded earlier than
        necessary. From batch to batch these uses move by one layer, because a use comes again after ``of + 1`` uses.

        If more than half of the uses have to be uploaded for, some of them are neighbours, and others are not. Compute would wait
        between neighbours although the link has time. So two slots are filled in turn, and the same layers stay in each batch.
        """
        if layer is None or next_use == math.inf:
            return False
        ring = layer.planned.ring
        count = self.trace.distinct[ring]
        absent, of = count - self._plan.rings[ring].slots + 1, count - 1
        if 2 * absent > of:
            absent, of = absent + 1, count
        return absent < 1 or self.trace.ordinal(layer, int(next_use)) * absent % of >= absent


class Residency:
    """Moves layers between their states.

    Args:
        slots: the slots of the layers.
        prefetch: chooses the layers to fetch before a call needs them.
        source: the layers' bytes on the host.
        bound_weights: attaches the device parameters of a layer to its slot, and detaches them.
        note_memory: called after a layer may have taken an extra slot, because device memory may be at its peak.

    Attributes:
        used: the locked layers, except resting ones, with their slots, in the order in which they were locked.
        resting: the resting layers with their slots. Resting saves the host's time in inference. Code that marks copies as out of
            date first releases the resting layers (:meth:`let_rest`).
        rests: True if layers may rest. A layer rests only if its ring has a slot for each of the ring's layers.
    """

    def __init__(
        self,
        slots: Slots,
        prefetch: Prefetch,
        source: BlockSource,
        bound_weights: BoundWeights,
        note_memory: Callable[[], None],
    ) -> None:
        self.slots = slots
        self.prefetch = prefetch
        self._source = source
        self._bound_weights = bound_weights
        self._note_memory = note_memory
        self.used: dict[StreamedLayer, Slot] = {}
        self.resting: dict[StreamedLayer, Slot] = {}
        self.rests = False

    # ------------------------------------------------------------------ module calls and autograd

    def begin_call(self, layers: Sequence[StreamedLayer], *, backward: bool = False) -> None:
        """Locks and attaches layers for a module call, or for one operation, until :meth:`end_call`.

        First releases the other layers that no running call uses, so that their slots may be overwritten. If an error is raised,
        no layer counts the call; the next call releases the layers that are locked already.
        """
        if layers and (self.used or self._bound_weights.held):
            self.release_unpinned(keep=layers)
        counted = 0
        try:
            for layer in layers:
                self.require(layer, backward=backward)
                layer.running_calls += 1
                counted += 1
            for layer in layers:
                self._bound_weights.attach(layer, self.used[layer])
                layer.state = IN_USE
        except BaseException:
            self.end_call(layers[:counted], release=False)
            raise

    def end_call(self, layers: Sequence[StreamedLayer], *, release: bool = True) -> None:
        """Ends a call. If ``release`` is set, layers that no other call uses are released, or rest."""
        for layer in layers:
            layer.running_calls = max(layer.running_calls - 1, 0)  # a step that has failed meanwhile has set it to 0
        for layer in layers if release else ():
            if not layer.running_calls and layer in self.used:
                self._leave(layer)

    def pre_backward(self, layers: Collection[StreamedLayer]) -> None:
        """Releases the locked layers that no running call uses, except ``layers``, whose backward begins. Then prefetches.

        Backward runs through the layers in reverse. So the backward of every other locked layer is over.
        """
        if self.release_unpinned(keep=layers):
            self.fetch_ahead()

    def unpack(self, layer: StreamedLayer) -> Slot:
        """Locks a layer for autograd, which unpacks a saved weight of the layer. Returns the slot.

        If the layer is not locked, backward has just reached it. The layers that backward used before are then released first.
        """
        released = layer not in self.used and self.release_unpinned()
        slot = self.require(layer, backward=True)
        if released:
            self.fetch_ahead()  # after `require`, because the layer that is needed now gets a slot first
        return slot

    # ------------------------------------------------------------------ layers are fetched and locked

    def require(self, layer: StreamedLayer, *, backward: bool = False) -> Slot:
        """Locks a layer's slot. If the layer is not on the device, or its copy is out of date, the layer is fetched first.

        Also records the use in the trace. If the layer is locked already, or rests with a current copy, its slot is returned at
        once. Otherwise:

        1. If the host weights are not ready (an update runs), this waits for them.
        2. If the copy is out of date, it is dropped.
        3. If there is no copy, or rows of it are missing, the layer is fetched on demand.

        Args:
            layer: the layer.
            backward: True if backward uses the layer. Other uses are counted in ``layer.visits``.

        Raises:
            RuntimeError: the running backward has updated the layer already.
        """
        if layer in self.used:
            if not layer.whole and not layer.rows.complete:
                self._complete(layer)
            return self.used[layer]
        if layer in self.resting:
            if not layer.stale:
                layer.visits += not backward
                self.prefetch.trace.visit(layer)
                slot = self.used[layer] = self.resting.pop(layer)
                return slot
            self._release_resting(layer)
        if self.slots.idle_since is not None:
            self.slots.resume()
        layer.visits += not backward
        if not layer.fetched_by_use:
            self.prefetch.trace.visit(layer)
        # If this backward has updated the layer, the host has newer weights than backward needs. The copy that the forward has
        # used is still right. Without a copy, `refuse_updated` raises.
        updated_early = layer.owner.updated_early
        if not updated_early and not self._source.ready(layer):
            self._source.wait(layer)
            self.fetch_ahead()  # other updates may have ended meanwhile, so prefetches that waited for them can begin
        if not updated_early and layer.stale:
            layer.invalidate()
        absent = layer.slot is None or layer.slot.stale
        if not layer.whole:
            layer.rows.begin_use()
            absent = absent or not layer.rows.complete
        if absent:
            layer.refuse_updated()
            self.slots.stats.demand_fetches += 1
            # A stale slot, or one with other rows, is still the layer's: tensors may view it, so it is filled again.
            self._fetch([(layer, layer.slot or self.slots.find(layer, self.prefetch.trace.next_use))])
            self._note_memory()
        slot = self.used[layer] = self.slots.lock(layer, backward=backward)  # (2)
        return slot

    def _complete(self, layer: StreamedLayer) -> None:
        """Uploads the missing rows of a layer in use into its slot."""
        slot = self.used[layer]
        layer.refuse_updated()
        if layer.stale:
            layer.invalidate()
        self.slots.stats.demand_fetches += 1
        self._fetch([(layer, slot)])
        self.slots.wait_for_upload(slot)

    def fetch_ahead(self) -> None:
        """Fetches the next layers of the trace, as long as slots may be overwritten for them.

        Called whenever a slot may have become free, or the bytes of a layer may have become ready.
        """
        if self.slots.none_evicted and len(self.resting) == len(self.slots.never_evicted):
            return  # every layer rests, so every layer is on the device
        # Uploads end in the order in which they are issued. So of several rings, the one whose layer is used next is first.
        next_use = self.prefetch.trace.next_use
        transfers = {ring: found for ring in self.prefetch.rings if (found := self.prefetch.next(ring))[0]}
        while transfers:
            one = len(transfers) == 1  # nearly always
            ring = next(iter(transfers)) if one else min(transfers, key=lambda ring: next_use(transfers[ring][0][0][0]))
            pairs, more = transfers.pop(ring)
            self._fetch(pairs)
            if more and (found := self.prefetch.next(ring))[0]:
                transfers[ring] = found

    def renew_views(self) -> None:
        """Fetches the host's present weights into stale slots that tensors view.

        On plain Lightning a view of a parameter shows writes to the parameter, so a view of a slot must show such writes.
        """
        for slot in self.slots.all:
            if slot.stale and slot.layer is not None and slot.viewed:
                self._fetch([(slot.layer, slot)])

    def renew_used(self) -> None:
        """Calls :meth:`renew` for each locked layer, because host weights may have been written."""
        for layer in list(self.used):
            self.renew(layer)

    def renew(self, layer: StreamedLayer) -> None:
        """Releases a locked layer, because its host weights were written, or may have been. Its next use fetches it.

        Raises:
            RuntimeError: a call of the layer runs, and its host weights were written.
        """
        if not layer.running_calls:
            self.release(layer)
            layer.invalidate()
        elif layer.stale:
            raise RuntimeError(WRITTEN_IN_CALL.format(what=f"A weight of {layer.name!r} was written", layer=layer.name))

    def release_exchanged(self, layer: StreamedLayer) -> None:
        """Releases a layer, and its masters, if user code has given their host parameters other memory (``.data =``).

        Called before the layer is staged. Staging copies that memory into the host block, which must not happen while a member is
        locked.
        """
        for member in layer.with_masters:
            if member in self.used and not member.running_calls and member.block.displaced:
                self.release(member)

    def _fetch(self, pairs: Sequence[tuple[StreamedLayer, Slot]]) -> None:
        """Stages layers on the host, and uploads them into these slots in one transfer.

        All prefetches and fetches on demand end here. Before the slots are overwritten, writes through views of them are copied
        to the host.
        """
        slots = [slot for _, slot in pairs if slot.layer is not None and slot.layer.state is VIEWED]
        if slots:
            self._bound_weights.write_back_viewed(slots)
        transfer = []
        try:
            for layer, slot in pairs:
                if self.used:  # `stage` also adopts memory of masters, which may still be locked
                    self.release_exchanged(layer)
                transfer.append((layer, slot, self._source.stage(layer)))
        except BaseException:
            for layer, _ in pairs:
                layer.step_results = ()  # only this transfer could have used them
            raise
        self.slots.fetch(transfer)  # (1)
        for layer, _ in pairs:
            self._bound_weights.fetched(layer)

    # ------------------------------------------------------------------ layers are released

    def release(self, layer: StreamedLayer) -> None:
        """Releases a layer that no call uses. If no tensor views its slot, the slot may then be overwritten; otherwise VIEWED."""
        self._bound_weights.release(layer, self.used.pop(layer))

    def release_unpinned(self, keep: Collection[StreamedLayer] = ()) -> bool:
        """Releases the locked layers that no running call uses, or lets them rest, except ``keep``.

        Also frees device parameters that graphs held and have dropped.

        Returns:
            True if a slot may have become free.
        """
        unpinned = [layer for layer in self.used if not layer.running_calls and layer not in keep] if self.used else ()
        for layer in unpinned:
            self._leave(layer)
        return (bool(self._bound_weights.held) and self._bound_weights.free_dropped()) or bool(unpinned)

    def _leave(self, layer: StreamedLayer) -> None:
        """Releases a layer whose last call has ended, or lets it rest."""
        if self.rests and layer.state.attached and layer in self.slots.never_evicted:
            self._bound_weights.rest(layer)
            layer.state = RESTING
            self.resting[layer] = self.used.pop(layer)
        else:
            self._bound_weights.release(layer, self.used.pop(layer))

    def let_rest(self, rests: bool) -> None:
        """Sets whether layers may rest. Releases resting layers if they may not, or if they were written on the device."""
        self.rests = rests
        self.release_resting(
            None if not rests else [each for each in self.resting if self._bound_weights.written(each)]
        )

    def release_resting(self, layers: Collection[StreamedLayer] | None = None) -> None:
        """Releases those of these layers that rest. ``layers``: None for all."""
        for layer in [each for each in self.resting if layers is None or each in layers]:
            self._release_resting(layer)

    def _release_resting(self, layer: StreamedLayer) -> None:
        self.used[layer] = self.resting.pop(layer)  # where `release` looks for it
        self.release(layer)


_gain = itemgetter(0)
_slot_of = attrgetter("slot")  # None if the layer is absent
