"""Code of ours around calls of modules, which nothing in the modules shows: no hook, no attribute, no other class.

Libraries choose their algorithms by a module's hooks and by its ``__dict__`` (``nn.MultiheadAttention``, RF-DETR), and a pickle
of a module has what is in there. So a module is found by its identity, in ``nn.Module.__call__``, while a run is active.

A call that does not pass ``nn.Module.__call__`` (``module.forward(x)``, or that function as other code has taken it before)
meets no code of ours, as it meets no hooks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from sp_lightning.torch_compat.modes import NOT_IN_GRAPHS
from sp_lightning.torch_compat.patched import Patch
from sp_lightning.torch_compat.private import (
    SCRIPTING,
    comptime,
    first_traced,
    frame_compiler,
    starts_graph_with_hooks,
    trace_only_inlined,
)

Around = Callable[..., Any]
"""Is called with what ``nn.Module.__call__`` was before, the module, and the arguments of the call."""

_References = tuple[Callable[[], Around | None], ...]

_around: dict[int, _References] = {}
"""By the identity of a module what is around its calls, the outermost last. Who has surrounded a module keeps both alive."""
_lock = threading.RLock()  # garbage collection may forget one while another is added


class _ModuleCall(Patch):
    """Code of ours around ``nn.Module.__call__``, which each call of each module in the process passes."""

    def wrap(self, function: Any) -> Any:
        """Makes the wrapper. Dynamo follows it into calls of other modules; a graph that comes to one of ours ends there."""
        around, ours = self.around, _around

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:  # the module among them: it takes time to take it out
            if is_dynamo_compiling():
                comptime(_end_graph)
            elif id(args[0]) in ours:
                return around(function, *args, **kwargs)
            return function(*args, **kwargs)

        def stop() -> None:
            nonlocal ours
            ours = {}

        wrapper: Any = trace_only_inlined(call)
        wrapper.stop = stop
        return wrapper


def _end_graph(context: Any) -> None:
    """Runs while Dynamo follows a call. Whether a module is ours is no guard: the types of weights tell such graphs apart."""
    if id(first_traced(context, "args")) in _around:
        context.graph_break(NOT_IN_GRAPHS)


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
    """A graph that has ended at one of torch's own modules goes on inside of it if the module has a hook."""
    handle = module.register_forward_hook(_no_hook)
    try:
        return call(module, *args, **kwargs)
    finally:
        handle.remove()


@trace_only_inlined
def _no_hook(*_: Any) -> None: ...


def _refuse_scripted(script: Callable[..., Any], module: nn.Module, *args: Any, **options: Any) -> Any:
    streamed = any(id(child) in _around for child in module.modules())
    if streamed and not options.get("is_tracing"):  # a trace calls the module
        raise RuntimeError(
            f"torch.jit.script was called during a run for {type(module).__name__!r}, which the run streams. Script a deep "
            "copy, torch.jit.script(copy.deepcopy(module)), or the module after the run."
        )
    return script(module, *args, **options)


_patches = (_ModuleCall(nn.Module, "__call__", _run), Patch(*SCRIPTING, _refuse_scripted))


def surround(module: nn.Module, around: Around) -> None:
    """Has ``around`` run a module's calls, until :func:`release`, or until nothing else refers to ``around``."""
    with _lock:
        key = id(module)
        _around[key] = (*_around.get(key, ()), weakref.ref(around, partial(_forget, key)))
        for patch in _patches:
            patch.install()


def release(module: nn.Module, around: Around) -> None:
    """Ends :func:`surround`."""
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
