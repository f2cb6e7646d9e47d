"""Activations while a step runs: each unit's forward is called in its mode.

While a step runs the units' ``forward`` is ours, as the modules' parameters are the device's: the module is called as
ever, with its hooks around, and what autograd saves inside is kept, computed again, or sent to the host.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.activations.forward_state import Changes, Unrepeatable
from sp_lightning.activations.offload import Bundle, Offload
from sp_lightning.activations.recompute import recomputed
from sp_lightning.device.device import Device
from sp_lightning.device.torch_private import (
    COMPILED_CALL,
    current_graph_task,
    forward_mode_level,
    interpreter_stack,
    tree_leaves,
)
from sp_lightning.plan.activation_policy import EXEMPT, Call, Mode
from sp_lightning.store.host_ring import HostRing

Again = Callable[[str, Any], AbstractContextManager[None]]


class Activations:
    """The modes of a module's units, carried out.

    Args:
        module: the root.
        units: by name.
        modes: of each unit.
        rows: of each unit in the timeline.
        device: the seam.
        ring: host memory for what is offloaded.
        stays: addresses of storages that never leave the device, now and later; those of buffers are added.
        again: a context for a unit's second run, called with its name and its positional arguments.
        log: where warnings go; None for Lightning's log.
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
        again: Again,
        log: logging.Logger | None = None,
    ) -> None:
        stays |= {buffer.untyped_storage().data_ptr() for buffer in module.buffers() if buffer.layout is torch.strided}
        self.offload = Offload(device, ring, stays, log)
        self.ring = ring
        self.modes = dict(modes)
        self._rows = rows
        self._units = units
        self._again = again
        self._installed: list[UnitForward] = []
        self._running: list[Bundle] = []  # calls of the forward under way, or of the last one
        self._backward = False  # whether that forward's backward has begun
        self._volatile: dict[str, set[str]] = {}  # by unit, the buffers whose values change unseen
        self._anchor = device.empty(0)
        self.unfit: dict[str, str] | None = None
        """While this is a dict, units that could not be recomputed are noted there, and why."""
        self._watched: list[tuple[str, Changes]] = []  # for that
        self._forwards: list[int] = []  # calls of each forward of this step, and of the last one
        self._expected: list[int] = [len(units)]
        self.calls: tuple[Call, ...] = ()
        """Of the forward of the last step; of several, of the one that saves most."""

    @property
    def idle(self) -> bool:
        """Whether all is as without us."""
        return all(mode == "keep" for mode in self.modes.values())

    def begin(self) -> None:
        """A training step begins."""
        if not self.idle:
            self._expected, self._forwards = self._forwards or self._expected, []
            self._running, self._backward = [], False
            self.install()

    def install(self) -> None:
        """The units' forwards are ours."""
        if not self.idle and not self._installed:
            self._installed = [UnitForward(self, name, unit) for name, unit in self._units.items()]

    def remove(self) -> None:
        """They are as they were."""
        for unit in self._installed:
            unit.remove()
        self._installed = []

    def settle(self) -> None:
        """A step or its backward is over: nothing is on its way."""
        if not self.idle:
            self._note_forward()
            self._look_again()
            self.offload.settle()

    # ------------------------------------------------------------------ one call

    def call(self, unit: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A unit's forward, in its mode."""
        if _is_transformed():
            return forward(*args, **kwargs)
        if current_graph_task() != -1:  # a checkpoint around it runs it again, as it was run before
            return self._run(unit, self._first_mode(unit), forward, args, kwargs)
        bundle, outer = self.enter(unit, tree_leaves((args, kwargs)))
        output = None
        try:
            output = self._run(unit, bundle.mode, forward, args, kwargs)
        finally:
            self.leave(bundle, outer, output)
        return output

    def _run(self, unit: str, mode: Mode, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        module = self._units[unit]
        if mode == "recompute":
            return recomputed(unit, module, forward, self._again, self._volatile, self._anchor, args, kwargs)
        if self.unfit is None:
            return forward(*args, **kwargs)
        changes = None
        try:
            changes = Changes(unit, module, tree_leaves((args, kwargs)), self._volatile)
        except Exception as error:  # whatever an object raises that is looked at
            self.unfit[unit] = str(error)
        output = forward(*args, **kwargs)
        try:
            if changes is not None:
                changes.keep()
                changes.let_go()
                self._watched.append((unit, changes))
        except Unrepeatable as error:
            self.unfit[unit] = str(error)
        return output

    def _first_mode(self, unit: str) -> Mode:
        return "recompute" if self.modes[unit] == "recompute" else "keep"

    def enter(self, unit: str, given: Iterable[Any]) -> tuple[Bundle, Bundle | None]:
        """A unit is called, with these tensors among others."""
        if self._backward:  # a new forward
            self._note_forward()
            self._running, self._backward = [], False
        before = self._running[-1] if self._running else None
        bundle = Bundle(unit, self._rows[unit], before, self._mode_now(unit))
        self._running.append(bundle)
        return bundle, self.offload.enter(bundle, given)

    def _mode_now(self, unit: str) -> Mode:
        """A unit's mode, but for the last calls of a forward, which stay, and where the host has no room."""
        mode, at, which = self.modes[unit], len(self._running), len(self._forwards)
        if mode == "offload":
            expected = self._expected[min(which, len(self._expected) - 1)]
            if expected - EXEMPT <= at < expected:
                return "keep"
            if any(call.unit == unit and call.saved > self.ring.room for call in self.calls):
                self.offload.warn(unit, "are computed again in backward")
                return "recompute"
        return mode

    def leave(self, bundle: Bundle, outer: Bundle | None, output: Any) -> None:
        """It has returned, or raised (``output`` is None)."""
        self.offload.leave(outer)
        comes = partial(self._comes_to, bundle)
        for tensor in (output,) if isinstance(output, Tensor) else tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(comes)

    def _comes_to(self, bundle: Bundle, gradient: Tensor) -> None:
        self._backward = True
        self.offload.comes_to(bundle)

    def _note_forward(self) -> None:
        if self._running:
            calls = tuple(Call(each.unit, each.saved, each.inputs) for each in self._running)
            if not self._forwards or sum(each.saved for each in calls) > sum(each.saved for each in self.calls):
                self.calls = calls
            self._forwards.append(len(self._running))
            self._running = []

    def _look_again(self) -> None:
        """What was written between a unit's forward and the end of backward may not be put back."""
        watched, self._watched = self._watched, []
        if self.unfit is not None:
            for unit, changes in watched:
                try:
                    changes.check()
                except Unrepeatable as error:
                    self.unfit[unit] = str(error)


class UnitForward:
    """Stands for a unit's forward while a step runs. A copy of the module that is made then has a forward of its own."""

    def __init__(self, keeper: Activations, name: str, module: nn.Module) -> None:
        self._keeper: Activations | None = keeper
        self._name = name
        self.__self__ = module
        # A compiled call cannot be entered; it is wrapped as a whole.
        self._attribute = "forward" if getattr(module, COMPILED_CALL, None) is None else COMPILED_CALL
        attributes = vars(module)
        self._own: Any = attributes.get(self._attribute)  # what the instance had under this name
        self._forward: Callable[..., Any] = getattr(module, self._attribute)
        self.__func__ = getattr(self._forward, "__func__", self._forward)
        functools.update_wrapper(self, self._forward)
        attributes[self._attribute] = self

    def remove(self) -> None:
        """The module has its own again; whoever has kept this one calls that."""
        self._keeper = None
        attributes = vars(self.__self__)
        if attributes.get(self._attribute) is self:
            if self._own is None:
                del attributes[self._attribute]
            else:
                attributes[self._attribute] = self._own

    @torch.compiler.disable  # the engine is no part of a graph
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._keeper is None or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return self._keeper.call(self._name, self._forward, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._forward, memo)  # bound to the copy, which is made before its attributes are

    def __reduce__(self) -> Any:
        return (getattr, (self.__self__, "forward")) if self._own is None else (_as_it_is, (self._own,))


def _is_transformed() -> bool:
    """Whether ``torch.vmap`` or forward-mode differentiation runs, which checkpoints cannot repeat."""
    return interpreter_stack() is not None or forward_mode_level() >= 0


def _as_it_is(value: Any) -> Any:
    return value
