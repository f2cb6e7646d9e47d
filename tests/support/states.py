"""Compares every change of a layer's state with the table of transitions."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from sp_lightning.core.weights.layer import StreamedLayer
from sp_lightning.core.weights.states import FETCHED, HOST, IN_USE, RESTING, UNPACKED, VIEWED, LayerState


class Transition(NamedTuple):
    """A change of a layer's state.

    Attributes:
        methods: the names of the methods that make the transition. No other method does.
        pairs: pairs of the layer's states before and after the transition.
    """

    methods: frozenset[str]
    pairs: frozenset[tuple[LayerState, LayerState]]


def _transition(methods: str, *pairs: tuple[LayerState, LayerState]) -> Transition:
    return Transition(frozenset(methods.split()), frozenset(pairs))


TRANSITIONS: Mapping[str, Transition] = {
    # A transfer to a slot was issued: before the call that needs the layer, or because a call needs the layer now. If the slot is
    # viewed and the host's weights were written, the layer is fetched again into the same slot, because views must show
    # the writes.
    "fetch": _transition("Slots._send Slots.forget_dropped", (HOST, FETCHED), (VIEWED, FETCHED)),
    # The slot is given to another layer, or is freed, or its values are out of date.
    "evict": _transition("StreamedLayer.evict", (FETCHED, HOST), (VIEWED, HOST)),
    # Compute waits for the transfer. Until `release` no other layer may overwrite the slot.
    "lock": _transition("Slots.lock", (FETCHED, UNPACKED), (VIEWED, UNPACKED)),
    # A module call begins: its modules compute with the slot's memory.
    "attach": _transition("Residency.begin_call", (UNPACKED, IN_USE), (RESTING, IN_USE)),
    # The last module call has returned, in inference, and every layer of the ring has a slot of its own.
    "rest": _transition("Residency._leave", (IN_USE, RESTING)),
    # No module call and no backward uses the layer any more. If the layer has left its slot during the use, because the slot's
    # values are out of date, the layer is HOST afterwards.
    "release": _transition(
        "Slots.release", *((used, after) for used in (UNPACKED, IN_USE, RESTING) for after in (FETCHED, VIEWED, HOST))
    ),
    # The last tensor that viewed the slot is dropped, and writes through that tensor were copied back to the host.
    "drop views": _transition("Slots.forget_dropped", (VIEWED, FETCHED)),
}
"""All transitions, by their names in the diagram."""

Change = tuple[str, LayerState, LayerState]
"""The name of the method that has made it, and the states before and after."""

ALLOWED: frozenset[Change] = frozenset(
    (method.split(".")[1], *pair) for each in TRANSITIONS.values() for method in each.methods for pair in each.pairs
)


class _Checked:
    """In place of :attr:`StreamedLayer.state`: raises an AssertionError for a change that the table does not have."""

    def __init__(self, seen: set[Change]) -> None:
        self._seen = seen

    def __get__(self, layer: Any, owner: Any = None) -> Any:
        return self if layer is None else layer.__dict__["state"]

    def __set__(self, layer: Any, state: LayerState) -> None:
        before = layer.__dict__.get("state", state)
        layer.__dict__["state"] = state
        if before is not state:
            change = sys._getframe(1).f_code.co_name, before, state
            self._seen.add(change)
            assert change in ALLOWED, f"{change[0]} changes the state of {layer.name!r} from {before} to {state}"


seen: set[Change] = set()
"""The changes that this process has seen."""


@contextmanager
def checked_states() -> Iterator[set[Change]]:
    """A context in which each change is checked. Yields those that were made in it."""
    outer = vars(StreamedLayer).get("state")
    found: set[Change] = set()
    StreamedLayer.state = _Checked(found)  # type: ignore[assignment]
    try:
        yield found
    finally:
        seen.update(found)
        if outer is None:
            delattr(StreamedLayer, "state")
        else:
            StreamedLayer.state = outer
