"""Contexts in which the engine runs its own operators, outside the modes of the user's code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from sp_lightning.core.torch_compat.private import (
    WHY_LEFT_OUT,
    clear_transforms,
    count_dispatch_modes,
    disable_dispatch_modes,
    frame_compiler,
    leave_frame_out,
    no_torch_functions,
    no_vmap_mode,
    transforms_active,
)

P = ParamSpec("P")
R = TypeVar("R")
_NOTHING: AbstractContextManager[None] = nullcontext()  # reentrant
NOT_IN_GRAPHS = (
    "Superpipeline copies weights at this call, and a graph cannot contain that. Compile without fullgraph=True. Pass "
    "weight.clone() in place of a weight to a compiled function or torch.cond. Export (strict=True) copy.deepcopy(module), or "
    "the module after the run"
)


def no_inference_mode() -> AbstractContextManager[None]:
    """Leaves inference mode, because inference tensors cannot be saved for a backward. No-op outside inference mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets the default dtype of new tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def no_dispatch_modes() -> AbstractContextManager[Any]:
    """Hides operators from dispatch modes (selective checkpoints, FLOP counters), which must see the model's operators only."""
    return disable_dispatch_modes() if count_dispatch_modes() else _NOTHING


@contextmanager
def no_transforms() -> Iterator[None]:
    """Leaves ``torch.func`` transforms and ``autograd.grad(is_grads_batched=True)``. No-op outside them."""
    with clear_transforms() if transforms_active() else _NOTHING, no_vmap_mode():
        yield


def unseen() -> AbstractContextManager[Any]:
    """Hides operators from dispatch modes, function modes, tensor subclasses and transforms."""
    if count_dispatch_modes() or transforms_active():
        return _unseen()
    return no_torch_functions()


@contextmanager
def _unseen() -> Iterator[None]:
    with clear_transforms(), no_dispatch_modes(), no_torch_functions():
        yield


def held(lock: AbstractContextManager[Any], *, leaves_inference_mode: bool = False) -> AbstractContextManager[Any]:
    """Holds a lock outside dispatch modes and transforms, and outside inference mode if ``leaves_inference_mode``.

    If no mode or transform is active, as nearly always, returns the lock itself: another context would cost host time.
    """
    if count_dispatch_modes() or transforms_active() or (leaves_inference_mode and torch.is_inference_mode_enabled()):
        return _held(lock, no_inference_mode() if leaves_inference_mode else _NOTHING)
    return lock


@contextmanager
def _held(lock: AbstractContextManager[Any], outside: AbstractContextManager[None]) -> Iterator[None]:
    with lock, clear_transforms(), no_dispatch_modes(), outside:
        yield


def warn_of_ended_graphs() -> None:
    """Warns, once in a process, that code which ``torch.compile`` compiles calls layers or uses weights of layers."""
    warnings.warn(
        "Code that torch.compile compiles calls layers, or uses their weights. Superpipeline ends the graph at each of them, so "
        "less is compiled than on plain Lightning, and results may differ from plain Lightning's with the same compiled code. "
        "Compile the layers in its place: sp_lightning.compile_blocks(model).",
        stacklevel=1,
    )


def never_compiled(function: Callable[P, R], notice: Callable[P, None] | None = None) -> Callable[P, R]:
    """As ``torch.compiler.disable``, in half the host time while nothing is being compiled.

    Args:
        function: the function.
        notice: called before the function, with its arguments, if the caller's frame may be compiled.
    """

    def noticed(*args: P.args, **kwargs: P.kwargs) -> R:
        if notice is not None:
            notice(*args, **kwargs)
        return function(*args, **kwargs)

    disabled = torch.compiler.disable(function if notice is None else noticed)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (function if frame_compiler() is None else disabled)(*args, **kwargs)

    # leave_frame_out excludes this frame only; ``disabled`` excludes the frames that it calls.
    vars(call)[WHY_LEFT_OUT] = NOT_IN_GRAPHS
    return leave_frame_out(call)
