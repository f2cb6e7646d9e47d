"""Activations while a step runs: each unit's forward is called in its mode.

The module is called as ever, with its hooks around it, and the unit's mode runs its own forward.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.activations.headroom import Headroom
from sp_lightning.activations.host_ring import HostRing
from sp_lightning.activations.offload import Offload, UnitCall
from sp_lightning.activations.policy import EXEMPT, Call, resolve, summary, with_inner_experts
from sp_lightning.activations.recompute import Recompute, first_runs, is_checkpointed
from sp_lightning.engine.activations import ActivationPlan, Activations, ActivationSetup, KeepAll, Saved
from sp_lightning.layers.layer import StreamedLayer
from sp_lightning.model.found import Found
from sp_lightning.observe.messages import say_once
from sp_lightning.plan.choices import ActivationChoice, Modes
from sp_lightning.torch_compat.modes import never_compiled
from sp_lightning.torch_compat.private import (
    COMPILED_CALL,
    current_graph_task,
    forward_mode_level,
    interpreter_stack,
    trace_only_inlined,
    tree_leaves,
)


def plan_activations(choice: ActivationChoice, module: nn.Module, found: Found) -> ActivationPlan:
    """Decides what becomes of activations: the interface of this capability, called at set-up.

    Args:
        choice: ``activations=``.
        module: the root.
        found: its layers and units.

    Raises:
        ValueError: a pattern in ``choice`` decides nothing.
    """
    modes = resolve(choice, module, found.units)
    chooses, changed = choice == "auto", any(mode != "keep" for mode in modes.values())

    def make(setup: ActivationSetup) -> Activations:
        log = setup.log or logging.getLogger("lightning.pytorch.superpipeline")
        if changed:
            log.debug("Superpipeline: activations: %s.", summary(modes))
            if setup.found.grouping_advice:
                say_once(log, f"Superpipeline: {setup.found.grouping_advice}")
        return UnitModes(setup, modes)

    return ActivationPlan(make if changed or chooses else KeepAll, "recompute" in modes.values(), chooses)


class UnitModes:
    """Carries out the mode of each unit: the engine's :class:`~sp_lightning.engine.activations.Activations`.

    Args:
        setup: the parts of the engine.
        modes: the mode of each unit.

    Attributes:
        modes: the mode of each unit now; :meth:`choose` changes it.
        idle: True if every unit keeps its activations.
        calls: the unit calls of the last step's forward. If it ran several, those of the one that saved the most bytes.
        ring: the host memory for offloaded activations.
        offload: stores saved tensors on the host.
        recompute: runs forwards again in backward.
        headroom: offloads kept activations before device memory ends; None in batches that are known to fit.
        with_inner_experts: the units that cannot be computed again because experts in them are layers, with the reason.
        unrepeatable: the units that are never computed again in place of an offload for which the host has no room.
    """

    def __init__(self, setup: ActivationSetup, modes: Modes) -> None:
        self._module = setup.module
        self._units = setup.found.units
        self._set_of_units = frozenset(self._units.values())
        self._rows = setup.rows
        self.ring = HostRing(setup.device, pin=setup.pin, limit=None)
        self.offload = Offload(setup.device, self.ring, setup.stays, setup.log)
        self.recompute = Recompute(setup)
        self.headroom: Headroom | None = None
        self.with_inner_experts = with_inner_experts(setup.found)
        self.unrepeatable: Set[str] = frozenset()
        self.choose(modes)
        self.calls: tuple[Call, ...] = ()
        self._installed = False
        self._forward: list[UnitCall] = []  # the calls of the running forward
        self._in_backward = False  # whether that forward's backward has begun
        self._counts: list[int] = []  # the number of calls of each forward of this step
        self._expected = [len(self._units)]  # the same of the last step

    def choose(self, modes: Modes) -> None:
        """Sets the modes, for all later calls. Called between two steps."""
        self.modes = dict(modes)
        self.idle = all(mode == "keep" for mode in modes.values())
        self._offloads = "offload" in modes.values()

    def watch_memory(self, left: Callable[[Callable[[], int]], int], reserve: int) -> None:
        """Offloads the oldest activations from now on whenever device memory would end; see :class:`Headroom`."""
        self.headroom = Headroom(self.offload, left, reserve)

    @property
    def summary(self) -> str:
        """Which units have which mode, for logs."""
        return summary(self.modes)

    # ------------------------------------------------------------------ for the engine

    @property
    def packs(self) -> bool:
        """True if a saved tensor may be offloaded."""
        return self._offloads or self.headroom is not None

    @property
    def store(self) -> Callable[[Tensor], Saved | None] | None:
        """Offloads a saved tensor, or may do so later; None if all units keep theirs in any case."""
        return None if self.idle and self.headroom is None else self._store

    @property
    def make_room(self) -> Callable[[Sequence[StreamedLayer], Any], None] | None:
        """Offloads activations if device memory may be too small for the next call; None if it is known to suffice."""
        return None if self.headroom is None else self._make_room

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes that were copied to the host, and back."""
        return self.offload.stored_bytes, self.offload.returned_bytes

    def limit_host_memory(self, nbytes: int | None) -> None:
        """Sets how many bytes of host memory activations may take; None for no limit."""
        self.ring.limit = nbytes

    def begin(self) -> None:
        """Called when a training step begins."""
        if self.headroom is not None:
            self.headroom.begin()
        if not self.idle or self.headroom is not None:
            buffers = (each for each in self._module.buffers() if each.layout is torch.strided)
            self.offload.buffers = {each.untyped_storage().data_ptr() for each in buffers}  # user code may exchange one
        if not self.idle:
            self._expected, self._counts = self._counts or self._expected, []
            self._forward, self._in_backward = [], False
            self.install()

    def install(self) -> None:
        """Runs units' forwards in their modes from now on."""
        self._installed = not self.idle

    def remove(self) -> None:
        """Runs units' forwards as they are from now on."""
        self._installed = False

    def flush(self) -> None:
        """Called when a step or a backward has ended: no copy is in flight afterwards."""
        if not self.idle:
            self._end_forward()
            self.recompute.backward_ended()
        if not self.idle or self.headroom is not None:
            self.offload.flush()

    def check(self, *, everything: bool = False) -> None:
        """Raises an error if a forward that ran again has computed other values; see :meth:`Differences.check`."""
        self.recompute.differences.check(everything=everything)

    def first_run(self) -> object | None:
        """Returns an object that lives as long as the running forward of this thread may run again; None if it will not."""
        runs = first_runs()
        return runs[-1] if runs else None

    def close(self) -> None:
        """Frees memory at the end of the run."""
        self.offload.close()

    # ------------------------------------------------------------------ saved tensors

    def _make_room(self, layers: Sequence[StreamedLayer], inputs: Any) -> None:
        if self.headroom is not None and torch.is_grad_enabled():
            shapes = (span.shape for layer in layers for span in (*layer.planned.spans, *layer.planned.casts))
            self.headroom.before(layers[0].planned.name, layers[0].index, shapes, inputs)

    def _store(self, tensor: Tensor) -> Saved | None:
        if self.offload.active and (stored := self.offload.store(tensor)) is not None:
            return stored
        return None if self.headroom is None else self.headroom.keep(tensor)

    # ------------------------------------------------------------------ one call

    @trace_only_inlined
    def run(self, unit: str, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls a unit's module, and runs the forward inside of the call in the unit's mode.

        What the module's forward is, is read anew in each call: user code may have exchanged it, or the module's class.
        """
        if not self._installed:
            return call(module, *args, **kwargs)
        if getattr(module, COMPILED_CALL, None) is not None:
            # Nothing can be put inside of a compiled call, so it runs as a whole in the mode.
            return self.call(unit, partial(call, module), args, kwargs)
        if isinstance(vars(module).get("forward"), UnitForward):
            # Another thread calls the module, or a hook in its call does. What this call saves is kept.
            return call(module, *args, **kwargs)
        forward = UnitForward(module, partial(self.call, unit))
        try:
            forward.install()
            return call(module, *args, **kwargs)
        finally:
            forward.close()

    @never_compiled  # the engine is no part of a graph
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
            if not call.leaves and unit in self.unrepeatable:
                self.offload.warn(unit, "stay on the device")
            elif not call.leaves:
                self.offload.warn(unit, "are computed again in backward")
                mode = "recompute"
        # A checkpoint of the user's around the unit computes it again by itself, and shows twice what the forward changes.
        if mode == "recompute" and not is_checkpointed():
            return self.recompute.run(unit, self._units[unit], partial(self._look_at_others, forward), args, kwargs)
        if self.recompute.in_trial:
            watched = partial(self._look_at_others, forward)
            output, call.in_backward = self.recompute.try_out(unit, self._units[unit], watched, args, kwargs)
            return output
        return forward(*args, **kwargs)

    def _look_at_others(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a forward. In the first run, units that it refers to are looked at: ``other.forward(x)`` is no call."""
        for first in first_runs()[-1:]:
            for name, module in first.before.outside:  # which grows meanwhile
                if module in self._set_of_units:
                    first.before.add(name, module)
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
    """Stands in place of a module's forward from the beginning of a call to that of the forward, and hands it on.

    Between the two, hooks of users run. torch reads ``module.forward`` before them, and code of ours can be inside of hooks
    only there. Another thread that calls the module meanwhile may find it, too: its forward then runs in the mode as well.

    Args:
        module: the module.
        call: takes the module's own forward, and the arguments that hooks leave.
    """

    def __init__(self, module: nn.Module, call: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
        self._call: Callable[[Callable[..., Any], Any, Any], Any] | None = call
        self._module = module
        self._own: Any = vars(module).get("forward")  # what the instance has beside its class
        self._forward: Callable[..., Any] = module.forward

    def install(self) -> None:
        """Takes its place in the module."""
        vars(self._module)["forward"] = self

    def remove(self) -> None:
        """Gives the module its own forward back."""
        attributes = vars(self._module)
        if attributes.get("forward") is self:  # a hook may have exchanged it
            if self._own is None:
                del attributes["forward"]
            else:
                attributes["forward"] = self._own

    def close(self) -> None:
        """The call is over. Code that has kept this object calls the module's own forward from now on."""
        self.remove()
        self._call = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (call := self._call) is None:
            return self._forward(*args, **kwargs)
        self.remove()
        return call(self._forward, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)  # __self__, __code__, …

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._forward  # inspect.signature asks for it

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A hook copies the module: the forward is bound to the copy, which is made before its attributes are.
        return copy.deepcopy(self._forward, memo)

    def __reduce__(self) -> Any:
        return (getattr, (self._module, "forward")) if self._own is None else (copy.copy, (self._own,))
