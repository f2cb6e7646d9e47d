"""Updates a layer in a single pass over host memory: widens and multiplies the gradient, steps, and casts the weights.

torch's operators need a pass over memory for each of these tasks. A kernel needs one pass for all of them, with the same bits.
Each kernel is compared with torch's operators when it is compiled. If its results differ, it is not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sp_lightning.capabilities.kernels import gpu
from sp_lightning.capabilities.kernels.gpu import Outcome, Settings, same, settings_of
from sp_lightning.capabilities.kernels.jit import Compiled, address, find_kernel
from sp_lightning.capabilities.kernels.variants import (
    BLOCK,
    RECIPES,
    Arguments,
    GpuRecipe,
    Like,
    Recipe,
    Variant,
    float32,
    is_near,
)
from sp_lightning.core.device.host_kernels import HALVES, Operands
from sp_lightning.core.torch_compat.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.core.torch_compat.private import FUSED_STEPS

LEAST = 1 << 14
"""Elements of the smallest tensor for which a kernel is faster than torch's operators."""

CAST_ALIGNMENT = 32  # bytes, of stores past the caches
_LEAST_BETA = 1e-6  # with a smaller first beta, the sign of a zero in Adam's average differs from torch's
_PAIR = 16
"""Elements of two vectors. torch updates this many 16-bit weights at a time, and the rest of a tensor one by one.

The rest is left to torch's operator: too few results show how its compiler rounds there."""
AnyRecipe = Recipe | GpuRecipe


def update_in_one_pass(
    operator: Callable[..., Any],
    settings: Settings,
    operands: Operands,
    factors: Sequence[float],
    like: Like | None = None,
) -> bool:
    """Widens and multiplies a gradient, updates its weight as a fused operator does, and casts the new weight.

    Args:
        operator: torch's fused operator for Adam, AdamW, SGD or Adagrad.
        settings: the operator's keyword arguments.
        operands: contiguous tensors.
        factors: the gradient is multiplied by each of these, one after the other.
        like: the GPU whose bits the update has; None for the bits of the operator on the CPU.

    Returns:
        True if the update is done. If False, nothing was done, and torch's operators must do the update.

    Raises:
        ZeroDivisionError: with ``like``, Adam's first beta is 1.
    """
    if not _suits(settings, operands, factors, like):
        return False
    variant = _variant(FUSED_STEPS[operator], settings, operands, len(factors), like)
    # No kernel runs if a tensor of the state is missing or has another shape than the weight.
    found = _checked(variant) if len(operands.moments) == variant.moments else None
    if found is None:
        return False
    kernel, recipe = found
    if like is not None:
        _run(kernel, operands, _numbers(recipe, variant, settings, operands, factors), operands.weight.numel())
        # A kernel writes through addresses, so torch has not counted its writes.
        written = [operands.gradient] if variant.writes_gradient else []
        increment_version([operands.weight, *written, *operands.moments])
        return True
    try:
        numbers = _numbers(recipe, variant, settings, operands, factors)
    except (ArithmeticError, ValueError):  # training with these settings ends in NaN
        return False
    count = operands.weight.numel()
    if operands.weight.dtype in HALVES:
        whole = count - count % _PAIR
        if whole < count:
            operator(*operands.columns(begin=whole), **settings)
        count = whole
    _run(kernel, operands, numbers, count)
    increment_version([operands.weight, *operands.moments])
    return True


def _suits(settings: Settings, operands: Operands, factors: Sequence[float], like: Like | None) -> bool:
    """Returns True if kernels support these settings and operands. Without ``like``, small tensors are left to torch."""
    cast, gradient, dtype = operands.cast, operands.gradient.dtype, operands.weight.dtype
    return (
        operands.weight.numel() >= (LEAST if like is None else 1)
        and len(factors) <= 2
        and all(each.dtype is dtype for each in operands.moments)
        and gradient in ((torch.float32, *HALVES) if dtype is torch.float32 else (dtype,))
        and (dtype is torch.float32 or (dtype in HALVES and cast is None and not factors))
        and operands.gradient.shape == operands.weight.shape
        and (cast is None or (cast.dtype in HALVES and cast.data_ptr() % CAST_ALIGNMENT == 0))
        and (cast is None or cast.shape == operands.weight.shape)
        and (like is not None or settings.get("beta1", 1.0) > _LEAST_BETA)
        and settings.get("grad_scale") is None
        and settings.get("found_inf") is None
    )


def _variant(kind: Any, settings: Settings, operands: Operands, factors: int, like: Like | None) -> Variant:
    own: dict[str, Any] = {}
    if kind in ("adam", "adamw"):
        own = {"amsgrad": settings["amsgrad"], "near": is_near(settings["beta1"])}
    elif kind == "sgd":
        momentum = settings["momentum"] != 0
        own = {"momentum": momentum, "first": settings["is_first_step"], "nesterov": settings["nesterov"]}
    cast, decays = None if operands.cast is None else operands.cast.dtype, float(settings["weight_decay"]) != 0
    own |= {"weight": operands.weight.dtype, "like": like}
    return Variant(kind, operands.gradient.dtype, cast, factors, settings["maximize"], decays, **own)


def _numbers(
    recipe: AnyRecipe, variant: Variant, settings: Settings, operands: Operands, factors: Sequence[float]
) -> dict[str, float]:
    """Returns the numbers that all elements share. torch's operator computes them first, in double precision."""
    lr, decay = float(settings["lr"]), float(settings["weight_decay"])
    numbers = {f"factor{at}": factor for at, factor in enumerate(factors)} | {"decay": decay}
    steps = 0.0 if variant.kind == "sgd" else float(operands.state[-1])  # type: ignore[arg-type]
    if isinstance(recipe, GpuRecipe):
        return numbers | gpu.numbers(variant, settings, steps)
    if variant.kind in ("adam", "adamw"):
        beta1, beta2, rate = settings["beta1"], settings["beta2"], 1 - settings["beta1"]
        numbers |= {
            "step": -(lr / (1 - math.pow(beta1, steps))), "bias2": math.sqrt(1 - math.pow(beta2, steps)), "eps": settings["eps"],
            "rate1": rate, "beyond1": float32(rate) - 1, "beta2": beta2, "rate2": 1 - beta2,
        }  # fmt: skip
        if variant.kind == "adamw":
            numbers["decay"] = _decay(lr, decay) if recipe.fused else 1 - lr * decay
    elif variant.kind == "sgd":
        numbers |= {"step": -lr, "momentum": settings["momentum"], "damping": 1 - settings["dampening"]}
    else:
        numbers |= {"step": -(lr / (1 + (steps - 1) * settings["lr_decay"])), "eps": settings["eps"]}
    return numbers


def _run(kernel: Compiled, operands: Operands, numbers: Mapping[str, float], count: int) -> None:
    places = {f"s{at}": each for at, each in enumerate(operands.moments)}
    places |= {"weight": operands.weight, "gradient": operands.gradient}
    places |= {} if operands.cast is None else {"cast": operands.cast}
    arguments = Arguments(count=count, **numbers, **{name: address(each, name) for name, each in places.items()})
    kernel.run(-(-count // BLOCK), 1, arguments)


@lru_cache(1024)
def _decay(lr: float, decay: float) -> float:
    """Returns 1 - lr · decay, rounded once, because torch's compiler fuses the product and the difference."""
    exact = 1 - Fraction(lr) * Fraction(decay)
    return exact.numerator / exact.denominator


# ---------------------------------------------------------------------- comparison of kernels with torch's operators


@cache
def _checked(variant: Variant) -> tuple[Compiled, AnyRecipe] | None:
    """Returns a kernel that has torch's bits, with its recipe; None if no kernel has them.

    For the bits of a GPU, only the kernel of the plain update is compared with the GPU. The kernels of its other variants use the
    same recipe, and are compared with this kernel.
    """
    if variant.like is None:
        return find_kernel(variant, RECIPES, partial(_agrees, variant))
    plain = gpu.find_confirmed(variant.plain, _run_plain)
    if plain is None or variant == variant.plain:
        return plain
    return find_kernel(variant, [plain[1]], partial(_agrees, variant))


def is_confirmed(variant: Variant) -> bool:
    """Returns True if a kernel has the bits of the GPU in ``variant.like``. The first call compiles kernels and compares them."""
    return _checked(variant.plain) is not None


def _run_plain(
    kernel: Compiled, weight: Tensor, gradient: Tensor, state: Outcome, numbers: Mapping[str, float]
) -> None:
    _run(kernel, Operands(weight, gradient, None, state), numbers, weight.numel())


_COUNTS = (4099, *[7] * 12)
"""The numbers of elements of the compared tensors. If torch's compiler rounds in another way at the end of a tensor, only a few
of the small tensors show it."""
_COUNTS_OF_HALVES = (1 << 20,) * 4
"""The same for 16-bit weights. If float32 results differ in the last bit, about one of 65,000 results in bfloat16 differs."""


def _agrees(variant: Variant, kernel: Compiled, recipe: AnyRecipe) -> bool:
    """Returns True if a kernel and torch's operators have the same results for several tensors. Most tensors end within a vector.

    For the bits of a GPU, the kernel of the plain update replaces torch's operators: it was compared with the GPU before.
    """
    with no_inference_mode(), no_dispatch_modes(), torch.no_grad(), torch.DisableTorchFunctionSubclass():
        counts = _COUNTS if variant.weight is torch.float32 else _COUNTS_OF_HALVES
        return all(_agrees_on(*each, variant, kernel, recipe) for each in enumerate(counts))


def _agrees_on(seed: int, count: int, variant: Variant, kernel: Compiled, recipe: AnyRecipe) -> bool:
    settings, generator = settings_of(variant), torch.Generator("cpu").manual_seed(seed)
    # Dtype and device are explicit: users may have set other defaults.
    drawn = (torch.randn(count, generator=generator, dtype=torch.float32, device="cpu") for _ in range(5))
    weight, gradient, *moments = (each.to(variant.weight) for each in drawn)
    gradient[count // 2], gradient = torch.inf, gradient.to(variant.gradient)
    state: list[Any] = [moments[0], moments[1].abs(), moments[2].abs() if variant.amsgrad else None, _step()]
    if variant.kind in ("sgd", "adagrad"):
        state = [moments[0] if variant.momentum else None] if variant.kind == "sgd" else [moments[1].abs(), state[-1]]
    cast = None if variant.cast is None else _aligned(count, variant.cast)
    theirs: list[Any]
    ours: list[Any]
    theirs, ours = ([each if each is None else each.clone() for each in (weight, *state)] for _ in range(2))
    factors = [float32(0.7), float32(1 / 3)][: variant.factors]
    wide = gradient.to(variant.weight, copy=True)  # copied now, because a kernel may write the gradient
    operands = Operands(ours[0], gradient, cast, ours[1:])
    _run(kernel, operands, _numbers(recipe, variant, settings, operands, factors), count)

    for factor in factors:
        wide.mul_(factor)
    operator: Any = next(each for each, kind in FUSED_STEPS.items() if kind == variant.kind)
    if variant.like is None:
        operator(*([] if each is None else [each] for each in (theirs[0], wide, *theirs[1:])), **settings)
    else:
        assert update_in_one_pass(operator, settings, Operands(theirs[0], wide, None, theirs[1:]), [], variant.like)
    pairs = [*zip(theirs, ours, strict=True), *([] if cast is None else [(theirs[0].to(cast.dtype), cast)])]
    return all(same(each, own) for each, own in pairs)


def _step() -> Tensor:
    return torch.full((), 3.0, dtype=torch.float32, device="cpu")


def _aligned(count: int, dtype: torch.dtype) -> Tensor:
    memory = torch.empty(count + CAST_ALIGNMENT, dtype=dtype, device="cpu")
    return memory[-memory.data_ptr() // 2 % (CAST_ALIGNMENT // 2) :][:count]
