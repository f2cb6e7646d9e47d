"""Methods in place of a class's own: those that users have put on an optimizer, and those that this package puts on others."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from sp_lightning.torch_compat.cast_gradient import plain
from sp_lightning.torch_compat.private import ENGINE_CALL, leave_frame_out


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
    """While this is active an object has these in place of its class's methods. What it had of its own before comes back.

    A wrapper that user code has put around one of them meanwhile stays, around what was there before.
    """
    own = vars(owner)
    before = {name: own[name] for name in methods if name in own}
    is_over: list[bool] = []
    put = {name: _until(is_over, method, getattr(owner, name, None)) for name, method in methods.items()}
    own.update(put)
    try:
        yield
    finally:
        is_over.append(True)
        for name in [name for name in methods if own.get(name) is put[name]]:
            del own[name]
            own.update({name: before[name]} if name in before else {})


def _until(is_over: list[bool], method: Any, before: Any) -> Any:
    """A method that runs another one once something is over."""
    bound = getattr(method, "__self__", None)
    function = method if bound is None else method.__func__

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if is_over:
            return before(*(args if bound is None else args[1:]), **options)
        return function(*args, **options)

    return call if bound is None else MethodType(call, bound)


_OURS_AND_TORCHS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


# ---------------------------------------------------------------------- calls of autograd's engine that fail
# autograd itself tells of the end of a backward that succeeds alone. What was queued in one that fails it drops, and on an
# accelerator a thread of autograd's own does so, while user code that has caught the error may be in the next forward already.


@dataclass(frozen=True, eq=False)
class _Watcher:
    """Who is told of calls that fail, in which scope it has begun to watch, and in which thread."""

    told: weakref.ref[Any]
    scope: Any
    thread: int


_watchers: tuple[_Watcher, ...] = ()  # exchanged as a whole, because other threads may walk along it
_lock = threading.Lock()
_calling: set[int] = set()
"""The threads in which a call of autograd's engine runs."""
scope: ContextVar[Any] = ContextVar("scope", default=None)
"""Of several runs at once, in threads: whose calls these are. What is hooked is the process's, and is called in all of them."""


def elsewhere(its: Any) -> bool:
    """Whether a call is known to be of another run than one that has begun in this scope. None tells nothing."""
    here = scope.get()
    return here is not None and its is not None and here is not its


class Patch:
    """Code of ours around a function that a module or a class holds under a name, while it is installed.

    Other code may put a wrapper of its own around ours and leave it there for good, or put the function of before back.
    Therefore each installation makes a new wrapper around the present function. One that cannot be taken out, because another
    one is around it, only passes calls on from then on.

    Args:
        owner: holds the function.
        name: its name there.
        around: is called in its place, with the function that it is around and that function's arguments.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner, self._name, self.around = owner, name, around
        self._wrapper: Any = None

    @property
    def installed(self) -> bool:
        """Whether a call of the function runs our code, as far as the outermost function shows."""
        return self._wrapper is not None and getattr(self._owner, self._name) is self._wrapper

    def install(self) -> None:
        """Puts our code around the present function, unless it is the outermost already."""
        if not self.installed:
            self.remove()
            self._wrapper = self.wrap(getattr(self._owner, self._name))
            setattr(self._owner, self._name, self._wrapper)

    def remove(self) -> None:
        """Takes our code out. Does nothing if it is not there."""
        wrapper = self._wrapper
        if wrapper is not None:
            wrapper.stop()
            if getattr(self._owner, self._name) is wrapper:
                setattr(self._owner, self._name, wrapper.__wrapped__)
            self._wrapper = None  # last, so that a call that was interrupted can be repeated

    def wrap(self, function: Any) -> Any:
        """Makes a wrapper around a function. After its ``stop()`` it only passes calls on."""
        around: Callable[..., Any] | None = self.around

        @leave_frame_out
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            ours = around  # another thread may stop it at any time
            return function(*args, **options) if ours is None else ours(function, *args, **options)

        def stop() -> None:
            nonlocal around
            around = None

        wrapper: Any = call
        wrapper.stop = stop
        return wrapper


def watch(watcher: Any) -> None:
    """Tells a :class:`~sp_lightning.engine.backward.Backward` of each call that fails: by ``backward``, ``autograd.grad``, a
    checkpoint, other threads. It is told in the thread of the call, with the graph tasks that were under way when that began.

    A call of another thread is not told if the watcher's own thread is in a call: graph tasks that have begun are that call's."""
    global _watchers
    with _lock:
        _engine_call.install()
        _watchers = (*_others(watcher), _Watcher(weakref.ref(watcher), scope.get(), threading.get_ident()))


def unwatch(watcher: Any) -> None:
    """Ends :func:`watch`. Does nothing if it has ended already."""
    global _watchers
    with _lock:
        _watchers = _others(watcher)
        if not _watchers:
            _engine_call.remove()


def _others(watcher: Any) -> tuple[_Watcher, ...]:
    return tuple(each for each in _watchers if each.told() not in (None, watcher))


def _tell_of_failure(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    before = [
        (told, each.thread, list(told.tasks))
        for each in _watchers
        if (told := each.told()) is not None and not elsewhere(each.scope)
    ]
    here = threading.get_ident()
    outermost = here not in _calling
    _calling.add(here)
    try:
        return plain(call(*args, **options))
    except BaseException:
        for told, thread, tasks in before:
            if thread == here or thread not in _calling:
                told.failed(tasks)
        raise
    finally:
        if outermost:
            _calling.discard(here)


_engine_call = Patch(*ENGINE_CALL, _tell_of_failure)
