"""Prepares the engine for every optimizer's step in this process, with torch's hooks on optimizers.

These hooks also see steps that Lightning does not call: steps of optimizers that user code makes, for example in a callback.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from time import perf_counter
from types import FunctionType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sp_lightning.core.device.lease import shared
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.model.wrapped import move
from sp_lightning.core.torch_compat.modes import never_compiled
from sp_lightning.core.torch_compat.patched import Patch, attributes_of, order_new_state, state_of
from sp_lightning.core.torch_compat.private import (
    has_global_step_hooks,
    remove_global_step_hooks,
    run_first_after_step,
)
from sp_lightning.core.updates.background import updates_here
from sp_lightning.core.updates.fused import OF_EACH, divide, runs_fused, settings_on_cpu
from sp_lightning.core.updates.layerwise import LayerwiseStep
from sp_lightning.core.updates.updating import Updating
from sp_lightning.core.weights.device_parameter import DeviceParameter
from sp_lightning.registry import is_declared
from sp_lightning.trainer.user_hooks import calls_closure_first

_ONE_CLASS_PAGE = "examples/guide/updates.md#optimizers-that-are-heavy-on-the-cpu"
_WRAPPED_BY = "wrapped_by"
"""The attribute of a wrapped closure: the :class:`StepHooks` that wrapped it."""


class StepHooks:
    """Prepares a run's engine before an optimizer writes weights, notifies it afterwards, and makes groups fused meanwhile.

    User code runs between the beginning of a step and the optimizer's own code: hooks of the optimizer, and the closure, from
    which Lightning also calls ``on_before_optimizer_step``. Weights that this code writes on the device are copied to the host
    before the optimizer writes the host's weights. A later copy would overwrite the update.

    Just before the optimizer's own code, either groups are divided by place, and get ``fused=True``, or all groups are removed,
    because the background thread updates their layers (see "Note: empty groups" in ``updates/__init__``). Only the optimizer's
    own code sees the changed groups. The order of a step:

    1. :meth:`before`, a hook on all optimizers: prepares the engine, wraps the closure, and registers two hooks on this optimizer
    2. the user's hooks before the step
    3. ``_enter``, the last hook: prepares the engine again. If there is no closure, changes the groups
    4. the closure, if there is one. After it, prepares the engine again and changes the groups
    5. the optimizer's own code
    6. :meth:`give_back_groups`, the first hook after the step
    7. the user's hooks after the step
    8. :meth:`after`, a hook on all optimizers

    If the step certainly calls its closure before other code, :meth:`before` does not prepare the engine, and there is no
    ``_enter``: the engine is prepared after the closure.

    Args:
        engine: returns the engine of the run, which may be built anew; None once the run is over.
        module: the run's module.
        fuse: returns True for an optimizer whose groups run fused if the user has set neither ``fused`` nor ``foreach``.
        refuse_other: raises an error for an optimizer that must not step the run's weights; None if each optimizer may.

    Attributes:
        deferring: the optimizer whose running step only submits updates, with the object that submits them; None if no such step
            runs. ``OptimizerSteps.run`` sets it.
    """

    def __init__(
        self,
        engine: Callable[[], Engine | None],
        module: nn.Module,
        fuse: Callable[[Optimizer], bool],
        refuse_other: Callable[[Optimizer], None] | None = None,
    ) -> None:
        self._engine_or_none = engine
        self._module = module
        self._fuse = fuse
        self._refuse_other = refuse_other
        self.deferring: tuple[Optimizer, LayerwiseStep] | None = None
        self._begun = 0.0  # the time at which the running step began, or continued after its closure
        self._in_closure: Optimizer | None = None  # the optimizer whose closure runs, called by torch's step
        self._stepping: list[Optimizer] = []  # the optimizers whose steps are running, the innermost last
        self._changed: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Groups that have other settings during a step, with the user's values of these settings."""
        self._divided: list[tuple[Optimizer, list[dict[str, Any]], set[Any], Sequence[Tensor] | None]] = []
        """Optimizers whose groups are divided by place while they step, with their user's groups, the keys of their state, and
        the states of random generators if only a declaration says that the step may be divided."""
        self._hooks_of: dict[Optimizer, list[RemovableHandle]] = {}  # hooks on single optimizers, while they step

    @property
    def _engine(self) -> Engine:
        engine = self._engine_or_none()
        assert engine is not None
        return engine

    def open(self) -> None:
        """Registers torch's hooks on the steps of all optimizers, if other code has removed them."""
        _of_process.add(self)

    def close(self) -> None:
        """Removes all hooks of this run, and restores the user's groups. May be called twice."""
        _of_process.remove(self)
        for handles in self._hooks_of.values():
            for handle in handles:
                handle.remove()
        self.give_back_groups()

    def _is_elsewhere(self, optimizer: Optimizer) -> bool:
        """Returns True if a step belongs to another run, or this run is over. torch's hooks see the steps of all threads."""
        engine = self._engine_or_none()
        if engine is None:
            return True
        if threading.get_ident() == engine.threads.main:
            return False
        # In all other threads, only the optimizer's weights tell which run the step belongs to.
        return not any(_is_ours(p, engine) for p in _parameters(optimizer))

    def _layerwise(self, optimizer: Optimizer) -> LayerwiseStep | None:
        """Returns the object that submits the updates of an optimizer's running step; None if torch's code does the step."""
        return self.deferring[1] if self.deferring is not None and optimizer is self.deferring[0] else None

    def steps_on_device(self, optimizer: Optimizer) -> bool:
        """Returns True if this run is running a step of the optimizer, and the run's layers step on the GPU."""
        return self._layerwise(optimizer) is not None and self._engine.stepper.steps_all

    # ------------------------------------------------------------------ before the optimizer's own code

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Runs before the optimizer's own hooks: see the first point in the docstring of the class.

        No-op for a layer's update in the background, and for a step of another run.

        Returns:
            The positional and the keyword arguments of the step, with a wrapped closure; None if they are unchanged.

        Raises:
            RuntimeError: with ``optimizer_on="gpu"``, the GPU cannot run the step.
        """
        if updates_here() or self._is_elsewhere(optimizer):
            return None
        # An optimizer may call the step of another one that it wraps.
        if self._refuse_other and not self._stepping and any(_is_ours(p, self._engine) for p in _parameters(optimizer)):
            self._refuse_other(optimizer)
        if self._engine.stepper.steps_all:
            self._refuse_without_gpu(optimizer, args, kwargs)
        self._stepping.append(optimizer)
        self._remove_hooks(optimizer)  # hooks of an earlier step that raised an error
        afterwards = optimizer.register_step_post_hook(self.give_back_groups)
        run_first_after_step(optimizer, afterwards)  # so that the user's hooks after the step find the user's groups
        self._hooks_of[optimizer] = [afterwards]
        if not (_has_closure(args, kwargs) and calls_closure_first(optimizer)):
            self._prepare(optimizer)
            # Registered now, so that it runs after the user's hooks.
            self._hooks_of[optimizer].append(optimizer.register_step_pre_hook(self._enter))
        args = (optimizer, *(self._wrap_closure(optimizer, each) for each in args[1:]))
        return args, {name: self._wrap_closure(optimizer, each) for name, each in kwargs.items()}

    def _enter(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Runs after the user's hooks before the step: prepares the engine again. Without a closure, changes the groups."""
        if updates_here():
            return
        # The user's hooks may have written weights on the device.
        self._prepare(optimizer)
        # With a closure, groups change after it: it computes gradients, and may use the groups.
        if not _has_closure(args, kwargs):
            self._change_groups(optimizer)

    def _wrap_closure(self, optimizer: Optimizer, argument: Any) -> Any:
        """Returns an argument unchanged if it is not callable. Otherwise returns a closure around it.

        The closure first continues a manual step, then calls the argument. Afterwards it prepares the engine for the optimizer's
        own code, and changes the groups.
        """
        if not callable(argument):
            return argument

        def closure(*args: Any, **kwargs: Any) -> Any:
            self._engine.updating.resume()
            outer = self._in_closure
            self._in_closure = optimizer
            try:
                result = argument(*args, **kwargs)
            finally:
                self._in_closure = outer
            self._prepare(optimizer)
            self._change_groups(optimizer, lambda: result)
            return result

        vars(closure)[_WRAPPED_BY] = self
        return closure

    def prepare_after_closure(self, optimizer: Optimizer) -> None:
        """Prepares the engine between the closure's backward and Lightning's hooks that follow, which may read weights.

        No-op if torch's step of the optimizer is not calling its closure.
        """
        if optimizer is self._in_closure:
            self._prepare(optimizer)

    def _refuse_without_gpu(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Checks, if all layers step on the GPU, that the GPU can run a step that is about to begin.

        Raises:
            RuntimeError: the GPU cannot run the step: the optimizer is not the trainer's, the step has unknown arguments, or it
                calls another step.
        """
        name = type(optimizer).__name__
        layerwise = self._layerwise(optimizer)
        what = ""
        # The closures of `_wrap_closure` are plain functions, and have a mark. Other callables may have no attributes.
        closures = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, FunctionType)]
        if layerwise is None:
            layer_of = self._engine.updating.layer_of
            module = type(self._module).__name__
            ours = any(layer_of(p) is not None for group in optimizer.param_groups for p in group["params"])
            # Another run, inside of this one, may train the same weights, and may step them on the GPU itself.
            if ours and not any(each.steps_on_device(optimizer) for each in _of_process.runs):
                what = (
                    f"{name} is not what {module}.configure_optimizers has returned, and would step its weights on the CPU; "
                    f"one class can do both ({_ONE_CLASS_PAGE})"
                )
        # A closure that this run has wrapped already was passed on by another step, which is still running.
        elif layerwise.submitted or any(vars(each).get(_WRAPPED_BY) is self for each in closures):
            what = f"{name}.step calls another step, super().step(), that torch's hooks see: what follows runs twice"
        elif (more := kwargs.keys() - {"closure"}) or len(args) > 2:
            what = f"{name}.step was given {', '.join(map(repr, more)) or 'more than a closure'}"
        if what:
            raise RuntimeError(f'optimizer_on="gpu": {what}. Leave optimizer_on out: then the CPU steps.')

    def _prepare(self, optimizer: Optimizer) -> None:
        """Prepares the engine for a step: copies weights that user code has written on the device to the host.

        Also replaces device parameters in the optimizer by host parameters. If torch's code will do the step, waits for updates.
        Called again after each piece of user code that runs before the optimizer's own code: the step's time counts from the
        last call.
        """
        hold_host_parameters(optimizer, self._engine.updating)
        parameters = _parameters(optimizer)
        self._engine.updating.before(deferred=self._layerwise(optimizer) is not None, parameters=parameters)
        self._begun = perf_counter()

    def _change_groups(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Submits the step's updates to the background, and removes the groups. If that is not possible, makes groups fused.

        Args:
            optimizer: the optimizer, whose own code runs next.
            closure: returns the result of the step's closure; None if the step has no closure.
        """
        layerwise = self._layerwise(optimizer)
        if layerwise is not None and layerwise.submit(closure):
            self._begun = perf_counter()  # the device may compute meanwhile
            return
        self._engine.owners.begin_whole(optimizer, partial(self._engine.updating.step_of, optimizer))
        stay = self._engine.found.on_gpu
        self._divide_by_place(optimizer, stay)
        if self._fuse(optimizer):
            for group in [each for each in optimizer.param_groups if not stay.intersection(each["params"])]:
                if not group.get("fused") and runs_fused(optimizer, group, fuse=True):
                    self._change(group, {"fused": True})
        for group in optimizer.param_groups:
            if group.get("fused") and (on_cpu := settings_on_cpu(group)) and any(p.is_cpu for p in group["params"]):
                self._change(group, on_cpu)

    def _divide_by_place(self, optimizer: Optimizer, stay: frozenset[nn.Parameter]) -> None:
        """Divides the groups with parameters in both places: those that stay on the GPU, and all others.

        torch's step of the one then runs fused on the CPU, and the other in the form that it has on plain Lightning. Groups that
        stay are stepped first: the GPU runs their kernels while the CPU steps the others.
        """
        parts = [(group, divide(group, stay)) for group in optimizer.param_groups]
        if any(here["params"] and there["params"] for _, (here, there) in parts):
            random = self._engine.device.random_states() if is_declared(optimizer) else None
            self._divided.append((optimizer, optimizer.param_groups, set(state_of(optimizer)), random))
            divided = [each for group, both in parts for each in (both if all(p["params"] for p in both) else (group,))]
            optimizer.param_groups = sorted(divided, key=lambda group: stay.isdisjoint(group["params"]))

    def _change(self, group: dict[str, Any], settings: dict[str, Any]) -> None:
        """Changes settings of a group until the step is over."""
        self._changed.append((group, {name: group[name] for name in settings}))
        group.update(settings)

    # ------------------------------------------------------------------ after the optimizer's own code

    def give_back_groups(self, *hooked: Any) -> None:
        """Restores the user's groups. Called when a step is over or has failed.

        Args:
            hooked: the arguments of torch's hooks, if torch calls this after a step.

        Raises:
            RuntimeError: a step whose groups were divided by place has written settings of them, or has drawn random numbers.
        """
        if updates_here():
            return
        for group, settings in reversed(self._changed):
            group.update(settings)
        self._changed.clear()
        if (engine := self._engine_or_none()) is not None:
            engine.owners.end_whole(well=bool(hooked))
        for optimizer, groups, known, random in reversed(self._divided):
            parts, optimizer.param_groups, state = optimizer.param_groups, groups, state_of(optimizer)
            what = "writes settings of them" if any(map(_writes, parts, _of_parts(parts, groups))) else ""
            if random is not None and not all(map(torch.equal, random, self._engine.device.random_states())):
                what = "draws random numbers, in another order then"
            if hooked and what:
                raise RuntimeError(
                    f"gpu_layers divides param_groups by place, but {type(optimizer).__name__}.step {what}. "
                    "Leave gpu_layers out, or give each place param_groups of its own."
                )
            order_new_state(state, _parameters(optimizer), known)
        self._divided.clear()
        if self.deferring is not None:
            self.deferring[1].give_back_groups()

    def after(self, optimizer: Optimizer) -> None:
        """Runs after the optimizer's own hooks after a step. Adds the step's time, and marks copies on the device as out of date.

        From now on, uploads read the new weights.
        """
        if updates_here() or self._is_elsewhere(optimizer):
            return
        self._remove_hooks(optimizer)
        engine = self._engine
        now = perf_counter()
        if not engine.device.computes_on_host:
            engine.device.stats.step_seconds += now - self._begun
        self._begun = now  # this step may run inside another step, whose time is measured from here
        while self._stepping and self._stepping.pop() is not optimizer:
            pass  # a step inside this step has raised an error, and torch calls no hook after an error
        # True if the own code of another step has called this step (not its closure): the other step still writes weights.
        is_part_of_another = self._stepping and self._stepping[-1] is not self._in_closure
        engine.invalidate(goes_on=not is_part_of_another)

    def forget_running_steps(self) -> None:
        """Empties the list of running steps. Called when no step is running.

        A step that raised an error is still in the list, because torch calls no hook after it.
        """
        self._stepping.clear()

    def _remove_hooks(self, optimizer: Optimizer) -> None:
        for handle in self._hooks_of.pop(optimizer, ()):
            handle.remove()


class _OfProcess:
    """torch's hooks on the steps of all optimizers: one pair of hooks for all runs of the process.

    torch iterates over its hooks while it calls them. So the registered hooks must not change when a run in another thread begins
    or ends.

    Attributes:
        runs: the hooks of all runs. If a run begins inside another run, the hooks of both are called.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saving = Patch(Optimizer, "state_dict", self._save)
        self.runs: tuple[StepHooks, ...] = ()  # never changed in place, because another thread may iterate over it

    def add(self, hooks: StepHooks) -> None:
        """Adds the hooks of a run. Registers the pair of hooks in torch, if it is not registered."""
        with self._lock:
            self._saving.install()
            if not has_global_step_hooks(self._before, self._after):
                # Other code may have removed only one of the two: the other one must not be registered twice.
                remove_global_step_hooks(self._before, self._after)
                register_optimizer_step_pre_hook(self._before)
                register_optimizer_step_post_hook(self._after)
            if hooks not in self.runs:
                self.runs = (*self.runs, hooks)

    def remove(self, hooks: StepHooks) -> None:
        """Removes the hooks of a run. After the last run, removes the pair of hooks from torch."""
        with self._lock:
            self.runs = tuple(each for each in self.runs if each is not hooks)
            if not self.runs:
                self._saving.remove()
                remove_global_step_hooks(self._before, self._after)

    @never_compiled  # the step may be called inside a compiled module
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        changed = None  # torch takes None as "arguments unchanged"
        for hooks in self.runs:
            if (found := hooks.before(optimizer, args, kwargs)) is not None:
                changed = args, kwargs = found
        return changed

    @never_compiled
    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        for hooks in self.runs:
            hooks.after(optimizer)

    def _save(self, own: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Runs torch's ``Optimizer.state_dict``, which user code may call in a step."""
        hold_host_parameters(optimizer)
        return own(optimizer, *args, **kwargs)


_of_process = _OfProcess()


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Returns True if the arguments of a step, of which the first is the optimizer, include a closure."""
    return any(map(callable, (*args[1:], *kwargs.values())))


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _of_parts(parts: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the group of which each part is a part, or which it is."""
    of = {p: group for group in groups for p in group["params"]}
    return (of[part["params"][0]] if part["params"] else part for part in parts)


def _writes(part: dict[str, Any], group: dict[str, Any]) -> bool:
    """Returns True if a part of a group has other settings than the group."""
    return any(part.get(key) is not group.get(key) for key in part.keys() | group.keys() if key not in OF_EACH)


def hold_host_parameters(optimizer: Optimizer, updating: Updating | None = None) -> None:
    """Replaces device parameters by host parameters, in an optimizer that user code has made or changed within a step.

    A dictionary finds a host parameter by its device parameter. But torch's ``state_dict`` and other code go by identity.

    Args:
        optimizer: the optimizer.
        updating: the engine. State that user code has made on the device is moved to the host, where the optimizer steps. None to
            leave it there.

    Raises:
        RuntimeError: other tensors share the memory of such state. They would not see what the optimizer writes.
    """
    for group in optimizer.param_groups:
        if _device_parameters(group["params"]):
            group["params"] = [p.host if _is_device_parameter(p) else p for p in group["params"]]
    for parameter in _device_parameters(dict.keys(_state(optimizer))):
        state = optimizer.state  # waits for updates in the background
        dict.__setitem__(state, parameter.host, dict.pop(state, parameter))
    if updating is not None:
        _move_state(optimizer, updating)


def _state(optimizer: Optimizer) -> dict[Any, Any]:
    """Returns an optimizer's state, without waiting for updates; an empty dictionary if the optimizer has no such dictionary."""
    state = state_of(optimizer) if hasattr(type(optimizer), "state") else attributes_of(optimizer).get("state")
    return state if isinstance(state, dict) else {}


def _move_state(optimizer: Optimizer, updating: Updating) -> None:
    """Moves state of streamed weights from the device to the host. Each tensor is the same object, which user code may hold."""
    device = updating.engine.device
    # A copy, because the background may make state meanwhile.
    for parameter, values in [] if device.computes_on_host else list(dict.items(_state(optimizer))):
        name = updating.name_of(parameter)
        for key, each in values.items() if name is not None and isinstance(values, dict) else ():
            if not isinstance(each, Tensor) or not device.has(each):
                continue
            _ = optimizer.state  # waits for updates in the background
            if shared(each):
                raise RuntimeError(
                    f"optimizer.state of {name!r} was given a tensor {key!r} on the GPU, and other tensors share its memory. The "
                    "optimizer steps on the CPU, so they would not see what it writes. Put a tensor with memory of its own "
                    "there: value.clone()."
                )
            move(each, device.on_host)


def _device_parameters(parameters: Iterable[Any]) -> list[DeviceParameter]:
    parameters = [*parameters]  # at once, because the background may make state meanwhile
    kinds = {*map(type, parameters)}  # few classes; one issubclass() call per weight would take longer
    return [*filter(_is_device_parameter, parameters)] if any(issubclass(k, DeviceParameter) for k in kinds) else []


def _is_ours(parameter: Any, engine: Engine) -> bool:
    """Returns True if a parameter, of the host or the device, belongs to a layer of this engine."""
    return engine.updating.layer_of(getattr(parameter, "host", parameter)) is not None


def _is_device_parameter(key: Any) -> TypeGuard[DeviceParameter]:
    return issubclass(type(key), DeviceParameter)
