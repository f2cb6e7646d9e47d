"""Activations while a step runs: each unit's forward is called in its mode.

While a step runs, the units' ``forward`` is replaced, as the modules' parameters are. The module is called as ever, with
its hooks around it, and the unit's mode runs its own forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.activations.call_record import CallRecord
from sp_lightning.activations.forward_state import Elsewhere, first_runs
from sp_lightning.activations.modes import MODES, ModeContext
from sp_lightning.activations.offload import Offload
from sp_lightning.activations.recompute import Rerun
from sp_lightning.activations.recompute_trial import RecomputeTrial
from sp_lightning.activations.unit_call import UnitCall
from sp_lightning.activations.unit_forward import UnitForward
from sp_lightning.device.device import Device
from sp_lightning.device.torch_private import current_graph_task, forward_mode_level, interpreter_stack, tree_leaves
from sp_lightning.plan.activation_policy import Call, Mode
from sp_lightning.store.host_ring import HostRing


class Activations:
    """The modes of a module's units, carried out.

    Args:
        module: the root.
        units: the units by name.
        modes: the mode of each unit.
        rows: the row of each unit in the timeline.
        device: the device that activations are on.
        ring: the host memory for what is offloaded.
        stays: the addresses of storages that never leave the device. The set may grow later; the addresses of buffers
            are added here.
        rerun: a context for a unit's second run, called with its name and its positional arguments.
        elsewhere: says what was done to weights outside of a unit.
        log: where warnings go; None for Lightning's log.

    Attributes:
        modes: the mode of each unit now; :meth:`choose` changes it.
        trial: finds out which units could be recomputed.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Mapping[str, nn.Module],
        modes: Mapping[str, Mode],
        rows: Mapping[str, int],
        device: Device,
        ring: HostRing,
        stays: set[int],
        rerun: Rerun,
        elsewhere: Elsewhere,
        log: logging.Logger | None = None,
    ) -> None:
        stays |= {buffer.untyped_storage().data_ptr() for buffer in module.buffers() if buffer.layout is torch.strided}
        volatile: dict[str, set[str]] = {}
        self.offload = Offload(device, ring, stays, log)
        self.ring = ring
        self.choose(modes)
        self.trial = RecomputeTrial(volatile, elsewhere)
        self._record = CallRecord(len(units))
        context = ModeContext(self.offload, self._record, self.trial, rerun, volatile, elsewhere, device.empty(0))
        self._by_name = {name: mode(context) for name, mode in MODES.items()}
        self._rows = rows
        self._units = units
        self._installed: list[UnitForward] = []

    @property
    def calls(self) -> tuple[Call, ...]:
        """The unit calls of the last step's forward. If it ran several, those of the one that saved the most bytes."""
        return self._record.calls

    def choose(self, modes: Mapping[str, Mode]) -> None:
        """Takes other modes, for the calls from now on. To be called between two steps."""
        self.modes = dict(modes)
        self.idle = all(mode == "keep" for mode in modes.values())
        """Whether every unit keeps what it saves, so that nothing is to be done."""

    def begin(self) -> None:
        """A training step begins."""
        if not self.idle:
            self._record.begin_step()
            self.install()

    def install(self) -> None:
        """Replaces the units' forwards."""
        if not self.idle and not self._installed:
            self._installed = [UnitForward(name, unit, self.call) for name, unit in self._units.items()]
            for unit in self._installed:
                unit.install()

    def remove(self) -> None:
        """Gives the units their own forwards back."""
        for unit in self._installed:
            unit.remove()
        self._installed = []

    def flush(self) -> None:
        """A step or its backward is over: afterwards nothing is on its way."""
        if not self.idle:
            self._record.end_forward()
            self.trial.backward_ended()
            self.offload.flush()

    # ------------------------------------------------------------------ one call

    def call(self, unit: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a unit's forward in its mode."""
        if _is_transformed():
            return forward(*args, **kwargs)
        first_runs.call(unit, self._units[unit])
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        mode = self._by_name[self.modes[unit]]
        if current_graph_task() != -1:
            # A checkpoint of the user's around the unit runs it again in backward, which needs at once what is saved.
            again = UnitCall(unit, self._units[unit], self._rows[unit], at_once=True)
            return mode.run(again, forward, args, kwargs)
        call, outer = self.enter(unit, tree_leaves((args, kwargs)))
        output = None
        try:
            output = mode.run(call, forward, args, kwargs)
        finally:
            self.leave(call, outer, output)
        return output

    def enter(self, unit: str, given: Iterable[Any]) -> tuple[UnitCall, UnitCall | None]:
        """A unit is called, with these tensors among others. Returns the call, and the call inside which it is made."""
        call = self._record.add(unit, self._units[unit], self._rows[unit])
        return call, self.offload.enter(call, given)

    def leave(self, call: UnitCall, outer: UnitCall | None, output: Any) -> None:
        """The unit has returned, or raised, and then ``output`` is None."""
        self.offload.leave(outer)
        pre_backward = partial(self._pre_backward, call)
        for tensor in (output,) if isinstance(output, Tensor) else tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(pre_backward)

    def _pre_backward(self, call: UnitCall, gradient: Tensor) -> None:
        self._record.begin_backward()
        self.offload.pre_backward(call)


def _is_transformed() -> bool:
    """Whether ``torch.vmap`` or forward-mode differentiation runs, which checkpoints cannot repeat."""
    return interpreter_stack() is not None or forward_mode_level() >= 0
