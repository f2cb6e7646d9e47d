"""Updates one parameter on the CPU with the bits of a GPU, whatever its size and strides, and whatever changes its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from sp_lightning.capabilities.kernels.update import CAST_ALIGNMENT, update_in_one_pass
from sp_lightning.capabilities.kernels.variants import Like
from sp_lightning.core.device.host_kernels import Operands
from sp_lightning.core.layers.narrow_gradient import Factor
from sp_lightning.core.torch_compat.private import FUSED_STEPS
from sp_lightning.core.updates.pieces import Update


def step_like(like: Like, operator: Callable[..., Any], settings: Mapping[str, Any], update: Update) -> None:
    """Updates one weight with the bits of a GPU, by a kernel, and casts it. May change the gradient in place.

    Args:
        like: the GPU, and the form of torch's step on it.
        operator, settings: torch's fused operator of the optimizer, and its keyword arguments.
        update: the operands, and the changes of the gradient that have not been made yet.

    Raises:
        RuntimeError: settings have changed since the run began, and the GPU has not confirmed a formula for the new settings.
    """
    if update.weight.numel() == 0:
        return
    factors = [change.number for change in update.changes if isinstance(change, Factor)]
    if len(factors) < len(update.changes) or not update.widens:
        # A kernel multiplies the gradient by factors without writing it. The changes are made before the kernel runs in two
        # cases: one of them is not a factor (clipping by value); or the gradient has the weight's dtype. In the second case user
        # code may read the changed gradient, and plain Lightning rounds each change of a 16-bit gradient.
        if update.widens:
            update.gradient = update.gradient.to(update.weight.dtype)
        for change in update.changes:
            change(update.gradient)
        factors = []
    # SGD's state has no number of steps.
    *moments, steps = update.state if FUSED_STEPS[operator] != "sgd" else (*update.state, None)
    cast = update.cast if update.cast is not None and update.cast.is_contiguous() else None
    cast = None if cast is None or cast.data_ptr() % CAST_ALIGNMENT else cast.view(-1)
    owners = (update.weight, *moments)
    weight, *state = made = [each if each is None else _flat(each) for each in owners]
    assert weight is not None
    gradient = _flat(update.gradient)
    version = gradient._version
    done = update_in_one_pass(operator, settings, Operands(weight, gradient, cast, [*state, steps]), factors, like)
    if not done and (update.widens or cast is not None):
        # The kernel of this variant cannot be compiled. The plain kernel, which the GPU has confirmed, needs more passes.
        wide, cast = gradient.to(weight.dtype), None
        for factor in factors:
            wide.mul_(factor)
        done = update_in_one_pass(operator, settings, Operands(weight, wide, None, [*state, steps]), [], like)
    if not done:
        raise RuntimeError(
            f"The optimizer's settings were changed during the run, and no formula is known for {dict(settings)} that "
            f"has the bits of {like.device}. Set them before the run, or use SuperpipelineStrategy(fused_optimizer=False)."
        )
    if gradient._version != version:  # SGD with Nesterov momentum may write it
        owners, made = (*owners, update.gradient), [*made, gradient]
    for own, other in zip(owners, made, strict=True):
        if own is not None and other is not None and own.data_ptr() != other.data_ptr():
            own.copy_(other.view(own.shape))
    if update.cast is not None and cast is None:
        update.cast.copy_(update.weight)


def _flat(tensor: Tensor) -> Tensor:
    """Returns all elements in the order of their indices: a view if memory has that order, else a copy."""
    return tensor.contiguous().view(-1)
