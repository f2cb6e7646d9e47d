"""The states of a layer: does it have a copy in device memory, and who may use the copy?

The diagram is in :mod:`sp_lightning.core.engine`. :data:`TRANSITIONS` is the same as a table, with the methods that make each
transition. Tests compare every assignment of :attr:`StreamedLayer.state` with it.

Three facts are not part of the state, because they are independent of it: the number of module calls that use the layer
(``running_calls``), the rows that are in the slot (``rows.complete``), and writes of the host's weights since the fetch
(``outdated``, ``slot.stale``).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple


class LayerState(enum.Enum):
    """The state of a layer's copy on the device. Beside the copy, the layer always has memory on the host.

    Attributes:
        locked: True if the slot must not be overwritten, even if no tensor views it.
        attached: True if the layer's device parameters are views of the slot. Otherwise they are stand-ins.
    """

    locked: bool
    attached: bool

    HOST = "host", False, False
    """No device memory. The first use of a weight fetches the layer."""
    FETCHED = "fetched", False, False
    """A copy in a slot: complete after the event ``slot.filled``. Another layer may overwrite it after ``slot.idle``."""
    HELD = "held", False, False
    """As FETCHED, but user code or a graph views the slot. Only new values of the same layer may overwrite the slot."""
    UNPACKED = "unpacked", True, False
    """The slot is locked: autograd reads it, or a module call is about to attach the layer. Device parameters are stand-ins."""
    IN_USE = "in use", True, True
    """The slot is locked, and device parameters are views of it, for module calls. Residents are always in this state."""
    RESTING = "resting", True, True
    """As IN_USE, but no module call uses the layer. Each use of a weight is noticed before it happens."""

    def __init__(self, label: str, locked: bool, attached: bool) -> None:
        self._value_ = label
        self.locked = locked
        self.attached = attached


HOST, FETCHED, HELD = LayerState.HOST, LayerState.FETCHED, LayerState.HELD
UNPACKED, IN_USE, RESTING = LayerState.UNPACKED, LayerState.IN_USE, LayerState.RESTING


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
    "fetch": _transition("Slots._send Slots.forget_dropped", (HOST, FETCHED), (HELD, FETCHED)),
    # The slot is given to another layer, or is freed, or its values are out of date.
    "evict": _transition("StreamedLayer.evict", (FETCHED, HOST), (HELD, HOST)),
    # Compute waits for the transfer. Until `release` no other layer may overwrite the slot.
    "lock": _transition("Slots.lock", (FETCHED, UNPACKED), (HELD, UNPACKED)),
    # A module call begins: its modules compute with the slot's memory.
    "attach": _transition("Residency.begin_call", (UNPACKED, IN_USE), (RESTING, IN_USE)),
    # The last module call has returned, in inference, and every layer of the ring has a slot of its own.
    "rest": _transition("Residency._leave", (IN_USE, RESTING)),
    # No module call and no backward uses the layer any more. If the layer has left its slot during the use, because the slot's
    # values are out of date, the layer is HOST afterwards.
    "release": _transition(
        "Slots.release", *((used, after) for used in (UNPACKED, IN_USE, RESTING) for after in (FETCHED, HELD, HOST))
    ),
    # The last tensor that viewed the slot is dropped, and writes through that tensor were copied back to the host.
    "drop views": _transition("Slots.forget_dropped", (HELD, FETCHED)),
}
"""All transitions, by their names in the diagram."""
