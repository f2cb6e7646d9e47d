"""Activations while a step runs: each unit's forward is called in its mode.

While a step runs, the units' ``forward`` is replaced, as the modules' parameters are. The module is called as ever, with
its hooks around it, and the unit's mode runs its own forward.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.activations.forward_state import OutsideWatch, first_runs
from sp_lightning.activations.offload import Offload
from sp_lightning.activations.recompute import Recompute, Rerun, is_checkpointed
from sp_lightning.activations.unit_calls import CallRecord, UnitCall
from sp_lightning.device.device import Device
from sp_lightning.device.modes import never_compiled
from sp_lightning.device.torch_private import (
    COMPILED_CALL,
    current_graph_task,
    forward_mode_level,
    interpreter_stack,
    tree_leaves,
)
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
        outside: says what was done to weights outside of a unit.
        log: where warnings go; None for Lightning's log.

    Attributes:
        modes: the mode of each unit now; :meth:`choose` changes it.
        offload: stores saved tensors on the host.
        recompute: runs forwards again in backward.
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
        outside: OutsideWatch,
        log: logging.Logger | None = None,
    ) -> None:
        stays |= {buffer.untyped_storage().data_ptr() for buffer in module.buffers() if buffer.layout is torch.strided}
        self.offload = Offload(device, ring, stays, log)
        self.ring = ring
        self.choose(modes)
        self.recompute = Recompute(rerun, outside, device.empty(0))
        self._record = CallRecord(len(units))
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
            self.recompute.backward_ended()
            self.offload.flush()

    # ------------------------------------------------------------------ one call

    def call(self, unit: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a unit's forward in its mode."""
        if _is_transformed():
            return forward(*args, **kwargs)
        for running in first_runs():
            running.calls(unit, self._units[unit])
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        run = MODES[self.modes[unit]]
        if current_graph_task() != -1:
            # A checkpoint of the user's around the unit runs it again in backward, which needs at once what is saved.
            again = UnitCall(unit, self._units[unit], self._rows[unit], at_once=True)
            return run(self, again, forward, args, kwargs)
        call = self._record.add(unit, self._units[unit], self._rows[unit])
        outer = self.offload.enter(call, tree_leaves((args, kwargs)))
        output = None
        try:
            output = run(self, call, forward, args, kwargs)
        finally:
            self.offload.leave(outer)
            pre_backward = partial(self._pre_backward, call)
            for tensor in (output,) if isinstance(output, Tensor) else tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(pre_backward)
        return output

    def _pre_backward(self, call: UnitCall, gradient: Tensor) -> None:
        self._record.begin_backward()
        self.offload.pre_backward(call)

    # ------------------------------------------------------------------ the modes

    def run_kept(self, call: UnitCall, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What is saved stays on the device."""
        if self.recompute.in_trial:
            return self.recompute.try_out(call, forward, args, kwargs)
        return forward(*args, **kwargs)

    def run_recomputed(self, call: UnitCall, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What is saved is given up, and computed again in backward from the unit's inputs.

        A checkpoint of the user's around the unit does just that, and shows twice what the forward changes.
        """
        return (self.run_kept if is_checkpointed() else self.recompute.run)(call, forward, args, kwargs)

    def run_offloaded(self, call: UnitCall, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What is saved goes to the host and comes back before backward needs it.

        What backward needs at once stays. Where the host has no room for what the unit saved in the last step, the unit is
        recomputed.
        """
        if not call.at_once:
            if any(saved > self.ring.free_bytes for saved in self._record.saved_by(call.unit)):
                self.offload.warn(call.unit, "are computed again in backward")
                return self.run_recomputed(call, forward, args, kwargs)
            call.leaves = True
        return self.run_kept(call, forward, args, kwargs)


MODES: dict[str, Callable[[Activations, UnitCall, Callable[..., Any], Any, Any], Any]] = {
    "keep": Activations.run_kept,
    "recompute": Activations.run_recomputed,
    "offload": Activations.run_offloaded,
}
"""What runs a call's forward once and returns its output, by the name that users give to ``activations=``. It is called
inside the hooks that autograd saves tensors with; with ``call.leaves``, they store on the host what is saved."""


def _is_transformed() -> bool:
    """Whether ``torch.vmap`` or forward-mode differentiation runs, which checkpoints cannot repeat."""
    return interpreter_stack() is not None or forward_mode_level() >= 0


class UnitForward:
    """Stands in place of a module's forward, and hands each call on.

    A deep copy of the module that is made meanwhile has a forward of its own. So has a module that is unpickled. A shallow copy
    has this object among its attributes (learn2learn's ``clone_module`` copies a module's ``__dict__`` and exchanges the
    weights in it); this object then runs the forward of the copy, and hands nothing on.

    Args:
        name: the unit's name.
        module: the unit.
        call: takes the name, the module's own forward, and the arguments of a call.
    """

    def __init__(self, name: str, module: nn.Module, call: Callable[[str, Callable[..., Any], Any, Any], Any]) -> None:
        self._call: Callable[[str, Callable[..., Any], Any, Any], Any] | None = call
        self._name = name
        self.__self__ = module
        # Nothing can be put inside a compiled call, so it is replaced as a whole.
        self._attribute = "forward" if getattr(module, COMPILED_CALL, None) is None else COMPILED_CALL
        attributes = vars(module)
        self._own: Any = attributes.get(self._attribute)  # what the instance had under this name, beside its class
        self._forward: Callable[..., Any] = getattr(module, self._attribute)
        self.__func__ = getattr(self._forward, "__func__", self._forward)
        functools.update_wrapper(self, self._forward)

    def install(self) -> None:
        """Takes its place in the module."""
        vars(self.__self__)[self._attribute] = self

    def remove(self) -> None:
        """Gives the module its own forward back. Whoever has kept this object calls that forward from now on."""
        self._call = None
        attributes = vars(self.__self__)
        if attributes.get(self._attribute) is self:
            if self._own is None:
                del attributes[self._attribute]
            else:
                attributes[self._attribute] = self._own

    @never_compiled  # the engine is no part of a graph
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        called = self._called()
        if called is not self.__self__ and self._own is None:
            return self.__func__(called, *args, **kwargs)
        if called is not self.__self__ or self._call is None:
            return self._forward(*args, **kwargs)
        return self._call(self._name, self._forward, args, kwargs)

    def _called(self) -> nn.Module:
        """The module whose forward this is in the running call.

        Nothing hands it over: an attribute of an instance is not bound to it, and a hook on the module would take
        ``nn.TransformerEncoderLayer`` off its fast path. So it is read from the frame of ``nn.Module.__call__``, which is the
        second one from here, or a little further if something is being compiled.
        """
        frame = sys._getframe(2)
        for _ in range(4):
            if frame.f_globals is vars(nn.modules.module):
                called = frame.f_locals["self"]
                return called if vars(called).get(self._attribute) is self else self.__self__
            if frame.f_back is None:
                break
            frame = frame.f_back
        return self.__self__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The forward is bound to the copy of the module, which is made before its attributes are.
        return copy.deepcopy(self._forward, memo)

    def __reduce__(self) -> Any:
        return (getattr, (self.__self__, "forward")) if self._own is None else (_identity, (self._own,))


def _identity(value: Any) -> Any:
    return value
