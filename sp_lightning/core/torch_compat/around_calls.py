"""Runs the package's code around calls of modules without a trace in the modules.

It adds no hook and no attribute, and does not change a module's class. Libraries choose their algorithms by a module's hooks and
its ``__dict__`` (``nn.MultiheadAttention``, RF-DETR), and a pickle of a module contains its ``__dict__``. So during a run, a
patch of ``nn.Module.__call__`` looks modules up by their identity.

A call that bypasses ``nn.Module.__call__`` bypasses this code, as it bypasses hooks: ``module.forward(x)``, or a reference to
``nn.Module.__call__`` that was taken before the patch.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from sp_lightning.core.torch_compat.modes import NOT_IN_GRAPHS, warn_of_ended_graphs
from sp_lightning.core.torch_compat.patched import Patch
from sp_lightning.core.torch_compat.private import (
    SCRIPTING,
    comptime,
    first_traced,
    frame_compiler,
    is_compiled,
    set_traced,
    starts_graph_with_hooks,
    trace_only_inlined,
    traces_only_forward,
)

Around = Callable[..., Any]
"""Its arguments: the ``nn.Module.__call__`` that the patch replaced, the module, and the arguments of the call."""

_References = tuple[Callable[[], Around | None], ...]

_around: dict[int, _References] = {}
"""The functions around a module's calls, by the module's ``id``; the outermost is last. The caller of :func:`surround` keeps
the module and the function alive."""
_lock = threading.RLock()  # reentrant: garbage collection may call `_forget` in the thread that holds the lock


class _ModuleCall(Patch):
    """Patches ``nn.Module.__call__``, through which every call of every module in the process goes."""

    def wrap(self, function: Any) -> Any:
        """Returns the wrapper. Dynamo traces through it for other modules, and breaks the graph at a surrounded module."""
        around, ours = self.around, _around

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:  # args[0] is the module: a parameter of its own would cost time
            if is_dynamo_compiling():
                hooks = True
                comptime(_begin_call)
                if not hooks:
                    return args[0].forward(*args[1:], **kwargs)
            elif id(args[0]) in ours:
                return around(function, *args, **kwargs)
            return function(*args, **kwargs)

        def stop() -> None:
            nonlocal ours
            ours = {}

        wrapper: Any = trace_only_inlined(call)
        wrapper.stop = stop
        return wrapper


def _begin_call(context: Any) -> None:
    """Breaks the graph if the module is surrounded. Otherwise lets Dynamo trace only ``forward``, if it would without the patch.

    Runs while Dynamo traces the call. A graph from before the run does not test ``_around`` when it runs again. This test is not
    needed: during a run the weights have other types, and every graph has guards on the types of its weights.

    Since torch 2.14, Dynamo skips ``nn.Module._call_impl`` for modules without hooks. If ``_call_impl`` was traced, graphs would
    have guards on hooks, which they do not have without the patch. So a hook that is added later would take effect only in a run.
    """
    module = first_traced(context, "args")
    if id(module) in _around:
        if not is_compiled(module):
            warn_of_ended_graphs()
        context.graph_break(NOT_IN_GRAPHS)
    if module is not None and traces_only_forward(module):
        set_traced(context, "hooks", False)


@trace_only_inlined
def _run(call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if frame_compiler() is not None and starts_graph_with_hooks(module):
        call = partial(_with_hook, call)
    for reference in _around.get(id(module), ()):
        if (around := reference()) is not None:
            call = partial(around, call)
    return call(module, *args, **kwargs)


@trace_only_inlined
def _with_hook(call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a module with a temporary hook that does nothing.

    With a hook, Dynamo starts a graph inside a torch module after a break at the module's call.
    """
    handle = module.register_forward_hook(_no_hook)
    try:
        return call(module, *args, **kwargs)
    finally:
        handle.remove()


@trace_only_inlined
def _no_hook(*_: Any) -> None: ...


def _refuse_scripted(script: Callable[..., Any], module: nn.Module, *args: Any, **options: Any) -> Any:
    streamed = any(id(child) in _around for child in module.modules())
    if streamed and not options.get("is_tracing"):  # torch.jit.trace is allowed, because it calls the module
        raise RuntimeError(
            f"torch.jit.script was called during a run for {type(module).__name__!r}, which the run streams. Script a deep "
            "copy, torch.jit.script(copy.deepcopy(module)), or the module after the run."
        )
    return script(module, *args, **options)


_patches = (_ModuleCall(nn.Module, "__call__", _run), Patch(*SCRIPTING, _refuse_scripted))


def surround(module: nn.Module, around: Around) -> None:
    """Runs a module's calls through ``around`` until :func:`release`. Keeps only a weak reference to ``around``.

    Installs the patches, which stay until no module is surrounded.
    """
    with _lock:
        key = id(module)
        _around[key] = (*_around.get(key, ()), weakref.ref(around, partial(_forget, key)))
        for patch in _patches:
            patch.install()


def release(module: nn.Module, around: Around) -> None:
    """Ends :func:`surround` for one function. Removes the patches if no module is surrounded any more."""
    with _lock:
        key = id(module)
        _keep(key, tuple(each for each in _around.get(key, ()) if each() is not around))


def _forget(key: int, gone: Callable[[], Around | None]) -> None:
    with _lock:
        _keep(key, tuple(each for each in _around.get(key, ()) if each is not gone))


def _keep(key: int, references: _References) -> None:
    if references:
        _around[key] = references
    else:
        _around.pop(key, None)
    if not _around:
        for patch in _patches:
            patch.remove()
