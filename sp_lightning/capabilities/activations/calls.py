"""Runs the forward of each unit in its mode.

The module is called as usual, with its hooks. The mode applies to the forward inside that call.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.capabilities.activations.headroom import Headroom
from sp_lightning.capabilities.activations.host_ring import HostRing
from sp_lightning.capabilities.activations.offload import Offload, UnitCall, WeightsOnDevice
from sp_lightning.capabilities.activations.policy import EXEMPT, Call, resolve, some, summary
from sp_lightning.capabilities.activations.recompute import Again, Recompute, is_checkpointed, running
from sp_lightning.core.engine.activations import ActivationPlan, Activations, KeepAll, SavedActivation
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.messages import say_once
from sp_lightning.core.model.found import Found
from sp_lightning.core.model.wrapped import parts
from sp_lightning.core.plan.choices import ActivationChoice, Modes
from sp_lightning.core.torch_compat.modes import never_compiled
from sp_lightning.core.torch_compat.private import (
    COMPILED_CALL,
    current_graph_task,
    forward_mode_level,
    interpreter_stack,
    trace_only_inlined,
    tree_leaves,
)
from sp_lightning.core.weights.layer import Kind, StreamedLayer


def plan_activations(choice: ActivationChoice, module: nn.Module, found: Found) -> ActivationPlan:
    """Resolves ``activations=`` at set-up. Returns the plan from which the engine makes its :class:`UnitModes`.

    Args:
        choice: ``activations=``.
        module: the root.
        found: the root's layers and units.

    Raises:
        ValueError: a pattern in ``choice`` decides nothing.
    """
    modes = resolve(choice, module, found.units)
    automatic = choice == "auto"
    changed = any(mode != "keep" for mode in modes.values())

    def make(engine: Engine) -> Activations:
        log = engine.log or logging.getLogger("lightning.pytorch.superpipeline")
        if changed:
            log.debug("Superpipeline: activations: %s.", summary(modes))
            if engine.found.grouping_advice:
                say_once(log, f"Superpipeline: {engine.found.grouping_advice}")
        return UnitModes(engine, modes)

    return ActivationPlan(
        make if changed or automatic else KeepAll, "recompute" in modes.values(), evicts=automatic, automatic=automatic
    )


class UnitModes:
    """Carries out the mode of each unit: the engine's :class:`~sp_lightning.core.engine.activations.Activations`.

    Args:
        engine: the engine.
        modes: the mode of each unit.

    Attributes:
        calls: the unit calls of the last step's forward. If it ran several forwards, those of the forward that saved the most.
        ring: the host memory for offloaded activations.
        offload: stores saved tensors on the host.
        recompute: runs forwards again in backward.
        headroom: offloads kept activations before device memory ends; None in batches that are known to fit.
        evicted: the names of the layers in whose calls headroom has offloaded activations.
    """

    def __init__(self, engine: Engine, modes: Modes) -> None:
        self._log = engine.log or logging.getLogger("lightning.pytorch.superpipeline")
        self._module = engine.module
        self._units = engine.found.units
        self._on_gpu = engine.found.on_gpu
        self._residents = [layer.parameters for layer in engine.layers if layer.kind is Kind.RESIDENTS]
        rows = {layer.name: layer.index for layer in engine.layers if layer.kind is Kind.BLOCK}
        self._rows = {name: rows.get(name, engine.layers[-1].index) for name in self._units}  # in timelines
        self.ring = HostRing(engine.device, pin=engine.pin, limit=None)
        self.offload = Offload(engine, self.ring)
        self.recompute = Recompute(engine)
        self.headroom: Headroom | None = None
        self.evicted: set[str] = set()
        self._evicts = False  # True after the eviction was logged
        self._modes = dict(modes)  # those of the user
        self.idle = all(mode == "keep" for mode in modes.values())
        self._offloads = "offload" in modes.values()
        self.calls: tuple[Call, ...] = ()
        self._installed = False
        self._forward: list[UnitCall] = []  # the calls of the running forward
        self._in_backward = False  # True if that forward's backward has begun
        self._counts: list[int] = []  # the number of calls of each forward of this step
        self._expected = [len(self._units)]  # the same of the last step; before it, each unit is expected once

    def watch_memory(self, left: Callable[[Callable[[], int]], int], reserve: Callable[[], int]) -> None:
        """Offloads the oldest activations from now on before device memory ends. :class:`Headroom` describes the arguments."""
        if self.headroom is None:
            self.headroom = Headroom(self.offload, left, reserve, self.evicted)

    @property
    def modes(self) -> Modes:
        """The mode of each unit. If activations of a kept unit were offloaded because memory was full, this is ``"offload"``."""
        return self._modes | dict.fromkeys(self._evicted_units, "offload")

    @property
    def _evicted_units(self) -> list[str]:
        """The units of which activations were offloaded because memory was full. An expert in a unit is a layer of its own."""
        return [
            unit for unit in self._units if any(f"{layer}.".startswith(f"{unit}.") for layer in self.evicted if unit)
        ]

    # ------------------------------------------------------------------ for the engine

    @property
    def packs(self) -> bool:
        """True if a saved tensor may be offloaded."""
        return self._offloads or self.headroom is not None

    @property
    def store(self) -> Callable[[Tensor], SavedActivation | None] | None:
        """Offloads a saved tensor, or may offload it later; None if all units keep their activations in any case."""
        return None if self.idle and self.headroom is None else self._store

    @property
    def make_room(self) -> Callable[[Sequence[StreamedLayer], Any], None] | None:
        """Offloads activations if device memory may be too small for the next call; None if it is known to suffice."""
        return None if self.headroom is None else self._make_room

    def limit_host_memory(self, nbytes: int | None) -> None:
        """Sets how many bytes of host memory activations may take; None for no limit."""
        self.ring.limit = nbytes

    def begin(self) -> None:
        """Called when a training step begins. From now on units run in their modes."""
        if self.headroom is not None:
            self.headroom.begin()
        if not self.idle or self.headroom is not None:
            stay = (part for each in self._on_gpu for _, part in parts("", each))
            on_device = (each for each in (*self._module.buffers(), *stay) if each.layout is torch.strided)
            self.offload.buffers = {
                each.untyped_storage().data_ptr() for each in on_device
            }  # user code may replace one
            self.offload.weights = WeightsOnDevice(
                [*self._on_gpu, *(p for group in self._residents for p in group.all)]
            )
        if not self.idle:
            self._expected, self._counts = self._counts or self._expected, []
            self._forward, self._in_backward = [], False
            self.recompute.begin()
            self.install()

    def install(self) -> None:
        """Runs units' forwards in their modes from now on."""
        self._installed = not self.idle

    def remove(self) -> None:
        """Runs units' forwards without modes from now on."""
        self._installed = False

    def flush(self) -> None:
        """Called when a step or a backward has ended: no copy is in flight afterwards."""
        if not self.idle:
            self._end_forward()
            self.recompute.forget()
        if not self.idle or self.headroom is not None:
            self.offload.flush()
        if self.evicted and not self._evicts:
            self._evicts = True
            self._log.info(
                "Superpipeline: GPU memory is full, so the oldest activations are offloaded to CPU memory (so far those of %s). "
                'activations="recompute", or the checkpointing of the model itself, may be faster.',
                some(self._evicted_units),
            )

    def close(self) -> None:
        """Frees memory at the end of the run."""
        self.offload.close()

    # ------------------------------------------------------------------ saved tensors

    def _make_room(self, layers: Sequence[StreamedLayer], inputs: Any) -> None:
        if self.headroom is not None and torch.is_grad_enabled():
            shapes = (span.shape for layer in layers for span in (*layer.planned.spans, *layer.planned.casts))
            self.headroom.before(layers[0].planned.name, layers[0].index, shapes, inputs)

    def _store(self, tensor: Tensor) -> SavedActivation | None:
        if self.offload.active and (stored := self.offload.store(tensor)) is not None:
            return stored
        return None if self.headroom is None else self.headroom.keep(tensor)

    # ------------------------------------------------------------------ one call

    @trace_only_inlined
    def run(self, unit: str, call: Callable[..., Any], again: Again, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls a unit's module, and runs the forward inside that call in the unit's mode.

        ``module.forward`` is read in each call: user code may have replaced it, or the module's class.
        """
        if not self._installed:
            return call(module, *args, **kwargs)
        if getattr(module, COMPILED_CALL, None) is not None:
            # A compiled call cannot be opened, so all of it runs in the mode, hooks included.
            return self.call(unit, again, partial(call, module), args, kwargs)
        if isinstance(vars(module).get("forward"), UnitForward):
            # Another call of the module has not reached its forward yet: a pre-hook calls the module.
            # The forward that is installed then runs both forwards in the mode.
            return call(module, *args, **kwargs)
        forward = UnitForward(module, partial(self.call, unit, again))
        try:
            forward.install()
            return call(module, *args, **kwargs)
        finally:
            forward.close()

    @never_compiled  # a compiled graph must not contain the engine
    def call(self, unit: str, again: Again, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a unit's forward in its mode."""
        if interpreter_stack() is not None or forward_mode_level() >= 0:
            return forward(*args, **kwargs)  # checkpoints cannot repeat torch.func and forward-mode differentiation
        if outer_calls := running():  # what the unit saves belongs to the recomputed unit that calls it
            for outer_call in outer_calls:
                outer_call.add(unit, self._units[unit])
            return forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if current_graph_task() != -1:
            # The user's own checkpoint around the unit repeats the unit's forward in backward. Backward needs the new activations
            # at once, so they are not offloaded.
            return self._run(UnitCall(unit, self._rows[unit], at_once=True), again, forward, args, kwargs)
        call = self._begin_call(unit)
        outer = self.offload.enter(call, tree_leaves((args, kwargs)))
        output = None
        try:
            output = self._run(call, again, forward, args, kwargs)
        finally:
            self.offload.leave(outer)
            pre_backward = partial(self._pre_backward, call)
            for tensor in (output,) if isinstance(output, Tensor) else tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(pre_backward)
        return output

    def _run(self, call: UnitCall, again: Again, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a forward in the mode of its unit, inside the engine's saved-tensor hooks.

        If the host has no room for a unit's activations, they stay on the device.
        """
        unit, mode = call.unit, self._modes[call.unit]
        if mode == "offload" and not call.at_once:
            room = self.ring.free_bytes  # compared with the bytes that the last step's calls of the unit have saved
            call.offloads = all(each.moved <= room for each in self.calls if each.unit == unit)
            if not call.offloads:
                self.offload.warn(unit)
        # The user's own checkpoint around a unit runs the unit again. With a second checkpoint the unit would run three times.
        if mode == "recompute" and not is_checkpointed():
            return self.recompute.run(unit, self._units[unit], again, forward, args, kwargs)
        return forward(*args, **kwargs)

    def _pre_backward(self, call: UnitCall, gradient: Tensor) -> None:
        self._in_backward = True
        self.offload.pre_backward(call)

    # ------------------------------------------------------------------ the calls of a forward

    def _begin_call(self, unit: str) -> UnitCall:
        """Adds a call to the running forward.

        The last :data:`EXEMPT` calls of a forward keep their activations on the device (``at_once``), because its backward begins
        with them. The last step shows how many calls the forward will have.
        """
        if self._in_backward:  # the calls so far belong to an earlier forward of this step
            self._end_forward()
            self._in_backward = False
        # The number of calls of the forward with the same number in the last step, or of its last forward if there were fewer.
        expected = self._expected[min(len(self._counts), len(self._expected) - 1)]
        at_once = expected - EXEMPT <= len(self._forward) < expected
        previous = self._forward[-1] if self._forward else None
        self._forward.append(UnitCall(unit, self._rows[unit], previous, at_once))
        return self._forward[-1]

    def _end_forward(self) -> None:
        """Records the calls of a forward. Called when a unit is called after the forward's backward, or the step has ended."""
        if self._forward:
            calls = tuple(Call(call.unit, call.saved, call.inputs) for call in self._forward)
            if not self._counts or sum(call.saved for call in calls) > sum(call.saved for call in self.calls):
                self.calls = calls
            self._counts.append(len(self._forward))
            self._forward = []


class UnitForward:
    """Replaces ``module.forward`` from the beginning of a module's call until its forward begins.

    The user's pre-hooks run between the two. torch reads ``module.forward`` before it runs pre-hooks, and the mode must not
    include them.

    Args:
        module: the module.
        call: called with the module's own forward and the arguments that pre-hooks have returned.
    """

    def __init__(self, module: nn.Module, call: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
        self._call: Callable[[Callable[..., Any], Any, Any], Any] | None = call
        self._module = module
        self._own: Any = vars(module).get("forward")  # an attribute of the instance; usually None
        self._forward: Callable[..., Any] = module.forward

    def install(self) -> None:
        """Replaces the module's forward."""
        vars(self._module)["forward"] = self

    def remove(self) -> None:
        """Restores the module's own forward."""
        attributes = vars(self._module)
        if attributes.get("forward") is self:  # a hook may have replaced it
            if self._own is None:
                del attributes["forward"]
            else:
                attributes["forward"] = self._own

    def close(self) -> None:
        """Called after the call. A hook may have kept this object, so it runs the module's own forward from now on."""
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
        # A hook copies the module. The copied forward is bound to the copy, which deepcopy makes before its attributes.
        return copy.deepcopy(self._forward, memo)

    def __reduce__(self) -> Any:
        # A hook pickles the module. The pickle contains the module's own forward, and must not name this package, so `copy.copy`
        # takes the place of a function that returns its argument.
        return (getattr, (self._module, "forward")) if self._own is None else (copy.copy, (self._own,))
