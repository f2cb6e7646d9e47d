"""What comes next, into which slot: the trace that is followed, and Belady's choice with two refinements.

Overwriting the layer whose next use is farthest needs the fewest fetches. Fetching early is right only where it does no
harm: if waiting for another slot keeps a layer that is used sooner, and the fetch still has a layer's computation to
hide behind, it waits. And k' layers move as one transfer: a fetch waits for the slots of its companions, if they come.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from sp_lightning.plan import Plan, schedule
from sp_lightning.slots import Slot, Slots
from sp_lightning.trace import Trace


class Prefetch:
    """The choice of transfers for one plan; a trace for each phase (``train``, ``validate``, …)."""

    def __init__(self, plan: Plan, slots: Slots) -> None:
        self._plan = plan
        self._slots = slots
        self._traces: dict[str, Trace] = {}
        self.trace = Trace(())
        """The order of the running batch."""

    def start(self, phase: str, *, training: bool) -> None:
        """A batch begins: expect what the phase's last one did, or forward and, in training, backward."""
        if phase not in self._traces:
            self._traces[phase] = Trace(schedule(self._plan, training=training))
        self.trace = self._traces[phase]
        self.trace.start()
        self.trace.cyclic = False

    def transfers(self) -> Iterator[list[tuple[int, Slot]]]:
        """The transfers that can begin now: layers and slots. Each must have been issued before the next is asked for."""
        for ring in range(len(self._plan.rings)):
            while pairs := self._next(ring):
                yield pairs

    def _next(self, ring: int) -> list[tuple[int, Slot]]:
        """The next k' absent layers of a ring and the slots for them; empty while slots for all of them will come."""
        size = min(self._plan.k_prime, self._plan.rings[ring].slots)
        absent = (x for x in self.trace.upcoming() if x not in self._slots and self._slots.ring_of(x) == ring)
        wanted = list(islice(absent, size))
        if not wanted:
            return []
        # Extra slots are given back at the batch's end; nothing comes into them but on demand.
        slots = [slot for slot in self._slots.of_ring(ring) if not slot.extra]
        pairs: list[tuple[int, Slot]] = []
        for layer in wanted:
            needed = self.trace.next_use(layer)
            gains = {slot: self._gain(slot, needed) for slot in slots}
            best = max(gains, key=gains.__getitem__, default=None)
            if best is None or gains[best][0] <= needed:
                break  # what is there is used sooner
            if not gains[best][1]:
                return []
            slots.remove(best)
            pairs.append((layer, best))
        return pairs

    def _gain(self, slot: Slot, needed: float) -> tuple[float, bool]:
        """When what a slot holds is used again, if it goes for a layer that is ``needed``; and whether it may go now.

        A layer that is used before counts with the use after that one, if another layer runs in between.
        """
        if slot.layer is None:
            return math.inf, slot.overwritable
        soon, later = self.trace.next_uses(slot.layer)
        if not slot.overwritable:
            return (soon if needed >= 1 else -1), False
        if soon > needed:
            return soon, True
        return (later if soon <= needed - 2 else -1), False
