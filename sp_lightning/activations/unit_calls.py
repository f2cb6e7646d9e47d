"""The calls of units in a step's forwards: what each saved, and which of them come last."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import nn

from sp_lightning.activations.offloaded_storage import OffloadedStorage
from sp_lightning.plan.activation_policy import EXEMPT, Call


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


class CallRecord:
    """Calls in the order in which they are made, forward by forward.

    A forward ends when its backward has begun and a unit is called again, or when the step ends.

    Args:
        expected: how many calls the first forward is expected to have.
    """

    def __init__(self, expected: int) -> None:
        self._running: list[UnitCall] = []  # the calls of the forward under way
        self._backward = False  # whether that forward's backward has begun
        self._counts: list[int] = []  # the calls of each forward of this step
        self._expected: list[int] = [expected]  # the calls of each forward of the last step
        self.calls: tuple[Call, ...] = ()
        """The calls of the last step's forward. If it ran several, those of the one that saved the most bytes."""

    def begin_step(self) -> None:
        """A training step begins."""
        self._expected, self._counts = self._counts or self._expected, []
        self._running, self._backward = [], False

    def begin_backward(self) -> None:
        """The backward of the forward under way has begun."""
        self._backward = True

    def add(self, unit: str, module: nn.Module, row: int) -> UnitCall:
        """A unit is called. ``row`` is its row of the timeline."""
        if self._backward:
            self.end_forward()
            self._backward = False
        previous = self._running[-1] if self._running else None
        call = UnitCall(unit, module, row, previous, at_once=self._is_last())
        self._running.append(call)
        return call

    def _is_last(self) -> bool:
        """Whether the next call is among the last ones of its forward, if that has as many calls as in the last step."""
        expected = self._expected[min(len(self._counts), len(self._expected) - 1)]
        return expected - EXEMPT <= len(self._running) < expected

    def end_forward(self) -> None:
        """Notes what the calls of the forward under way have saved."""
        if self._running:
            calls = tuple(Call(call.unit, call.saved, call.inputs) for call in self._running)
            if not self._counts or sum(call.saved for call in calls) > sum(call.saved for call in self.calls):
                self.calls = calls
            self._counts.append(len(self._running))
            self._running = []

    def saved_by(self, unit: str) -> list[int]:
        """Bytes that each call of a unit saved in the last step's forward; none if that is not known."""
        return [call.saved for call in self.calls if call.unit == unit]
