"""Hooks on modules, by which the engine knows when a module that uses layers is called and when it returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from sp_lightning.device.modes import never_compiled
from sp_lightning.weights.expert_rows import ExpertRows
from sp_lightning.weights.layer import StreamedLayer

Visits = Sequence[StreamedLayer]


class Listener(Protocol):
    """Is told of calls of modules."""

    def enter(self, visits: Visits, inputs: Any) -> Visits:
        """Called before a module that uses these layers. Returns the layers that :meth:`leave` is to get."""

    def leave(self, visits: Visits, output: Any) -> None:
        """Called after the module has returned, or has raised (``output`` is then None)."""


class _Calls(threading.local):
    """The calls of a thread that are running, the innermost last.

    Of each its hooks, its experts and what ``enter`` has returned. The latter two are None if ``begin_call`` or ``enter`` has
    raised: torch calls the hook after such a call as well, and there is nothing to end, or to leave.
    """

    def __init__(self) -> None:
        self.running: list[tuple[ModuleHooks, ExpertRows | None, Visits | None]] = []


class ModuleHooks:
    """The hooks of one module. They ignore every other module.

    Attributes:
        experts: the rows of the module's stacked experts, which see what each call is routed to; None if it has none.
    """

    def __init__(self, listener: Listener, module: nn.Module, visits: Visits, calls: _Calls) -> None:
        self._listener = listener
        self._module = module
        self._visits = visits
        self._calls = calls
        self.experts = next((layer.rows for layer in visits if isinstance(layer.rows, ExpertRows)), None)

    @never_compiled  # transfers cannot be part of a compiled graph
    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Forward pre-hook. One that is registered to see keyword arguments has its listener see both."""
        if module is self._module:
            experts: ExpertRows | None = None
            visits: Visits | None = None
            try:
                if self.experts is not None:
                    self.experts.begin_call(module, args, kwargs)
                experts = self.experts
                visits = self._listener.enter(self._visits, args if kwargs is None else (args, kwargs))
            finally:
                self._calls.running.append((self, experts, visits))

    @never_compiled
    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook. It is called after an exception as well, but for Ctrl-C and the like."""
        if module is not self._module:
            return
        running = self._calls.running
        at = len(running) - 1
        while at >= 0 and running[at][0] is not self:
            at -= 1
        if at < 0:  # a hook before ours has raised
            return
        ended = running[at:]
        del running[at:]
        # Usually one; calls inside this one that have ended in Ctrl-C come first.
        for hooks, experts, visits in reversed(ended):
            if experts is not None:
                experts.end_call()
            if visits is not None:
                hooks._listener.leave(visits, output if hooks is self else None)


def _ignore(*_: Any) -> None:
    """What a pickled module has in place of a hook."""


class Hook(partial[None]):
    """A method of :class:`ModuleHooks`, as its module holds it. A copy of the module is a plain module, without it."""

    handle: RemovableHandle

    @property
    def __name__(self) -> str:
        """TorchScript, which compiles hooks, asks for their names."""
        hooks = self.func.__self__  # type: ignore[attr-defined]
        name = hooks._visits[0].name if hooks._visits else type(hooks._module).__name__
        raise AttributeError(
            f"torch.jit.script was called during a run for {name!r}, which the run streams. Script a deep copy, "
            "torch.jit.script(copy.deepcopy(module)), or the module after the run."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        if (copied := memo.get(id(self.handle.hooks_dict_ref()))) is not None:
            leaves = _Leaves(copied, self.handle.id)
            memo[id(leaves)] = leaves
        return self

    def __reduce__(self) -> Any:
        return partial, (_ignore,)


class _Leaves:
    """Takes a hook out of a copy's hooks when ``copy.deepcopy`` drops its memo: then the copy is whole."""

    def __init__(self, hooks: dict[int, Any], key: int) -> None:
        self._hooks, self._key = hooks, key

    def __del__(self) -> None:
        self._hooks.pop(self._key, None)


def hook_on(register: Callable[..., RemovableHandle], method: Callable[..., None], **options: bool) -> RemovableHandle:
    """Registers a method of a module's hooks in one of the module's ways: ``module.register_forward_hook``, say."""
    hook = Hook(method)
    hook.handle = register(hook, **options)
    return hook.handle


def attach_module_hooks(
    listener: Listener, visits: dict[nn.Module, tuple[StreamedLayer, ...]]
) -> list[RemovableHandle]:
    """Attaches hooks to every module. They run before all other pre-hooks, and after all other hooks.

    ``nn.TransformerEncoderLayer`` leaves its fast path if a module has hooks, which changes the last bits in evaluation.
    If there is one among the modules, the hooks are therefore global ones, which it does not see.
    """
    calls = _Calls()
    hooks_of: dict[nn.Module, ModuleHooks] = {}
    for module, used in visits.items():
        if isinstance(module, nn.TransformerEncoder) and len(module.layers) and module.layers[0] in visits:
            # It reads the weights of its first layer to choose its path, before it calls that layer.
            used = tuple(sorted({*used, *visits[module.layers[0]]}, key=lambda layer: layer.index))
        hooks_of[module] = ModuleHooks(listener, module, used, calls)
    fast_path = any(isinstance(module, nn.TransformerEncoderLayer) for root in visits for module in root.modules())
    handles = []
    for module, hooks in hooks_of.items():
        if hooks.experts is not None or not fast_path:
            routed = hooks.experts is not None
            handles.append(hook_on(module.register_forward_pre_hook, hooks.before, prepend=True, with_kwargs=routed))
            handles.append(hook_on(module.register_forward_hook, hooks.after, always_call=True))
    if fast_path:

        def dispatch(method: str) -> Callable[..., None]:
            def hook(module: nn.Module, *args: Any) -> None:
                hooks = hooks_of.get(module)
                if hooks is not None and hooks.experts is None:
                    getattr(hooks, method)(module, *args)

            return hook

        handles.append(register_module_forward_pre_hook(dispatch("before")))
        handles.append(register_module_forward_hook(dispatch("after"), always_call=True))
    return handles
