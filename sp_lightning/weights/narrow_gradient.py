"""``param.grad`` in fewer bytes: a gradient that stays in the dtype in which it came until somebody looks at it.

Under bf16-mixed the gradient of a weight that travels as a cast comes in bfloat16, which holds all of it. Plain Lightning
has float32 in ``p.grad``. Nobody needs those twice as many bytes if the optimizer's step is taken apart by layers, because
the update widens a gradient piece by piece. For everybody else ``p.grad`` is the float32 tensor of plain Lightning: while a
gradient is narrow its parameter has a class whose ``grad`` widens it first. A tensor that widens itself when it is read
would not do: ``torch.tensor``, ``set_``, ``torch.func.jvp`` and others read a tensor without asking its class.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.device.metadata import METADATA
from sp_lightning.device.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.device.torch_private import no_torch_functions, subclasses_are_asked, tree_leaves

_tensor_data: Any = Tensor.data
_tensor_grad: Any = Tensor.grad
_lock = threading.RLock()
Clip = Callable[[Tensor], Any]
"""Clips a gradient, or a part of one, in place."""


class NarrowGradient(Tensor):
    """What stands in ``param.grad`` for a narrow gradient, for the engine and for torch's own step of a layer.

    It says that it has its parameter's dtype. Its memory is a single NaN.

    Attributes:
        came: the gradient as it came: host memory of the parameter's shape, in a lower dtype. Nobody writes it.
        clipping: clips a gradient in place; None if this one is not clipped.
        used: whether a step of the optimizer has used it. Then ``clipping`` is part of its value.
        looked_at: called when it is widened.
    """

    came: Tensor
    clipping: Clip | None
    used: bool
    looked_at: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.empty_like and type(args[0]) is NarrowGradient:  # as torch makes SGD's momentum
            return func(args[0].came, **{"dtype": args[0].dtype, **(kwargs or {})})
        if func not in METADATA:
            for leaf in tree_leaves((args, kwargs)):
                _widen(leaf)
        with torch.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class _HasNarrowGradient(nn.Parameter):
    """A host parameter whose gradient is narrow. It has the class of the user's again once somebody asks for ``grad``."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient, widened. Code that runs where subclasses are not asked, as updates do, gets the narrow one."""
        found: Tensor | None = _tensor_grad.__get__(self)  # this waits for an update that is under way
        if subclasses_are_asked():
            _widen(found)
            _restore_class(self)
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _tensor_grad.__set__(self, value)
        _restore_class(self)

    @grad.deleter
    def grad(self) -> None:
        _tensor_grad.__delete__(self)
        _restore_class(self)

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Lets ``type(p)(data)`` make an ordinary parameter."""
        return cls.__bases__[1](data, requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        kind, self.__class__ = self.__class__, _class_of_user(type(self))
        try:
            return copy.deepcopy(self, memo)
        finally:
            self.__class__ = kind


@cache
def _has_narrow(users: type[nn.Parameter]) -> Any:
    """The class of parameters of a class of the user's. It has the same name, as error messages show it."""
    return type(users.__name__, (_HasNarrowGradient, users), {"__module__": users.__module__})


def _class_of_user(kind: type) -> Any:
    return kind.__bases__[1]


def _restore_class(parameter: nn.Parameter) -> None:
    if _HasNarrowGradient in type(parameter).__bases__:
        parameter.__class__ = _class_of_user(type(parameter))


def keep_narrow(parameter: nn.Parameter, came: Tensor, looked_at: Callable[[], None]) -> None:
    """Makes memory in a lower dtype a parameter's gradient.

    Args:
        parameter: a host parameter without a gradient.
        came: host memory with the gradient.
        looked_at: called when somebody asks for the gradient.
    """
    with no_inference_mode():
        gradient: Any = torch.full((), float("nan"), dtype=parameter.dtype, device="cpu").expand(came.shape)
    gradient.__class__ = NarrowGradient
    gradient.came, gradient.clipping, gradient.used, gradient.looked_at = came, None, False, looked_at
    parameter.grad = gradient
    parameter.__class__ = _has_narrow(type(parameter))


def stored(parameter: nn.Parameter) -> Tensor | None:
    """Returns what is in ``param.grad``, narrow or not, once no update of the parameter is under way."""
    found: Tensor | None = _tensor_grad.__get__(parameter)
    return found


def as_it_came(gradient: Tensor) -> Tensor:
    """Returns a gradient in the dtype in which it came: of a narrow one its memory, otherwise the gradient itself."""
    found: Tensor = getattr(gradient, "came", gradient)  # in one go: another thread may widen it meanwhile
    return found


def use(parameter: nn.Parameter, clip: Clip | None) -> None:
    """Notes that a step uses a gradient, clipped: from now on whoever asks for it gets the clipped values."""
    gradient = stored(parameter)
    if type(gradient) is NarrowGradient:
        gradient.clipping, gradient.used = clip, True


def widen_if_used(parameter: nn.Parameter) -> None:
    """Widens a gradient that an earlier step has used, because nobody has set it to None since: its value is clipped."""
    gradient = stored(parameter)
    if type(gradient) is NarrowGradient and gradient.used:
        widen(parameter)


def widen(parameter: nn.Parameter) -> None:
    """Widens a parameter's gradient if it is narrow."""
    _widen(stored(parameter))
    _restore_class(parameter)


def drop(parameter: nn.Parameter) -> None:
    """Sets a parameter's gradient to None if it is narrow."""
    if type(stored(parameter)) is NarrowGradient:
        parameter.grad = None


def _widen(gradient: Any) -> None:
    """Gives a narrow gradient its values in its own dtype, clipped if the update clips it, and makes it a plain tensor."""
    with _lock:
        if type(gradient) is not NarrowGradient:
            return
        with no_torch_functions(), no_inference_mode(), no_dispatch_modes(), torch.no_grad():
            wide = torch.empty_like(gradient.came, dtype=gradient.dtype).copy_(gradient.came)
            if gradient.clipping is not None:
                gradient.clipping(wide)
            _tensor_data.__set__(gradient, wide)
        gradient.looked_at()
        gradient.__class__ = Tensor  # type: ignore[assignment]
        del gradient.came, gradient.clipping, gradient.used, gradient.looked_at


class Norms:
    """Computes norms of gradients, one after the other, in the same memory: to allocate it takes longer than the norm."""

    def __init__(self) -> None:
        self._wide = torch.empty(0)

    def of(self, came: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the norm, in ``dtype``, of a gradient as it came. It is widened, so that torch adds in the same order."""
        if came.dtype is dtype:
            return torch.linalg.vector_norm(came)
        if self._wide.numel() < came.numel() or self._wide.dtype is not dtype:
            self._wide = torch.empty(came.numel(), dtype=dtype, device="cpu")
        wide = self._wide.as_strided(came.shape, came.stride())
        return torch.linalg.vector_norm(wide.copy_(came))
