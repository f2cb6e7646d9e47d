"""The states of a layer: does it have a copy in device memory, and who may use the copy?

The diagram of the transitions is in :mod:`sp_lightning.core.engine`. ``tests/support/states.py`` has it as a table, with the
methods that make each transition. Tests compare every assignment of :attr:`StreamedLayer.state` with the table.

Three facts are not part of the state, because they are independent of it: the number of module calls that use the layer
(``running_calls``), the rows that are in the slot (``rows.complete``), and writes of the host's weights since the fetch
(``stale``, ``slot.stale``).
"""

from __future__ import annotations

import enum


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
    VIEWED = "viewed", False, False
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


HOST, FETCHED, VIEWED = LayerState.HOST, LayerState.FETCHED, LayerState.VIEWED
UNPACKED, IN_USE, RESTING = LayerState.UNPACKED, LayerState.IN_USE, LayerState.RESTING
