"""``param.grad`` in fewer bytes: a gradient that stays in the dtype in which it came until user code looks at it.

In mixed precision the gradient of a weight that travels as a cast comes in 16 bits, which hold all of it. Plain Lightning
has float32 in ``p.grad``, and unscales and clips it there. Those twice as many bytes are not needed if the optimizer's step
is taken apart by layers, because the update widens a gradient piece by piece, and unscales and clips each piece. For
other code ``p.grad`` is the float32 tensor of plain Lightning, unscaled or clipped if it would be by then: while
a gradient is narrow its parameter has a class whose ``grad`` widens it first. A tensor that widens itself when it is read
would not do: ``torch.tensor``, ``set_``, ``torch.func.jvp`` and others read a tensor without asking its class.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from sp_lightning.layers.freed_gradient import resets_gradients
from sp_lightning.layers.roles import ParameterRole, leave, take
from sp_lightning.registry import host_kernels
from sp_lightning.torch_compat.metadata import METADATA
from sp_lightning.torch_compat.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.torch_compat.private import no_torch_functions, subclasses_are_asked, tree_leaves

_tensor_data: Any = Tensor.data
_tensor_grad: Any = Tensor.grad
_lock = threading.RLock()
Change = Callable[[Tensor], Any]
"""Changes a gradient, or a part of one, in place: unscales or clips it."""
RunInputs = tuple[Tensor, tuple[Change, ...]]
"""A gradient as it came, and what has changed its value since, in order."""
_MOST_CHANGES = 2
"""Of one step: it unscales and clips. Changes of several steps pile up if user code never sets a gradient to None."""


class Factor:
    """A :data:`Change` that multiplies.

    Args:
        factor: one number, float32.

    Attributes:
        number: the same.
    """

    def __init__(self, factor: Tensor) -> None:
        self._factor = factor
        self.number = float(factor)

    def __call__(self, gradient: Tensor) -> None:
        gradient.mul_(self._factor)


class NarrowGradient(Tensor):
    """What stands in ``param.grad`` for a narrow gradient, for the engine and for torch's own step of a layer.

    It says that it has its parameter's dtype. Its memory is a single NaN.

    Attributes:
        made_of: the gradient as it came, which is memory of the parameter's shape that is never written, with its changes: host
            memory in a lower dtype, or the device's in any.
        looked_at: called when it is widened.
        computed: of one that is on the device: the event after the kernels that wrote it. None of others.
    """

    made_of: RunInputs
    looked_at: Callable[[], None]
    computed: Any = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.empty_like and type(args[0]) is NarrowGradient:  # as torch makes SGD's momentum
            return func(args[0].made_of[0], **{"dtype": args[0].dtype, **(kwargs or {})})
        if func not in METADATA:
            for leaf in tree_leaves((args, kwargs)):
                _widen(leaf)
        with torch.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class _HasNarrowGradient(ParameterRole):
    """A host parameter whose gradient is narrow. It has the class of the user's again once user code asks for ``grad``."""

    rank = 3

    @property
    def grad(self) -> Tensor | None:
        """The gradient, widened. Code that runs where subclasses are not asked, as updates do, gets the narrow one."""
        found: Tensor | None = _tensor_grad.__get__(self)  # this waits for an update that is under way
        if subclasses_are_asked() and not resets_gradients(sys._getframe(1)):
            _widen(found)
            leave(self, _HasNarrowGradient)
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _tensor_grad.__set__(self, value)
        leave(self, _HasNarrowGradient)

    @grad.deleter
    def grad(self) -> None:
        _tensor_grad.__delete__(self)
        leave(self, _HasNarrowGradient)


def keep_narrow(parameter: nn.Parameter, came: Tensor, looked_at: Callable[[], None], *, computed: Any = None) -> None:
    """Makes memory in a lower dtype, or on the device, a parameter's gradient.

    Args:
        parameter: a host parameter without a gradient.
        came: memory with the gradient.
        looked_at: called when user code asks for the gradient.
        computed: the event after which it is there, if it is on the device.
    """
    with no_inference_mode():
        gradient: Any = torch.full((), float("nan"), dtype=parameter.dtype, device="cpu").expand(came.shape)
    gradient.__class__ = NarrowGradient
    gradient.made_of, gradient.looked_at, gradient.computed = (came, ()), looked_at, computed
    parameter.grad = gradient
    take(parameter, _HasNarrowGradient)


def waits_on_device(parameter: nn.Parameter) -> bool:
    """Whether a parameter's gradient is on the device as it came: nothing has unscaled or clipped it."""
    gradient: Any = stored(parameter)
    return type(gradient) is NarrowGradient and gradient.computed is not None and not gradient.made_of[1]


def add_on_device(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Returns what is to be a parameter's gradient on the device: its present one there, if it has one, and this one.

    The sum has the parameter's dtype, as that of autograd has on plain Lightning.
    """
    if not waits_on_device(parameter):
        return gradient
    came, _ = made_of(stored(parameter))
    with torch.no_grad():
        return came.to(parameter.dtype).add_(gradient.to(parameter.dtype))


def stored(parameter: nn.Parameter) -> Tensor | None:
    """Returns what is in ``param.grad``, narrow or not, once no update of the parameter is under way."""
    found: Tensor | None = _tensor_grad.__get__(parameter)
    return found


def is_narrow(parameter: nn.Parameter) -> bool:
    """Whether a parameter's gradient is narrow."""
    return issubclass(type(parameter), _HasNarrowGradient) and type(stored(parameter)) is NarrowGradient


def made_of(gradient: Any) -> RunInputs:
    """Returns a gradient as it came, and what has changed its value since. A wide one is itself, and nothing has."""
    found: RunInputs = getattr(gradient, "made_of", (gradient, ()))  # in one go: another thread may widen it meanwhile
    return found


def as_it_came(gradient: Any) -> Tensor:
    """Returns a gradient in the dtype in which it came: of a narrow one its memory, otherwise the gradient itself."""
    return made_of(gradient)[0]


def change(parameter: nn.Parameter, by: Change) -> bool:
    """Notes a change of a parameter's gradient, for code that reads it from now on, if it is narrow. Returns whether it is."""
    gradient = stored(parameter)
    with _lock:
        if type(gradient) is not NarrowGradient:
            return False
        came, changes = gradient.made_of
        if len(changes) < _MOST_CHANGES:
            gradient.made_of = came, (*changes, by)
            return True
    widen(parameter)
    return False


def widen_if_changed(parameter: nn.Parameter) -> None:
    """Widens a gradient whose value is another one than came, because user code has not set it to None since an earlier step."""
    if is_narrow(parameter) and made_of(stored(parameter))[1]:
        widen(parameter)


def widen(parameter: nn.Parameter) -> None:
    """Widens a parameter's gradient if it is narrow."""
    _widen(stored(parameter))
    leave(parameter, _HasNarrowGradient)


def drop(parameter: nn.Parameter) -> None:
    """Sets a parameter's gradient to None if it is narrow."""
    if type(stored(parameter)) is NarrowGradient:
        parameter.grad = None


def _widen(gradient: Any) -> None:
    """Gives a narrow gradient its values in its own dtype, with all changes, and makes it a plain tensor."""
    with _lock:
        if type(gradient) is not NarrowGradient:
            return
        with no_torch_functions(), no_inference_mode(), no_dispatch_modes(), torch.no_grad():
            came, changes = gradient.made_of
            wide = torch.empty_like(came, dtype=gradient.dtype, device="cpu").copy_(came)
            for each in changes:
                each(wide)
            _tensor_data.__set__(gradient, wide)
        gradient.looked_at()
        gradient.__class__ = Tensor  # type: ignore[assignment]
        del gradient.made_of, gradient.looked_at, gradient.computed


def exact_scale(came: Tensor, changes: Sequence[Change]) -> float:
    """Returns the number by which a norm can be multiplied in place of its gradient, with the same bits; 0 if there is none.

    A scaler's is a power of two. Products with that are exact, and so are squares of float16 numbers that were multiplied by it.
    """
    numbers = [each.number if isinstance(each, Factor) else 0.0 for each in changes]
    exact = came.dtype is torch.float16 and all(
        2.0**-38 < each < 2.0 and math.frexp(each)[0] == 0.5 for each in numbers
    )
    return math.prod(numbers) if exact or not changes else 0.0


class Norms:
    """Computes norms of gradients on the host. Memory for widened gradients is kept: to allocate it takes longer than the norm.

    Attributes:
        dtypes: dtypes of gradients whose norms do not depend on the number of threads.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)

    def __init__(self) -> None:
        self._wide = torch.empty(0)

    def replaces_torch(self, gradient: Tensor) -> bool:
        """Returns True if :meth:`of` computes other bits than torch on the CPU, also for a gradient that is not narrow."""
        return False

    def total(self, norms: Sequence[Tensor]) -> Tensor:
        """Returns the norm of all gradients together."""
        return get_total_norm(norms)

    def of(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Returns the norms of gradients. A kernel reads narrow ones as they came, if there is one.

        Others are widened here, so that torch adds in the same order.
        """
        made = [(gradient, *made_of(gradient)) for gradient in gradients]
        scales = {id(came): exact_scale(came, changes) for gradient, came, changes in made if came is not gradient}
        known = host_kernels().norms([came for _, came, _ in made if scales.get(id(came))])
        return [
            known[id(came)].mul_(scales[id(came)]) if id(came) in known else self._of_one(gradient, came, changes)
            for gradient, came, changes in made
        ]

    def _of_one(self, gradient: Tensor, came: Tensor, changes: Sequence[Change]) -> Tensor:
        if came is gradient:
            return torch.linalg.vector_norm(gradient)
        return torch.linalg.vector_norm(self._widened(gradient, came, changes))

    def _widened(self, gradient: Tensor, came: Tensor, changes: Sequence[Change]) -> Tensor:
        """A narrow gradient in its own dtype with its changes, in memory that the next one overwrites."""
        dtype = gradient.dtype
        if self._wide.numel() < came.numel() or self._wide.dtype is not dtype:
            self._wide = torch.empty(came.numel(), dtype=dtype, device="cpu")
        wide = self._wide.as_strided(came.shape, came.stride())
        wide.copy_(came)
        for each in changes:
            each(wide)
        return wide
