"""Moves a module as ``module.to(device)`` does, except parameters that stay where they are.

User code overrides ``to`` and ``_apply`` to move more than parameters and buffers: metrics move their states, gpytorch's models
their training data, detectors their anchors, LightningModules modules that they hide in lists. So the move is a call of
``module.to``, and only torch's own ``_apply``, which all of these call, leaves parameters out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sp_lightning.core.torch_compat.patched import Patch
from sp_lightning.core.torch_compat.private import MODULE_APPLY

_GET_DEVICE = Tensor.device.__get__


def move_module(
    module: nn.Module, device: torch.device, staying: Iterable[Tensor], without_buffers: Iterable[nn.Module]
) -> None:
    """Calls ``module.to(device)``. Some parameters stay where they are, with their gradients.

    For overridden methods, ``parameter.to(device)`` returns such a parameter itself. Its ``device`` is the new one from the
    moment at which torch would have moved the parameter.

    Args:
        module: the root.
        device: the device.
        staying: the parameters that stay.
        without_buffers: modules whose buffers stay, too, with the modules in them.
    """
    with _Move(device, staying, without_buffers) as move, _patched(move):
        module.to(device)


class _Move(TorchFunctionMode):
    """A move of a module. As a mode, it answers for parameters that stay. See :func:`move_module` for the arguments."""

    def __init__(self, device: torch.device, staying: Iterable[Tensor], without_buffers: Iterable[nn.Module]) -> None:
        super().__init__()
        self._device = device
        self._staying = {id(each): each for each in staying}
        self._without_buffers = {inner for each in without_buffers for inner in each.modules()}
        self._arrived: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = id(args[0]) if args else None
        if first in self._staying and func is Tensor.to:
            return args[0]
        if first in self._arrived and func == _GET_DEVICE:
            return self._device
        return func(*args, **(kwargs or {}))

    def apply(self, own: Callable[..., Any], module: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Runs in place of ``nn.Module._apply``: as torch's method, without parameters that stay."""
        staying = {id(each) for each in module._parameters.values()} & self._staying.keys()
        if not staying and module not in self._without_buffers:
            return own(module, fn, recurse)
        for child in module.children() if recurse else ():
            child._apply(fn)
        self._arrived |= staying
        for name, buffer in module._buffers.items() if module not in self._without_buffers else ():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
        return module


_move: ContextVar[_Move | None] = ContextVar("move", default=None)
"""The move that runs in this thread. The patch below is shared by all threads."""


def _around(own: Callable[..., Any], *args: Any, **options: Any) -> Any:
    move = _move.get()
    return own(*args, **options) if move is None else move.apply(own, *args, **options)


_patch = Patch(*MODULE_APPLY, _around)
_lock = threading.Lock()
_moves = 0  # the number of moves that run


@contextmanager
def _patched(move: _Move) -> Iterator[None]:
    """A context in which torch's ``_apply`` belongs to a move."""
    global _moves
    before = _move.set(move)
    with _lock:
        _moves += 1
        _patch.install()
    try:
        yield
    finally:
        with _lock:
            _moves -= 1
            if not _moves:
                _patch.remove()
        _move.reset(before)
