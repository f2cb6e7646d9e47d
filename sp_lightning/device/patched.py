"""Methods in place of a class's own: those that users have put on an optimizer, and those that this package puts on others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from sp_lightning.device.cast_gradient import plain
from sp_lightning.device.torch_private import ENGINE_CALL, leave_frame_out


def own_step(optimizer: Optimizer) -> Callable[..., Any]:
    """An optimizer's step without the hooks around it, and without what schedulers put around it to count its calls."""
    step: Any = vars(optimizer).get("step")
    if not is_patched(optimizer, step):
        step = type(optimizer).step
        while getattr(step, "hooked", False):
            step = step.__wrapped__
        step = MethodType(step, optimizer)
    return step


def state_of(optimizer: Any) -> Any:
    """An optimizer's state by parameter, as it is now: no update that is under way is waited for.

    One that wraps another (Opacus' ``DPOptimizer``, accelerate's) has none of its own, and gives that one's by a property.
    """
    own = vars(optimizer).get("state")  # a property may wait
    return optimizer.state if own is None else own


def is_patched(optimizer: Any, step: Any) -> bool:
    """Whether a step that an optimizer has on the object is other code than its class's, beside what torch puts around that.

    ``functools.wraps`` copies names and attributes, so that the code alone tells.
    """
    function = getattr(step, "__func__", step)
    while function is not None and function is not type(optimizer).step:
        if isinstance(function, partial):
            function = function.func
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(_OURS_AND_TORCHS):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


@contextmanager
def in_place_of(owner: Any, methods: Mapping[str, Any]) -> Iterator[None]:
    """While this is active an object has these in place of its class's methods. What it had of its own before comes back."""
    own = vars(owner)
    before = {name: own[name] for name in methods if name in own}
    own.update(methods)
    try:
        yield
    finally:
        for name in methods:
            own.pop(name, None)
        own.update(before)


_OURS_AND_TORCHS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


# ---------------------------------------------------------------------- calls of autograd's engine that fail
# autograd itself tells of the end of a backward that succeeds alone. What was queued in one that fails it drops, and on an
# accelerator a thread of autograd's own does so, while user code that has caught the error may be in the next forward already.


_watchers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
scope: ContextVar[Any] = ContextVar("scope", default=None)
"""Of several runs at once, in threads: whose calls these are. What is hooked is the process's, and is called in all of them."""


def elsewhere(its: Any) -> bool:
    """Whether a call is known to be of another run than one that has begun in this scope. None tells nothing."""
    here = scope.get()
    return here is not None and its is not None and here is not its


_theirs: Any = getattr(*ENGINE_CALL)


def watch(watcher: Any) -> None:
    """Tells a :class:`~sp_lightning.engine.backward.Backward` of each call that fails: by ``backward``, ``autograd.grad``, a
    checkpoint, other threads. It is told in the thread of the call, with the graph tasks that were under way when that began."""
    global _theirs
    if getattr(*ENGINE_CALL) is not _watched:
        _theirs = getattr(*ENGINE_CALL)
        setattr(*ENGINE_CALL, _watched)
    _watchers[watcher] = scope.get()


def unwatch(watcher: Any) -> None:
    """Ends :func:`watch`. Does nothing if it has ended already."""
    _watchers.pop(watcher, None)
    if not _watchers and getattr(*ENGINE_CALL) is _watched:
        setattr(*ENGINE_CALL, _theirs)


@leave_frame_out
def _watched(*args: Any, **options: Any) -> Any:
    before = [(watcher, list(watcher.tasks)) for watcher, its in list(_watchers.items()) if not elsewhere(its)]
    try:
        return plain(_theirs(*args, **options))
    except BaseException:
        for watcher, tasks in before:
            watcher.failed(tasks)
        raise
