"""Freed gradients: reading ``param.grad`` is an error if the engine has freed the gradient during backward.

If no hook of the user could read a layer's gradients before they are set to None, ``optimizer_overlap="backward"`` frees them
after the layer's update, to save memory. On plain Lightning ``param.grad`` is still a tensor at that time. So code that reads
``param.grad`` nevertheless gets an error instead of None.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.core.torch_compat.private import moves_modules, subclasses_are_asked
from sp_lightning.core.weights.roles import ParameterRole, leave, take

_tensor_grad: Any = Tensor.grad

_SET_TO_NONE = tuple(inspect.unwrap(each).__code__ for each in (nn.Module.zero_grad, Optimizer.zero_grad))
"""Functions of torch that read ``param.grad`` only to reset it."""


class _HasNoGradient(ParameterRole):
    """A host parameter whose gradient exists on plain Lightning, but not here."""

    rank = 4
    why: ClassVar[str]
    """The end of the error's sentence, with a remedy."""

    def grad_for_users(self) -> Tensor | None:
        """Called when user code reads the attribute."""
        raise RuntimeError(f"param.grad was read of a parameter of shape {tuple(self.shape)}{self.why}")

    @property
    def grad(self) -> Tensor | None:
        """None for the engine, for updates and for torch's ``zero_grad``; for user code that of :meth:`grad_for_users`."""
        if subclasses_are_asked() and _is_users(sys._getframe(1)):
            return self.grad_for_users()
        if resets_gradients(reader(sys._getframe(1))):
            leave(self, HasGradientElsewhere)
        return None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _tensor_grad.__set__(self, value)
        leave(self, _HasNoGradient)

    @grad.deleter
    def grad(self) -> None:
        leave(self, _HasNoGradient)


class _HasFreedGradient(_HasNoGradient):
    """A host parameter whose gradient was freed after its update."""

    why = (
        " after the optimizer's step. "
        'optimizer_overlap="backward" has freed it, because no hook of the module or of a callback runs there. Read it '
        'in on_train_batch_end, or leave optimizer_overlap out: "auto" keeps gradients.'
    )


class HasGradientElsewhere(_HasNoGradient):
    """A host parameter whose gradient another process has. ``ranks`` has a subclass, which reads a copy for user code."""


def set_elsewhere(parameter: nn.Parameter, role: type[HasGradientElsewhere]) -> None:
    """Gives a parameter the role, until ``param.grad`` is set."""
    with torch.DisableTorchFunctionSubclass():  # the owner may be updating the layer in this backward
        parameter.grad = None
    take(parameter, role)


def has_gradient(parameter: Tensor) -> bool:
    """Returns True if a parameter has a gradient, here or in another process."""
    return parameter.grad is not None or isinstance(parameter, HasGradientElsewhere)


def refuse_freed(parameter: nn.Parameter) -> None:
    """Raises a RuntimeError if the parameter's gradient was freed."""
    if isinstance(parameter, _HasFreedGradient):
        parameter.grad_for_users()


def resets_gradients(frame: FrameType) -> bool:
    """Returns True if ``frame``, which reads a gradient, is torch's ``zero_grad``, which then only sets the gradient to None."""
    return frame.f_code in _SET_TO_NONE and bool(frame.f_locals.get("set_to_none", False))


def _is_users(frame: FrameType) -> bool:
    """Returns True if ``frame``, which reads a gradient, is user code, and not torch that resets or moves gradients."""
    frame = reader(frame)
    return not (frame.f_code in _SET_TO_NONE or moves_modules(frame.f_code) or is_engines(frame))


def is_engines(frame: FrameType) -> bool:
    """Returns True if ``frame`` is code of this package."""
    return bool(frame.f_globals.get("__name__", "").startswith("sp_lightning."))


def reader(frame: FrameType) -> FrameType:
    """Returns the frame that reads a gradient: the property `grad` of another role of the parameter may have called this one."""
    while frame.f_code.co_name == "grad" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def free(parameter: nn.Parameter) -> None:
    """Frees a parameter's gradient. Reading ``param.grad`` is an error until :func:`forget`, or until another gradient is set."""
    parameter.grad = None
    take(parameter, _HasFreedGradient)


def refuse_addition(parameter: nn.Parameter, name: str) -> None:
    """Raises a RuntimeError if a backward would add to a freed gradient: plain Lightning adds to the last step's gradient."""
    if isinstance(parameter, _HasFreedGradient):
        raise RuntimeError(
            f'A backward within training_step adds to param.grad of {name!r}, which optimizer_overlap="backward" has freed. Call '
            'zero_grad() before this backward, or leave optimizer_overlap out: "auto" keeps gradients.'
        )


def forget(parameter: nn.Parameter) -> None:
    """Makes a freed gradient None from now on, as after ``zero_grad``."""
    leave(parameter, _HasFreedGradient)
