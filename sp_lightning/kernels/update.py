"""A layer's update in one walk over host memory: the gradient is widened, changed, the optimizer steps, and weights are cast.

torch's fused operators need a walk for each of these. A kernel of our own needs one, with the same bits: each variant is compared
with torch's operator when it is compiled, and is not used if it differs, or cannot be compiled or run.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sp_lightning.device.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.device.torch_private import FUSED_STEPS
from sp_lightning.kernels.ir import BLOCK, RECIPES, Arguments, Kind, Recipe, Variant, update_text
from sp_lightning.kernels.jit import Compiled

LEAST = 1 << 14
"""Elements of the smallest tensor for which a kernel is faster than torch's operators."""

_CAST_ALIGNMENT = 32  # bytes, of stores past the caches
_HALVES = (torch.bfloat16, torch.float16)
_log = logging.getLogger("lightning.pytorch.superpipeline")
_tried = threading.RLock()
Settings = Mapping[str, Any]
"""The keyword arguments of a fused operator."""


def update_in_one_pass(
    operator: Callable[..., Any],
    settings: Settings,
    weight: Tensor,
    gradient: Tensor,
    factors: Sequence[float],
    cast: Tensor | None,
    state: Sequence[Tensor | None],
) -> bool:
    """Updates one parameter as a fused operator does, after its gradient was widened and changed, and casts it.

    Args:
        operator: one of torch's for Adam, AdamW, SGD and Adagrad.
        settings: its keyword arguments.
        weight: float32, contiguous, on the host, as are all others. It is updated in place.
        gradient: of the same shape, float32 or 16 bits.
        factors: what the gradient is multiplied by, one after the other; at most two.
        cast: receives the new weight in 16 bits; None if there is no cast.
        state: what the operator takes in the columns behind gradients: float32 tensors of the weight's shape, which are updated
            in place, and the number of this step.

    Returns:
        Whether it has: otherwise nothing was done, and torch's operators are to do it.
    """
    kind, given = FUSED_STEPS[operator], [each for each in state if each is not None and each.shape == weight.shape]
    if not _suits(settings, weight, gradient, factors, cast, given):
        return False
    variant = _variant(kind, settings, gradient.dtype, None if cast is None else cast.dtype, len(factors))
    found = _checked(variant)
    if found is None:
        return False
    kernel, recipe = found
    _run(kernel, recipe, kind, settings, weight, gradient, factors, cast, given, state[-1])
    increment_version([weight, *given])
    return True


def _suits(
    settings: Settings,
    weight: Tensor,
    gradient: Tensor,
    factors: Sequence[float],
    cast: Tensor | None,
    state: Sequence[Tensor],
) -> bool:
    halves = [gradient.dtype] * (gradient.dtype is not torch.float32) + ([] if cast is None else [cast.dtype])
    return (
        weight.numel() >= LEAST
        and len(factors) <= 2
        and all(each.dtype is torch.float32 for each in (weight, *state))
        and all(dtype in _HALVES for dtype in halves)
        and (cast is None or cast.data_ptr() % _CAST_ALIGNMENT == 0)
        and settings.get("grad_scale") is None
        and settings.get("found_inf") is None
    )


def _variant(kind: Kind, settings: Settings, gradient: torch.dtype, cast: torch.dtype | None, factors: int) -> Variant:
    own: dict[str, bool] = {}
    if kind in ("adam", "adamw"):
        own = {"amsgrad": settings["amsgrad"], "near": abs(1 - settings["beta1"]) < 0.5}
    elif kind == "sgd":
        own = {
            "momentum": settings["momentum"] != 0,
            "first": settings["is_first_step"],
            "nesterov": settings["nesterov"],
        }
    decays = settings["weight_decay"] != 0
    return Variant(kind, gradient, cast, factors, settings["maximize"], decays, **own)


def _run(
    kernel: Compiled,
    recipe: Recipe,
    kind: Kind,
    settings: Settings,
    weight: Tensor,
    gradient: Tensor,
    factors: Sequence[float],
    cast: Tensor | None,
    state: Sequence[Tensor],
    step: Tensor | None,
) -> None:
    """Calls a kernel, with the numbers that torch's operator computes first, in double precision."""
    lr, decay = float(settings["lr"]), settings["weight_decay"]
    numbers = {f"factor{number}": factor for number, factor in enumerate(factors)} | {"decay": decay}
    if kind in ("adam", "adamw"):
        beta1, beta2, steps = settings["beta1"], settings["beta2"], float(step)  # type: ignore[arg-type]
        numbers |= {
            "step": -(lr / (1 - math.pow(beta1, steps))), "bias2": math.sqrt(1 - math.pow(beta2, steps)), "eps": settings["eps"],
            "rate1": 1 - beta1, "beyond1": _float(1 - beta1) - 1, "beta2": beta2, "rate2": 1 - beta2,
        }  # fmt: skip
        if kind == "adamw":
            numbers["decay"] = _decay(lr, decay) if recipe.fused else 1 - lr * decay
    elif kind == "sgd":
        numbers |= {"step": -lr, "momentum": settings["momentum"], "damping": 1 - settings["dampening"]}
    else:
        steps = float(step)  # type: ignore[arg-type]
        numbers |= {"step": -(lr / (1 + (steps - 1) * settings["lr_decay"])), "eps": settings["eps"]}
    places = {f"s{number}": each for number, each in enumerate(state)} | {"weight": weight, "gradient": gradient}
    if cast is not None:
        places["cast"] = cast
    arguments = Arguments(count=weight.numel(), **numbers, **{name: each.data_ptr() for name, each in places.items()})
    kernel.run(-(-weight.numel() // BLOCK), 1, arguments)


def _float(number: float) -> float:
    """A number as float32 has it."""
    return torch.tensor(number, dtype=torch.float32).item()


@cache
def _decay(lr: float, decay: float) -> float:
    """1 - lr · decay with one rounding, as torch's compiler has it."""
    exact = 1 - Fraction(lr) * Fraction(decay)
    return exact.numerator / exact.denominator


# ---------------------------------------------------------------------- whether a kernel has torch's bits


def available() -> bool:
    """Whether kernels are there, as far as that is known without one: llvmlite is installed, and torch runs them."""
    return (
        _checked(Variant("adamw", torch.bfloat16, torch.bfloat16, 0, maximize=False, decays=True, near=True))
        is not None
    )


@cache
def _checked(variant: Variant) -> tuple[Compiled, Recipe] | None:
    """A kernel that has torch's bits, with its recipe; None if there is none."""
    with _tried:
        for recipe in RECIPES:
            try:
                kernel = Compiled(update_text(variant, recipe))
            except ImportError:
                return None
            except (RuntimeError, OSError, AttributeError) as error:
                _log.debug(
                    "Superpipeline: no kernel of its own for %s: %s. torch's operators are used.", variant.kind, error
                )
                return None
            if _agrees(kernel, recipe, variant):
                return kernel, recipe
    _log.debug("Superpipeline: kernels for %s differ from torch's operators, which are used.", variant)
    return None


def _agrees(kernel: Compiled, recipe: Recipe, variant: Variant) -> bool:
    """Whether a kernel and torch's operators make the same bits of several tensors, of which most end within a vector."""
    with no_inference_mode(), no_dispatch_modes(), torch.no_grad(), torch.DisableTorchFunctionSubclass():
        return all(_agrees_on(*each, kernel, recipe, variant) for each in enumerate(_COUNTS))


_COUNTS = (4099, *[7] * 12)
"""Elements of the tensors that are compared. What torch's compiler rounds otherwise at the end shows in a few of them."""


def _agrees_on(seed: int, count: int, kernel: Compiled, recipe: Recipe, variant: Variant) -> bool:
    operator = next(each for each, kind in FUSED_STEPS.items() if kind == variant.kind)
    settings, generator = _settings(variant), torch.Generator().manual_seed(seed)

    def drawn() -> Tensor:
        return torch.randn(count, generator=generator)

    weight, gradient = drawn(), drawn().to(variant.gradient)
    gradient[count // 2] = torch.inf
    state: list[Tensor | None] = [drawn(), drawn().abs(), drawn().abs() if variant.amsgrad else None, torch.tensor(3.0)]
    if variant.kind == "sgd":
        state = [drawn() if variant.momentum else None]
    elif variant.kind == "adagrad":
        state = [drawn().abs(), torch.tensor(3.0)]
    factors = [0.75, 1 / 3][: variant.factors]
    theirs, ours = ([None if each is None else each.clone() for each in (weight, *state)] for _ in range(2))

    wide = gradient.to(torch.float32, copy=True)
    for factor in factors:
        wide.mul_(torch.tensor(factor))
    operator(*([] if each is None else [each] for each in (theirs[0], wide, *theirs[1:])), **settings)
    cast = None if variant.cast is None else torch.empty(count + 16, dtype=variant.cast)
    if cast is not None:
        cast = cast[-cast.data_ptr() // 2 % (_CAST_ALIGNMENT // 2) :][:count]
    moved = [each for each in ours[1:] if each is not None and each.shape == weight.shape]
    numbers = [_float(factor) for factor in factors]
    _run(kernel, recipe, variant.kind, settings, ours[0], gradient, numbers, cast, moved, ours[-1])  # type: ignore[arg-type]
    pairs = [*zip(theirs, ours, strict=True)] + ([] if cast is None else [(theirs[0].to(cast.dtype), cast)])  # type: ignore[union-attr]
    return all(each is None or _same(each, own) for each, own in pairs)  # type: ignore[arg-type]


def _same(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits, but for those of NaN."""
    return torch.equal(tensor.isnan(), other.isnan()) and torch.equal(tensor.nan_to_num(), other.nan_to_num())


def _settings(variant: Variant) -> dict[str, Any]:
    """Settings of such a variant, for torch's operator."""
    common = {"lr": 0.017, "weight_decay": 0.03 * variant.decays, "maximize": variant.maximize}
    if variant.kind in ("adam", "adamw"):
        beta1 = 0.9 if variant.near else 0.3
        return common | {"beta1": beta1, "beta2": 0.98, "eps": 1e-7, "amsgrad": variant.amsgrad}
    if variant.kind == "sgd":
        own = {"momentum": 0.8 * variant.momentum, "nesterov": variant.nesterov, "is_first_step": variant.first}
        return common | own | {"dampening": 0.0 if variant.nesterov else 0.1}
    return common | {"lr_decay": 0.01, "eps": 1e-7}
