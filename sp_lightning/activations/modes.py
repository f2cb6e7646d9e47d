"""The modes of activations: what becomes of what autograd saves in a unit's forward.

A mode is an object that runs the forward of one call. :data:`MODES` has the class of each mode by the name that users
give to ``activations=``. Nothing else knows which modes there are, except
:mod:`~sp_lightning.plan.activation_policy`, which has their names and the memory that they take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from sp_lightning.activations.call_record import CallRecord
from sp_lightning.activations.forward_state import Elsewhere
from sp_lightning.activations.offload import Offload
from sp_lightning.activations.recompute import Rerun, is_checkpointed, run_recomputed
from sp_lightning.activations.recompute_trial import RecomputeTrial
from sp_lightning.activations.unit_call import UnitCall


@dataclass(frozen=True)
class ModeContext:
    """What modes work with.

    Attributes:
        offload: stores saved tensors on the host.
        record: the calls of the last step.
        trial: finds out which units could be recomputed.
        rerun: a context for the second run of a unit's forward.
        volatile: by unit, the buffers whose values change in a forward.
        elsewhere: says what was done to weights outside of a unit.
        anchor: an empty tensor on the device.
    """

    offload: Offload
    record: CallRecord
    trial: RecomputeTrial
    rerun: Rerun
    volatile: dict[str, set[str]]
    elsewhere: Elsewhere
    anchor: Tensor


class ActivationMode(Protocol):
    """One way to treat what autograd saves in a unit's forward."""

    def __init__(self, context: ModeContext) -> None: ...

    def run(self, call: UnitCall, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a unit's forward once, and returns its output.

        It is called inside the hooks that autograd saves tensors with. With ``call.leaves``, they store what is saved on
        the host.

        Args:
            call: the call that this is.
            forward: the unit's own forward.
            args, kwargs: its arguments.
        """


class KeepMode:
    """What is saved stays on the device."""

    def __init__(self, context: ModeContext) -> None:
        self._trial = context.trial

    def run(self, call: UnitCall, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """As :meth:`ActivationMode.run`."""
        return self._trial.run(call, forward, args, kwargs) if self._trial.active else forward(*args, **kwargs)


class RecomputeMode:
    """What is saved is given up, and computed again in backward from the unit's inputs.

    A checkpoint of the user's around the unit does just that, and shows twice what the forward changes.
    """

    def __init__(self, context: ModeContext) -> None:
        self._context = context
        self._keep = KeepMode(context)

    def run(self, call: UnitCall, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """As :meth:`ActivationMode.run`."""
        if is_checkpointed():
            return self._keep.run(call, forward, args, kwargs)
        of = self._context
        return run_recomputed(
            call,
            forward,
            args,
            kwargs,
            rerun=of.rerun,
            volatile=of.volatile,
            elsewhere=of.elsewhere,
            anchor=of.anchor,
        )


class OffloadMode:
    """What is saved goes to the host and comes back before backward needs it.

    What backward needs at once stays. Where the host has no room for what the unit saved in the last step, the unit is
    recomputed.
    """

    def __init__(self, context: ModeContext) -> None:
        self._keep, self._recompute = KeepMode(context), RecomputeMode(context)
        self._offload, self._record = context.offload, context.record

    def run(self, call: UnitCall, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """As :meth:`ActivationMode.run`."""
        if not call.at_once:
            if any(saved > self._offload.ring.free_bytes for saved in self._record.saved_by(call.unit)):
                self._offload.warn(call.unit, "are computed again in backward")
                return self._recompute.run(call, forward, args, kwargs)
            call.leaves = True
        return self._keep.run(call, forward, args, kwargs)


MODES: dict[str, type[ActivationMode]] = {"keep": KeepMode, "recompute": RecomputeMode, "offload": OffloadMode}
"""The class of each mode, by its name."""
