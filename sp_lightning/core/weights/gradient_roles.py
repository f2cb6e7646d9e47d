"""Roles that ``param.grad`` has for some time: the gradient is narrow, was freed, or is in another process.

*Narrow*: a gradient keeps the 16-bit dtype in which backward has computed it until user code reads ``param.grad``. In mixed
precision the gradient of a weight that is uploaded as a cast is computed in 16 bits, so 16 bits hold the whole value. On plain
Lightning ``param.grad`` is float32, and is unscaled and clipped in place. If an optimizer's step is divided into layers, the
engine does not need the float32 tensor: the update widens, unscales and clips a gradient piece by piece. Code that reads
``param.grad`` gets the float32 tensor of plain Lightning, with all changes until then. To *widen* a gradient is to make this
tensor. A tensor that widens itself when it is read is not possible: ``torch.tensor``, ``set_``, ``torch.func.jvp`` and others
read a tensor without calling its class.

*Freed*: if no hook of the user could read a layer's gradients before they are set to None, ``optimizer_overlap="backward"``
frees them after the layer's update, to save memory. On plain Lightning ``param.grad`` is still a tensor at that time. So code
that reads ``param.grad`` nevertheless gets an error instead of None.

*Elsewhere*: another process has the gradient, and ``ranks`` gives user code a copy.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.core.torch_compat.metadata import METADATA
from sp_lightning.core.torch_compat.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.core.torch_compat.private import moves_modules, no_torch_functions, subclasses_are_asked, tree_leaves
from sp_lightning.core.weights.roles import ParameterRole, leave, take

_tensor_data: Any = Tensor.data
_tensor_grad: Any = Tensor.grad
_lock = threading.RLock()
Change = Callable[[Tensor], Any]
"""Changes a gradient, or a part of one, in place: unscales or clips it."""
NarrowAndChanges = tuple[Tensor, tuple[Change, ...]]
"""A gradient as backward has computed it, and the changes of its value since then, in order."""
_MOST_CHANGES = 2
"""The most changes that are recorded: a step unscales and clips. Without this limit, a gradient that user code never sets to None
would collect the changes of all steps."""


# ---------------------------------------------------------------------- who reads a gradient

_SET_TO_NONE = tuple(inspect.unwrap(each).__code__ for each in (nn.Module.zero_grad, Optimizer.zero_grad))
"""Functions of torch that read ``param.grad`` only to reset it."""


def reader(frame: FrameType) -> FrameType:
    """Returns the frame that reads a gradient: the property `grad` of another role of the parameter may have called this one."""
    while frame.f_code.co_name == "grad" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def resets_gradients(frame: FrameType) -> bool:
    """Returns True if ``frame``, which reads a gradient, is torch's ``zero_grad``, which then only sets the gradient to None."""
    return frame.f_code in _SET_TO_NONE and bool(frame.f_locals.get("set_to_none", False))


def is_engines(frame: FrameType) -> bool:
    """Returns True if ``frame`` is code of this package."""
    return bool(frame.f_globals.get("__name__", "").startswith("sp_lightning."))


# ---------------------------------------------------------------------- the roles


class _GradientRole(ParameterRole):
    """A role that ends when ``grad`` is set."""

    rank = 3

    def found_by(self, frame: FrameType) -> Tensor | None:
        """Returns what ``frame``, which reads ``grad``, finds there."""
        raise NotImplementedError

    @property
    def grad(self) -> Tensor | None:
        return self.found_by(reader(sys._getframe(1)))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _tensor_grad.__set__(self, value)
        leave(self, _GradientRole)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class _HasNarrowGradient(_GradientRole):
    """The role of a host parameter whose gradient is narrow. It ends when user code reads or sets ``grad``."""

    def found_by(self, frame: FrameType) -> Tensor | None:
        """Returns the gradient. Reading widens it, and ends the role.

        Two kinds of code get the narrow gradient: updates and other code for which subclasses are disabled, and torch's
        ``zero_grad``, which only resets the gradient.
        """
        found: Tensor | None = _tensor_grad.__get__(self)  # waits for a running update of the parameter
        if subclasses_are_asked() and not resets_gradients(frame):
            _widen(found)
            leave(self, _HasNarrowGradient)
        return found


class _HasNoGradient(_GradientRole):
    """The role of a host parameter whose gradient exists on plain Lightning, but not here. It ends when torch resets ``grad``."""

    def found_by(self, frame: FrameType) -> Tensor | None:
        """Returns None for the engine, for updates, and for torch that resets or moves gradients."""
        if resets_gradients(frame):
            leave(self, _GradientRole)
        elif subclasses_are_asked() and not (
            frame.f_code in _SET_TO_NONE or moves_modules(frame.f_code) or is_engines(frame)
        ):
            return self.grad_for_users()
        return None

    def grad_for_users(self) -> Tensor | None:
        """Returns what user code gets that reads ``grad``, or raises an error."""
        raise NotImplementedError


class HasGradientElsewhere(_HasNoGradient):
    """The role of a host parameter whose gradient another process has. ``ranks`` has a subclass, which reads a copy for users."""


class _HasFreedGradient(_HasNoGradient):
    """The role of a host parameter whose gradient was freed after its update."""

    def grad_for_users(self) -> Tensor | None:
        refuse_freed(self, f"param.grad was read of a parameter of shape {tuple(self.shape)}")
        return None


def free(parameter: nn.Parameter, role: type[_HasNoGradient] = _HasFreedGradient) -> None:
    """Sets a parameter's gradient to None, and gives the parameter a role until ``grad`` is set, or reset by torch."""
    with torch.DisableTorchFunctionSubclass():  # the parameter's update may run, in another process as well
        parameter.grad = None
    take(parameter, role)


def forget(parameter: nn.Parameter) -> None:
    """Makes a freed gradient None from now on, as after ``zero_grad``."""
    leave(parameter, _HasFreedGradient)


def refuse_freed(parameter: nn.Parameter, what: str, instead: str = "Read it in on_train_batch_end") -> None:
    """Raises a RuntimeError if a parameter's gradient was freed.

    Args:
        parameter: the parameter.
        what: what needs the gradient, as a sentence without its full stop.
        instead: a remedy, as the beginning of a sentence.
    """
    if isinstance(parameter, _HasFreedGradient):
        raise RuntimeError(
            f'{what} after the optimizer\'s step. optimizer_overlap="backward" has freed it, because no hook of the module or '
            f'of a callback runs there. {instead}, or leave optimizer_overlap out: "auto" keeps gradients.'
        )


def has_gradient(parameter: Tensor) -> bool:
    """Returns True if a parameter has a gradient, here or in another process."""
    return parameter.grad is not None or isinstance(parameter, HasGradientElsewhere)


# ---------------------------------------------------------------------- narrow gradients


class Factor:
    """A :data:`Change` that multiplies.

    Args:
        factor: a tensor with one float32 number.
    """

    def __init__(self, factor: Tensor) -> None:
        self._factor = factor

    def __call__(self, gradient: Tensor) -> None:
        gradient.mul_(self._factor)


class NarrowGradient(Tensor):
    """The tensor in ``param.grad`` while a gradient is narrow. The engine and torch's own step of a layer get it.

    Its dtype is the parameter's, and its memory is a single NaN.

    Attributes:
        narrow_and_changes: the gradient as backward has computed it, and the changes that widening applies to it. The gradient
            has the parameter's shape, and no code writes it. It is in host memory, in a lower dtype, or on the device, in any
            dtype.
        looked_at: called when the gradient is widened.
        computed: for a gradient on the device, the event after the kernels that wrote it; otherwise None.
    """

    narrow_and_changes: NarrowAndChanges
    looked_at: Callable[[], None]
    computed: Any = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # torch makes SGD's momentum so. The new tensor has the strides of the gradient, which is not widened for that.
        if func is torch.empty_like and type(args[0]) is NarrowGradient:
            return func(args[0].narrow_and_changes[0], **{"dtype": args[0].dtype, **(kwargs or {})})
        if func not in METADATA:
            for leaf in tree_leaves((args, kwargs)):
                _widen(leaf)
        with torch.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def keep_narrow(parameter: nn.Parameter, came: Tensor, looked_at: Callable[[], None], *, computed: Any = None) -> None:
    """Sets ``param.grad`` to a narrow gradient: a tensor in a lower dtype than the parameter, or on the device.

    Args:
        parameter: a host parameter without a gradient.
        came: the gradient, as backward has computed it.
        looked_at: called when user code reads ``param.grad``.
        computed: the event after the kernels that write the gradient, if it is on the device.
    """
    with no_inference_mode():
        gradient: Any = torch.full((), float("nan"), dtype=parameter.dtype, device="cpu").expand(came.shape)
    gradient.__class__ = NarrowGradient
    gradient.narrow_and_changes, gradient.looked_at, gradient.computed = (came, ()), looked_at, computed
    parameter.grad = gradient
    take(parameter, _HasNarrowGradient)


def stored(parameter: nn.Parameter) -> Tensor | None:
    """Returns the tensor in ``param.grad`` without widening it. If the parameter's update is running, waits for its end."""
    found: Tensor | None = _tensor_grad.__get__(parameter)
    return found


def is_narrow(parameter: nn.Parameter) -> bool:
    """Returns True if a parameter's gradient is narrow."""
    return issubclass(type(parameter), _HasNarrowGradient) and type(stored(parameter)) is NarrowGradient


def narrow_and_changes(gradient: Any) -> NarrowAndChanges:
    """Returns a gradient as backward has computed it, and its later changes. A wide gradient is returned itself, with ``()``."""
    found: NarrowAndChanges = getattr(gradient, "narrow_and_changes", (gradient, ()))  # one read: a thread may widen it
    return found


def unwidened(gradient: Any) -> Tensor:
    """Returns the tensor that backward has computed. For a gradient that is not narrow, this is the gradient itself."""
    return narrow_and_changes(gradient)[0]


def change(parameter: nn.Parameter, by: Change) -> bool:
    """Records a change of a narrow gradient, to be applied when it is widened. Returns False if the gradient is not narrow.

    After False the caller changes ``param.grad`` itself. If the gradient has :data:`_MOST_CHANGES` already, it is widened first.
    """
    gradient = stored(parameter)
    with _lock:
        if type(gradient) is not NarrowGradient:
            return False
        came, changes = gradient.narrow_and_changes
        if len(changes) < _MOST_CHANGES:
            gradient.narrow_and_changes = came, (*changes, by)
            return True
    widen(parameter)
    return False


def widen_if_changed(parameter: nn.Parameter) -> None:
    """Widens a gradient with recorded changes: it belongs to an earlier step, and user code has not set it to None."""
    if is_narrow(parameter) and narrow_and_changes(stored(parameter))[1]:
        widen(parameter)


def widen(parameter: nn.Parameter) -> None:
    """Widens a parameter's gradient if it is narrow."""
    _widen(stored(parameter))
    leave(parameter, _HasNarrowGradient)


def memory_for_values(parameter: nn.Parameter) -> Tensor:
    """Returns ``param.grad`` for a caller that writes all of it. A narrow gradient becomes a plain host tensor without values."""
    gradient = stored(parameter)
    assert gradient is not None
    _widen(gradient, values=False)
    leave(parameter, _HasNarrowGradient)
    return gradient


def drop(parameter: nn.Parameter) -> None:
    """Sets a parameter's gradient to None if it is narrow."""
    if type(stored(parameter)) is NarrowGradient:
        parameter.grad = None


def _widen(gradient: Any, *, values: bool = True) -> None:
    """Makes a narrow gradient a plain tensor with its values after all changes, in the parameter's dtype. Calls ``looked_at``.

    Without ``values``, the caller writes the tensor.
    """
    with _lock:
        if type(gradient) is not NarrowGradient:
            return
        with no_torch_functions(), no_inference_mode(), no_dispatch_modes(), torch.no_grad():
            came, changes = gradient.narrow_and_changes
            wide = torch.empty_like(came, dtype=gradient.dtype, device="cpu")
            if values:
                wide.copy_(came)
                for each in changes:
                    each(wide)
            _tensor_data.__set__(gradient, wide)
        gradient.looked_at()
        gradient.__class__ = Tensor  # type: ignore[assignment]
        del gradient.narrow_and_changes, gradient.looked_at, gradient.computed


class Norms:
    """Computes norms of gradients on the host in float32, one after the other.

    A narrow gradient is widened whole into one buffer, because torch adds up squares in the order of the elements: norms of parts
    would have other bits than on plain Lightning. The buffer is kept, because allocating it takes longer than a norm. It has 4
    bytes per element of the largest narrow gradient, which ``plan.ledger`` counts. Several threads may compute norms.
    """

    def __init__(self) -> None:
        self._wide = torch.empty(0, device="cpu")
        self._lock = threading.Lock()

    def of(self, gradient: Tensor, kind: float = 2.0) -> Tensor:
        """Returns the norm of a gradient after its recorded changes: a number in a tensor. ``kind``: torch's ``ord``."""
        came, changes = narrow_and_changes(gradient)
        if came is gradient:
            return torch.linalg.vector_norm(gradient, kind)
        with self._lock:
            return torch.linalg.vector_norm(self._widened(gradient, came, changes), kind)

    def _widened(self, gradient: Tensor, came: Tensor, changes: Sequence[Change]) -> Tensor:
        """Returns a narrow gradient widened, in memory that the next gradient overwrites."""
        dtype = gradient.dtype
        if self._wide.numel() < came.numel() or self._wide.dtype is not dtype:
            self._wide = torch.empty(came.numel(), dtype=dtype, device="cpu")
        wide = self._wide.as_strided(came.shape, came.stride())
        wide.copy_(came)
        for each in changes:
            each(wide)
        return wide
