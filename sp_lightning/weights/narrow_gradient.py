"""``param.grad`` in fewer bytes: a gradient that stays in the dtype in which it came until somebody looks at its values.

Under bf16-mixed the gradient of a weight that travels as a cast comes in bfloat16, which holds all of it. Plain Lightning
has float32 in ``p.grad``. Nobody needs those twice as many bytes if the optimizer's step is taken apart by layers, because
the update widens a gradient piece by piece. For everybody else ``p.grad`` is a float32 tensor, as it is in plain Lightning.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sp_lightning.device.metadata import METADATA
from sp_lightning.device.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.device.torch_private import tree_leaves

_tensor_data: Any = Tensor.data
_lock = threading.Lock()


Clip = Callable[[Tensor], Any]


class NarrowGradient(Tensor):
    """A gradient that says that it has its parameter's dtype, and whose values are widened when somebody reads them.

    From then on it is an ordinary tensor, of the class ``Tensor``, and the memory in which it came is free. Code in C++
    that does not ask ``__torch_function__`` would read NaN. :func:`narrow` makes one.

    Attributes:
        came: the gradient as it came: host memory of the parameter's shape, in a lower dtype. Nobody writes it.
        clipping: clips a gradient in place; None if this one is not clipped.
        looked_at: called when the values are widened.
    """

    came: Tensor
    clipping: Clip | None
    looked_at: Callable[[], None]

    def as_subclass(self, cls: Any) -> Any:
        widen(self)  # torch's own method does not call __torch_function__
        return self.as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _NEEDS_NO_VALUES:
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch.empty_like and type(args[0]) is NarrowGradient:  # as torch makes SGD's momentum
            return func(args[0].came, **{"dtype": args[0].dtype, **(kwargs or {})})
        for leaf in tree_leaves((args, kwargs)):
            widen(leaf)
        return func(*args, **(kwargs or {}))


_NEEDS_NO_VALUES = METADATA | {Tensor.requires_grad.__get__, Tensor._version.__get__, Tensor.__hash__}  # type: ignore[attr-defined]


def narrow(came: Tensor, dtype: torch.dtype, looked_at: Callable[[], None]) -> NarrowGradient:
    """Returns a gradient of a higher dtype than it came in.

    Args:
        came: host memory with the gradient, or which will have it before anybody reads this one's values.
        dtype: the parameter's.
        looked_at: called when somebody reads the values.
    """
    with no_inference_mode():
        gradient: Any = torch.full((), float("nan"), dtype=dtype, device="cpu").expand(came.shape)
    gradient.__class__ = NarrowGradient
    gradient.came, gradient.clipping, gradient.looked_at = came, None, looked_at
    return gradient


def widen(gradient: Any) -> None:
    """Gives a narrow gradient its values in its own dtype, clipped if the update clips it. Does nothing to anything else."""
    with _lock:
        if type(gradient) is not NarrowGradient:
            return
        with torch.DisableTorchFunctionSubclass(), no_inference_mode(), no_dispatch_modes(), torch.no_grad():
            wide = torch.empty_like(gradient.came, dtype=gradient.dtype).copy_(gradient.came)
            if gradient.clipping is not None:
                gradient.clipping(wide)
            _tensor_data.__set__(gradient, wide)
        gradient.looked_at()
        gradient.__class__ = Tensor  # type: ignore[assignment]
        del gradient.came, gradient.clipping, gradient.looked_at


def as_it_came(gradient: Tensor) -> Tensor:
    """Returns a gradient in the dtype in which it came: of a narrow one its memory, otherwise the gradient itself."""
    return gradient.came if type(gradient) is NarrowGradient else gradient


def clip_when_widened(gradient: Tensor | None, clip: Clip) -> None:
    """Lets a narrow gradient have clipped values once it is read, as ``param.grad`` has them after a step."""
    if type(gradient) is NarrowGradient:
        if gradient.clipping is not None:
            widen(gradient)  # it was not set to None since the last step, which has clipped it, too
        else:
            gradient.clipping = clip


class Norms:
    """Computes norms of gradients, one after the other, in the same memory: to allocate it takes longer than the norm."""

    def __init__(self) -> None:
        self._wide = torch.empty(0)

    def of(self, gradient: Tensor) -> Tensor:
        """Returns the norm in the gradient's dtype. A narrow one is widened for it, so that torch adds in the same order."""
        came = as_it_came(gradient)
        if came is gradient:
            return torch.linalg.vector_norm(gradient)
        if self._wide.numel() < came.numel() or self._wide.dtype is not gradient.dtype:
            self._wide = torch.empty(came.numel(), dtype=gradient.dtype, device="cpu")
        wide = self._wide.as_strided(came.shape, came.stride())
        return torch.linalg.vector_norm(wide.copy_(came))
