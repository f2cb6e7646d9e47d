"""Which units could be recomputed: that is found out while their forwards run as usual."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from sp_lightning.activations.forward_state import Elsewhere, ForwardState, Unrepeatable, first_runs
from sp_lightning.activations.unit_call import UnitCall
from sp_lightning.device.torch_private import tree_leaves


class RecomputeTrial:
    """Looks at forwards that run once, and at what is written between them and the end of backward.

    Args:
        volatile: by unit, the buffers whose values change; what is learned is added.
        elsewhere: says what was done to weights outside of a unit.
    """

    def __init__(self, volatile: dict[str, set[str]], elsewhere: Elsewhere) -> None:
        self._volatile = volatile
        self._elsewhere = elsewhere
        self._unfit: dict[str, str] | None = None
        self._watched: list[tuple[str, ForwardState]] = []

    @property
    def active(self) -> bool:
        """Whether forwards are looked at now."""
        return self._unfit is not None

    def begin(self) -> None:
        """Looks at all forwards from now on."""
        self._unfit = {}

    def end(self) -> dict[str, str]:
        """Looks at none from now on. Returns the units that could not be recomputed, and why."""
        unfit, self._unfit = self._unfit or {}, None
        return unfit

    def run(self, call: UnitCall, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a unit's forward and looks at what it changes."""
        assert self._unfit is not None
        state = None
        try:
            state = ForwardState(call.unit, call.module, tree_leaves((args, kwargs)), self._volatile, self._elsewhere)
        except Exception as error:  # an object of the user's may raise anything when it is looked at
            self._unfit[call.unit] = str(error)
        done = self._elsewhere(call.unit)
        with nullcontext() if state is None else first_runs.of(state):
            output = forward(*args, **kwargs)
        try:
            if state is not None:
                state.forward_ended()
                state.refuse(done())
                state.drop_values()
                self._watched.append((call.unit, state))
        except Unrepeatable as error:
            self._unfit[call.unit] = str(error)
        return output

    def backward_ended(self) -> None:
        """Looks at what was written since the forwards, which a second forward in backward could not put back."""
        watched, self._watched = self._watched, []
        if self._unfit is not None:
            for unit, state in watched:
                try:
                    state.check()
                except Unrepeatable as error:
                    self._unfit[unit] = str(error)
