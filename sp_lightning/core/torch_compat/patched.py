"""Patched methods: detects a ``step`` that users set on an optimizer, and patches functions of other code for some time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer

from sp_lightning.core.torch_compat.cast_gradient import plain
from sp_lightning.core.torch_compat.private import ENGINE_CALL, current_graph_task, frame_compiler, leave_frame_out


def attributes_of(optimizer: Any) -> dict[str, Any]:
    """Returns the ``__dict__`` of an optimizer, without waiting for updates in the background."""
    if isinstance(optimizer, Optimizer):
        return OWN_ATTRIBUTES.__get__(optimizer)
    return getattr(optimizer, "__dict__", {})


OWN_ATTRIBUTES: Any = vars(Optimizer)["__dict__"]  # a property of the same name may wait for updates


def state_of(optimizer: Any) -> Any:
    """Returns an optimizer's state by parameter, without waiting for updates in the background.

    A wrapper of an optimizer (Opacus' ``DPOptimizer``, accelerate's) has no state itself. Its property returns the state of the
    wrapped optimizer.
    """
    own = attributes_of(optimizer).get("state")
    return optimizer.state if own is None else own


def order_new_state(state: dict[Any, Any], parameters: Iterable[Any], known: Container[Any]) -> None:
    """Puts new state in the order of the parameters, in which torch's step makes it.

    Args:
        state: an optimizer's state by parameter.
        parameters: the parameters, in their order.
        known: those that had state before.
    """
    for parameter in parameters:
        if parameter not in known and dict.get(state, parameter) is not None:
            dict.__setitem__(state, parameter, dict.pop(state, parameter))


def is_patched(optimizer: Any, step: Any) -> bool:
    """Returns True if ``step``, set on the optimizer itself, is code of neither torch nor this package.

    Wrappers are examined down to the step of the optimizer's class. The file of each code object decides, because
    ``functools.wraps`` copies names and attributes.
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
    """Sets methods on an object, and on exit restores the methods that were set on the object itself before.

    If user code wraps one of the new methods in the meantime, the wrapper stays. After the exit it calls the former method. A
    copy of the object has the new methods, too. There they call the method of its class.
    """
    own = attributes_of(owner)
    before = {name: own[name] for name in methods if name in own}
    is_over: list[bool] = []
    put = {name: _until(is_over, name, method, getattr(owner, name, None)) for name, method in methods.items()}
    own.update(put)
    del own  # references to it are counted
    try:
        yield
    finally:
        is_over.append(True)
        own = attributes_of(owner)
        for name in [name for name in methods if own.get(name) is put[name]]:
            del own[name]
            own.update({name: before[name]} if name in before else {})


def _until(is_over: list[bool], name: str, method: Any, before: Any) -> Any:
    """Returns a method that calls ``method`` until ``is_over`` has an entry, and ``before`` after that."""
    bound = getattr(method, "__self__", None)
    function = method if bound is None else method.__func__

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if bound is not None and args[0] is not bound:
            return getattr(type(args[0]), name)(*args, **options)
        if is_over:
            return before(*(args if bound is None else args[1:]), **options)
        return function(*args, **options)

    return call if bound is None else MethodType(call, bound)


_OURS_AND_TORCHS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


# ---------------------------------------------------------------------- calls of autograd's engine that are nested, or fail
# A reentrant checkpoint runs a backward inside a backward. Nothing else may have shown the outer one to an engine so far, which
# would take the end of the inner one for the end of all.
#
# autograd runs queued callbacks only if a backward succeeds. If it fails, autograd drops them. On an accelerator, one of
# autograd's own threads drops them, possibly after user code has caught the error and begun the next forward.


class WatchesEngine:
    """The base of objects that :func:`watch` notifies of calls of autograd's engine.

    Attributes:
        tasks: the running graph tasks that the object knows.
    """

    tasks: Sequence[int] = ()

    def nests(self) -> None:
        """Called before a call inside a running graph task, in the thread of the call."""

    def in_graph(self, edge: GradientEdge) -> GradientEdge:
        """Returns the edge that a call gets in place of one of its inputs."""
        return edge

    def failed(self, before: Sequence[int]) -> None:
        """Called after a call has raised, in the thread of the call. ``before``: the graph tasks that ran before the call."""


@dataclass(frozen=True, eq=False)
class _Watcher:
    """An object to notify of calls that fail, with the thread in which :func:`watch` was called."""

    watcher: weakref.ref[WatchesEngine]
    thread: int


_watchers: tuple[_Watcher, ...] = ()  # immutable, because other threads may iterate over it
_lock = threading.Lock()
_calling: set[int] = set()
"""The threads in which a call of autograd's engine runs."""


class Patch:
    """Wraps a function of a module or a class while it is installed.

    Other code may wrap this wrapper for good, or restore the original function. Therefore each :meth:`install` makes a new
    wrapper around the current function. If other code has wrapped this wrapper, :meth:`remove` cannot remove it. In this case the
    wrapper only forwards calls from then on.

    Args:
        owner: the module or class.
        name: the attribute that is the function.
        around: called in place of the function, with the wrapped function and the arguments of the call.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self.around = around
        self._wrapper: Any = None

    @property
    def installed(self) -> bool:
        """True if the outermost function is this wrapper. If it is False, the wrapper may still run inside another one."""
        return self._wrapper is not None and getattr(self._owner, self._name) is self._wrapper

    def install(self) -> None:
        """Wraps the current function. Does nothing if this wrapper is the outermost already. Removes a former wrapper first."""
        if not self.installed:
            self.remove()
            self._wrapper = self.wrap(getattr(self._owner, self._name))
            setattr(self._owner, self._name, self._wrapper)

    def remove(self) -> None:
        """Removes the wrapper, or stops it if other code has wrapped it. Does nothing if there is no wrapper."""
        wrapper = self._wrapper
        if wrapper is not None:
            wrapper.stop()
            if getattr(self._owner, self._name) is wrapper:
                setattr(self._owner, self._name, wrapper.__wrapped__)
            self._wrapper = None  # last: after an interrupt, remove() can be called again

    def wrap(self, function: Any) -> Any:
        """Returns a wrapper of a function. After its ``stop()`` the wrapper only forwards calls."""
        around: Callable[..., Any] | None = self.around

        @leave_frame_out
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            ours = around  # read once: another thread may call stop() at any time
            return function(*args, **options) if ours is None else ours(function, *args, **options)

        def stop() -> None:
            nonlocal around
            around = None

        wrapper: Any = call
        wrapper.stop = stop
        return wrapper


class _Method(Patch):
    """Wraps a method of a class while some of its objects have another one; see :func:`replace_method`.

    Attributes:
        instead: by an object's ``id``, the function that is called in place of the method.
    """

    def __init__(self, owner: type, name: str) -> None:
        super().__init__(owner, name, self._run)
        self.instead: dict[int, Callable[..., Any]] = {}

    def _run(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        instead = self.instead.get(id(args[0])) if args else None
        return (
            function(*args, **options)
            if instead is None
            else instead(partial(function, *args[:1]), *args[1:], **options)
        )


_methods: dict[tuple[type, str], _Method] = {}


@contextmanager
def replace_method(owner: Any, name: str, instead: Callable[..., Any]) -> Iterator[None]:
    """Calls ``instead(method, owner, *args)`` in place of a method of an object, without a trace in a module.

    A pickle of a module has its ``__dict__``, so the method is wrapped in its class, and the wrapper looks modules up by their
    identity. If ``owner`` forwards the attribute to another module, that module's method is replaced. A method that is set on the
    object itself is replaced there, and so is that of an optimizer, whose pickle has no ``__dict__``.
    """
    own = getattr(owner, name)
    holder = getattr(own, "__self__", None)
    kind = next((each for each in type(holder).__mro__ if name in vars(each)), None)
    if not isinstance(holder, nn.Module) or kind is None or getattr(own, "__func__", None) is not vars(kind)[name]:

        @wraps(own)
        def replaced(owner: Any, *args: Any, **options: Any) -> Any:
            return instead(own, owner, *args, **options)

        with in_place_of(owner, {name: MethodType(replaced, owner)}):
            yield
        return
    with _lock:
        patch = _methods.setdefault((kind, name), _Method(kind, name))
        patch.instead[id(holder)] = lambda own, *args, **options: instead(own, owner, *args, **options)
        patch.install()
    try:
        yield
    finally:
        with _lock:
            del patch.instead[id(holder)]
            if not patch.instead:
                patch.remove()
                del _methods[kind, name]


class PropertyPatch(Patch):
    """Wraps the getter of a property or of a descriptor in the same way. ``around`` gets the getter and the object."""

    def wrap(self, function: Any) -> Any:
        return _Property(super().wrap(function.__get__), function)


class _Property(property):
    """A property that :class:`Patch` can stop and remove."""

    def __init__(self, get: Any, wrapped: Any) -> None:
        super().__init__(get)
        self.stop, self.__wrapped__ = get.stop, wrapped


def while_runs_last(*patches: Patch) -> None:
    """Adds patches to the one of autograd's engine, which :func:`watch` installs and :func:`unwatch` removes."""
    _patches.extend(patches)


def watch(watcher: WatchesEngine) -> None:
    """Notifies a watcher of calls of autograd's engine: ``backward``, ``autograd.grad`` and checkpoints, in any thread.

    While the watcher's own thread is in a call, failures in other threads are not reported: the running graph tasks belong to the
    watcher's call. Keeps only a weak reference to the watcher.
    """
    global _watchers
    with _lock:
        for patch in _patches:
            patch.install()
        _watchers = (*_others(watcher), _Watcher(weakref.ref(watcher), threading.get_ident()))


def unwatch(watcher: Any) -> None:
    """Ends :func:`watch`. Does nothing if the watcher is not watching. Without watchers, removes the patches."""
    global _watchers
    with _lock:
        _watchers = _others(watcher)
        if not _watchers:
            for patch in _patches:
                patch.remove()


def _others(watcher: Any) -> tuple[_Watcher, ...]:
    return tuple(each for each in _watchers if each.watcher() not in (None, watcher))


def _tell_of_nesting() -> None:
    """Calls :meth:`WatchesEngine.nests`.

    If runs in several threads watch, one of autograd's own threads does not show whose graph task it runs. Then only watchers of
    this very thread are notified.
    """
    here, threads = threading.get_ident(), {each.thread for each in _watchers}
    for each in _watchers:
        watcher = each.watcher() if len(threads) == 1 or each.thread == here else None
        if watcher is not None:
            watcher.nests()


_INPUTS = 4  # the place of this argument in a call


def _in_graphs(inputs: Any) -> Any:
    """Returns the inputs of a call after :meth:`WatchesEngine.in_graph` of all watchers."""
    if not any(isinstance(each, GradientEdge) for each in inputs):
        return inputs
    for watcher in [each.watcher() for each in _watchers]:
        if watcher is not None:
            inputs = [watcher.in_graph(each) if isinstance(each, GradientEdge) else each for each in inputs]
    return tuple(inputs)


def _watched(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Runs a call of autograd's engine. Returns plain tensors. Notifies the watchers."""
    if current_graph_task() != -1:
        _tell_of_nesting()
    args = (*args[:_INPUTS], *map(_in_graphs, args[_INPUTS : _INPUTS + 1]), *args[_INPUTS + 1 :])
    before = [
        (watcher, each.thread, list(watcher.tasks)) for each in _watchers if (watcher := each.watcher()) is not None
    ]
    here = threading.get_ident()
    outermost = here not in _calling
    _calling.add(here)
    if frame_compiler() is not None:
        # In a backward inside a compiled forward, torch would compile the engine's hooks.
        call = torch.compiler.disable(call)
    try:
        return plain(call(*args, **options))
    except BaseException:
        for watcher, thread, tasks in before:
            if thread == here or thread not in _calling:
                watcher.failed(tasks)
        raise
    finally:
        if outermost:
            _calling.discard(here)


_patches = [Patch(*ENGINE_CALL, _watched)]
