"""Backward in another thread than the step's, as autograd runs it on an accelerator.

There a thread of autograd's own runs the hooks. It has what torch carries over (autocast, inference mode, hooks of saved tensors,
modes that see operators), and nothing that Python keeps by thread: no thread-locals, no contexts, no locks of the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any
from unittest import mock

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from sp_lightning.device.torch_private import ENGINE_CALL, current_graph_task, top_saved_tensors_hooks


@contextmanager
def backward_elsewhere() -> Iterator[set[int]]:
    """While this is active each backward runs in one other thread, but for those inside another, which stay in its thread.

    It yields the threads that have called for a backward from outside of one.
    """
    engine, callers = getattr(*ENGINE_CALL), set[int]()
    with ThreadPoolExecutor(1, "autograd") as thread:

        def run(*args: Any, **options: Any) -> Any:
            if current_graph_task() != -1:
                return engine(*args, **options)
            callers.add(get_ident())
            return thread.submit(carried_over(lambda: engine(*args, **options))).result()

        with mock.patch.object(*ENGINE_CALL, run):
            yield callers


def carried_over(work: Callable[[], Any]) -> Callable[[], Any]:
    """The same work, to be done in another thread with what torch carries over from this one."""
    contexts: list[Any] = [
        torch.set_grad_enabled(torch.is_grad_enabled()),
        torch.inference_mode(torch.is_inference_mode_enabled()),
        *_get_current_function_mode_stack(),
        *_get_current_dispatch_mode_stack(),
    ]
    if torch.is_autocast_enabled("cpu"):
        cached = torch.is_autocast_cache_enabled()
        contexts.append(torch.autocast("cpu", torch.get_autocast_dtype("cpu"), cache_enabled=cached))
    hooks = top_saved_tensors_hooks()
    if hooks is not None:
        contexts.append(saved_tensors_hooks(*hooks))

    def there() -> Any:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            return work()

    return there
