"""What comes next, into which slot: the trace that is followed, and Belady's choice with two refinements.

Overwriting the layer whose next use is farthest needs the fewest fetches. Fetching early is right only where it does no
harm: if waiting for another slot keeps a layer that is used sooner, and the fetch still has a layer's computation to
hide behind, it waits. And k' layers move as one transfer: a fetch waits for the slots of its companions, if they come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from sp_lightning.plan.plan import Plan, schedule
from sp_lightning.weights.layer import StreamedLayer
from sp_lightning.weights.slots import Slot, Slots
from sp_lightning.weights.trace import Trace


class Prefetch:
    """The choice of transfers for one plan; a trace for each phase (``train``, ``validate``, …).

    Args:
        plan, slots: what there is.
        layers: those of the plan, by their indices.
        ready: whether a layer's weights on the host are those that are wanted.
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
        """Choose for another plan of the same layers."""
        self._plan = plan
        wanted = self._wanted if plan.experts else _absent
        self._wanted_in = [partial(wanted, ring) for ring in range(len(plan.rings))]

    def start(self, phase: str, *, training: bool) -> None:
        """A batch begins: expect what the phase's last one did, or forward and, in training, backward."""
        self._training = training
        if phase not in self._traces:
            self._traces[phase] = Trace(self._schedule(training))
        self.trace = self._traces[phase]
        self.trace.start()
        self.trace.cyclic = False
        self.trace.may_go_on = not training

    def order(self, phase: str) -> Iterator[StreamedLayer]:
        """The layers in the order in which the phase's last batch used them, or its next is expected to."""
        trace = self._traces.get(phase)
        return iter(self._schedule(False) if trace is None else trace.order())

    def transfers(self) -> Iterator[list[tuple[StreamedLayer, Slot]]]:
        """The transfers that can begin now: layers and slots. Each must have been issued before the next is asked for."""
        for ring, each in enumerate(self._plan.rings):
            more = bool(each.slots)
            while more:
                pairs, more = self._next(ring)
                if not pairs:
                    break
                yield pairs

    def _schedule(self, training: bool) -> list[StreamedLayer]:
        return [self._layers[index] for index in schedule(self._plan, training=training)]

    def _wanted(self, ring: int, layer: StreamedLayer) -> bool:
        """Most tokens of a training batch make it likely that an expert is used again; few, in generation, do not."""
        return (self._training or not layer.expert) and _absent(ring, layer)

    def _next(self, ring: int) -> tuple[list[tuple[StreamedLayer, Slot]], bool]:
        """The next k' absent layers of a ring and the slots for them, none while slots for all of them will come.

        And whether there may be another transfer after that one: not where no other slot's layer is used later than the
        last of these, for what comes then is needed later still.
        """
        size = min(self._plan.k_prime, self._plan.rings[ring].slots)
        pairs: list[tuple[StreamedLayer, Slot]] = []
        coming = self.trace.coming(self._wanted_in[ring], size)
        slots = self._slots.planned(ring) if coming else []
        more = False
        for layer, needed in coming:
            best, most, may_go, free = None, float(needed), False, 0
            for slot in slots:
                gain, now = self._gain(slot, needed)
                free += now and gain > needed
                if gain > most or (gain == most and now and not may_go and best is not None):
                    best, most, may_go = slot, gain, now
            more = free > 1
            if best is None:
                break  # what is there is used sooner
            if not may_go or not self._ready(layer):
                return [], False
            slots.remove(best)
            pairs.append((layer, best))
        return pairs, more

    def _gain(self, slot: Slot, needed: float) -> tuple[float, bool]:
        """When what a slot holds is used again, if it goes for a layer that is ``needed``; and whether it may go now.

        A layer that is used before counts with the use after that one, if another layer runs in between.
        """
        if slot.layer is None:
            return math.inf, not slot.lent
        soon, later = self.trace.next_uses(slot.layer)
        if slot.lent:
            return (soon if needed >= 1 else -1), False
        if soon > needed:
            return soon, True
        return (later if soon <= needed - 2 else -1), False


def _absent(ring: int, layer: StreamedLayer) -> bool:
    """Whether a layer that is not on the device passes through this ring."""
    return layer.slot is None and layer.planned.ring == ring
