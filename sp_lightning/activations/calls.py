"""Activations while a step runs: each unit's forward is called in its mode.

While a step runs, the units' ``forward`` is replaced, as the modules' parameters are. The module is called as ever, with
its hooks around it, and the unit's mode runs its own forward.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.activations.fingerprints import WeightAt
from sp_lightning.activations.offload import Offload, UnitCall
from sp_lightning.activations.recompute import OutsideWatch, Recompute, Rerun, first_runs, is_checkpointed
from sp_lightning.device.device import Device
from sp_lightning.device.host_memory import HostRing
from sp_lightning.device.modes import never_compiled
from sp_lightning.device.torch_private import (
    COMPILED_CALL,
    current_graph_task,
    forward_mode_level,
    interpreter_stack,
    tree_leaves,
)
from sp_lightning.plan.activation_policy import EXEMPT, Call, Mode


class Activations:
    """The modes of a module's units, carried out.

    Args:
        module: the root.
        units: the units by name.
        modes: the mode of each unit.
        rows: the row of each unit in the timeline.
        device: the device that activations are on.
        ring: the host memory for what is offloaded.
        stays: the addresses of storages that never leave the device, but for those of buffers. The set may grow later.
        rerun: a context for a unit's second run, called with its name and its positional arguments.
        outside: says what was done to weights outside of a unit.
        weight_at: says which weights lie on the device.
        log: where warnings go; None for Lightning's log.

    Attributes:
        modes: the mode of each unit now; :meth:`choose` changes it.
        idle: whether every unit keeps what it saves, so that nothing is to be done.
        calls: the unit calls of the last step's forward. If it ran several, those of the one that saved the most bytes.
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
        stays: Set[int],
        rerun: Rerun,
        outside: OutsideWatch,
        weight_at: WeightAt,
        log: logging.Logger | None = None,
    ) -> None:
        self._module = module
        self.ring = ring
        self.offload = Offload(device, ring, stays, log)
        self.recompute = Recompute(rerun, outside, weight_at, device, pin=ring.pin)
        self.choose(modes)
        self.calls: tuple[Call, ...] = ()
        self._rows = rows
        self._units = units
        self._installed: list[UnitForward] = []
        self._forward: list[UnitCall] = []  # the calls of the forward under way
        self._in_backward = False  # whether that forward's backward has begun
        self._counts: list[int] = []  # the calls of each forward of this step
        self._expected = [len(units)]  # the calls of each forward of the last step

    def choose(self, modes: Mapping[str, Mode]) -> None:
        """Takes other modes, for the calls from now on. To be called between two steps."""
        self.modes = dict(modes)
        self.idle = all(mode == "keep" for mode in modes.values())

    def begin(self) -> None:
        """A training step begins."""
        if not self.idle:
            self._expected, self._counts = self._counts or self._expected, []
            self._forward, self._in_backward = [], False
            buffers = (each for each in self._module.buffers() if each.layout is torch.strided)
            self.offload.buffers = {each.untyped_storage().data_ptr() for each in buffers}  # user code may exchange one
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
            self._end_forward()
            self.recompute.backward_ended()
            self.offload.flush()

    # ------------------------------------------------------------------ one call

    def call(self, unit: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a unit's forward in its mode."""
        if interpreter_stack() is not None or forward_mode_level() >= 0:
            return forward(*args, **kwargs)  # checkpoints cannot repeat torch.vmap and forward-mode differentiation
        for first in first_runs():
            first.before.add(unit, self._units[unit])  # its state is put back, too
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if current_graph_task() != -1:
            # A checkpoint of the user's around the unit runs it again in backward, which needs at once what is saved.
            return self._run(UnitCall(unit, self._rows[unit], at_once=True), forward, args, kwargs)
        call = self._begin_call(unit)
        outer = self.offload.enter(call, tree_leaves((args, kwargs)))
        output = None
        try:
            output = self._run(call, forward, args, kwargs)
        finally:
            self.offload.leave(outer)
            pre_backward = partial(self._pre_backward, call)
            for tensor in (output,) if isinstance(output, Tensor) else tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(pre_backward)
        return output

    def _run(self, call: UnitCall, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a forward once, inside the hooks that autograd saves tensors with."""
        unit, mode = call.unit, self.modes[call.unit]
        if mode == "offload" and not call.at_once:
            room = self.ring.free_bytes
            call.leaves = all(each.saved <= room for each in self.calls if each.unit == unit)
            if not call.leaves:
                self.offload.warn(unit, "are computed again in backward")
                mode = "recompute"
        # A checkpoint of the user's around the unit computes it again by itself, and shows twice what the forward changes.
        if mode == "recompute" and not is_checkpointed():
            return self.recompute.run(unit, self._units[unit], forward, args, kwargs)
        if self.recompute.in_trial:
            output, call.in_backward = self.recompute.try_out(unit, self._units[unit], forward, args, kwargs)
            return output
        return forward(*args, **kwargs)

    def _pre_backward(self, call: UnitCall, gradient: Tensor) -> None:
        self._in_backward = True
        self.offload.pre_backward(call)
        if call.in_backward is not None:
            begins, call.in_backward = call.in_backward, None
            begins()

    # ------------------------------------------------------------------ the calls of a forward

    def _begin_call(self, unit: str) -> UnitCall:
        if self._in_backward:
            self._end_forward()
            self._in_backward = False
        # The last calls of the forward, if it has as many as in the last step: backward needs at once what they save.
        expected = self._expected[min(len(self._counts), len(self._expected) - 1)]
        at_once = expected - EXEMPT <= len(self._forward) < expected
        previous = self._forward[-1] if self._forward else None
        self._forward.append(UnitCall(unit, self._rows[unit], previous, at_once))
        return self._forward[-1]

    def _end_forward(self) -> None:
        """Notes what the calls of a forward have saved: a unit is called after its backward has begun, or the step ends."""
        if self._forward:
            calls = tuple(Call(call.unit, call.saved, call.inputs) for call in self._forward)
            if not self._counts or sum(call.saved for call in calls) > sum(call.saved for call in self.calls):
                self.calls = calls
            self._counts.append(len(self._forward))
            self._forward = []


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
        """Gives the module its own forward back. Code that has kept this object calls that forward from now on."""
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
