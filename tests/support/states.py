"""Compares every change of a layer's state with the table of transitions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sp_lightning.core.layers.layer import StreamedLayer
from sp_lightning.core.layers.states import TRANSITIONS, LayerState

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
