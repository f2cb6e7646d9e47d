"""Backward in another thread than the step's, as autograd runs it on an accelerator.

There a thread of autograd's own runs the hooks. It has what torch carries over (``at::ThreadLocalState``: autocast and its
dtype, inference mode, all hooks of saved tensors, modes that see operators and functions, whether subclasses are asked), and
nothing that Python keeps by thread: no thread-locals, no contexts, no locks of the caller's. Nor does it know whether
autocast keeps its casts.

``pytest -p tests.support.elsewhere tests/engine`` runs any tests so, with every backward in another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from threading import Thread, get_ident
from typing import Any
from unittest import mock

import pytest
import torch
from torch._C import _autograd
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from sp_lightning.core.torch_compat.private import (
    ENGINE_CALL,
    current_graph_task,
    subclasses_are_asked,
    top_saved_tensors_hooks,
    transforms_active,
)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> Generator[None, object, object]:
    """Where this file is a plugin of pytest's: around each test, and not around its fixtures."""
    with backward_elsewhere():
        return (yield)


@contextmanager
def backward_elsewhere() -> Iterator[set[int]]:
    """While this is active each backward runs in one other thread, but for those inside another, which stay in its thread.

    It yields the threads that have called for a backward from outside of one.
    """
    engine, callers = getattr(*ENGINE_CALL), set[int]()
    work: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
    thread = Thread(target=serve, args=(work,), name="autograd", daemon=True)  # as Python sees autograd's

    def run(*args: Any, **options: Any) -> Any:
        if current_graph_task() != -1 or transforms_active():  # a transform's levels are not carried over here
            return engine(*args, **options)
        callers.add(get_ident())
        result: Future[Any] = Future()
        work.put((carried_over(lambda: engine(*args, **options)), result))
        return result.result()

    thread.start()
    try:
        with mock.patch.object(*ENGINE_CALL, run):
            yield callers
    finally:
        work.put(None)
        thread.join()


def serve(work: SimpleQueue[Any]) -> None:
    """Does what comes, one piece after the other, until None does. It keeps nothing of it."""
    while (piece := work.get()) is not None:
        function, result = piece
        try:
            result.set_result(function())
        except BaseException as error:  # whatever it is, it is the caller's
            result.set_exception(error)
        del piece, function, result


def carried_over(work: Callable[[], Any]) -> Callable[[], Any]:
    """The same work, to be done in another thread with what torch carries over from this one."""
    contexts: list[Any] = [
        torch.set_grad_enabled(torch.is_grad_enabled()),
        torch.inference_mode(torch.is_inference_mode_enabled()),
        *_get_current_function_mode_stack(),
        *_get_current_dispatch_mode_stack(),
    ]
    contexts.append(autocast_carried_over(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
    contexts += [saved_tensors_hooks(*hooks) for hooks in all_saved_tensors_hooks()]
    if not subclasses_are_asked():
        contexts.append(torch.DisableTorchFunctionSubclass())

    def there() -> Any:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            return work()

    return there


@contextmanager
def autocast_carried_over(enabled: bool, dtype: torch.dtype) -> Iterator[None]:
    """As in a thread of autograd's: no context of autocast is entered, so that none throws casts away as it is left."""
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    torch.set_autocast_enabled("cpu", enabled)
    torch.set_autocast_dtype("cpu", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", before[0])
        torch.set_autocast_dtype("cpu", before[1])


def all_saved_tensors_hooks() -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """The pairs that are active in this thread, outermost first. torch tells the innermost alone."""
    found: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
    while (hooks := top_saved_tensors_hooks()) is not None:
        found.insert(0, hooks)
        _autograd._pop_saved_tensors_default_hooks()
    for hooks in found:
        _autograd._push_saved_tensors_default_hooks(*hooks)
    return found
