"""Updates on the CPU that have the bits of torch's optimizers on a GPU.

The optimizer of an unchanged program steps on the GPU, where torch's operators round in another way than on the CPU. torch's
source shows nearly all of this rounding. The rest are choices of nvcc, which are tried one after the other: a kernel is used only
if its results are bit-identical to those of torch's own optimizer on this GPU, for a sample of numbers that distinguishes all
choices. If no kernel's results are, torch's operators step on the CPU, and the last bits differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from sp_lightning.capabilities.kernels.jit import Compiled, find_kernel
from sp_lightning.capabilities.kernels.variants import GpuRecipe, Variant, float32, gpu_recipes
from sp_lightning.core.torch_compat.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.core.torch_compat.private import step_as_torch

Settings = Mapping[str, Any]
"""The keyword arguments of a fused operator."""
Run = Callable[[Compiled, Tensor, Tensor, list[Tensor | None], dict[str, float]], None]
"""A function that runs a kernel. Arguments: the kernel, a weight, its gradient, its state, and the result of :func:`numbers`."""

_COUNT, _COUNT_OF_HALVES = 1 << 16, 1 << 18
"""Elements of a sample in float32, and of a sample in 16 bits: more, because few 16-bit results show how float32 was rounded."""
_STEPS = {
    1.0: slice(None), 2.0: slice(1, None), 3.0: slice(-1), 7.0: slice(None), 31.0: slice(3, -1), 1000.0: slice(-2),
    54321.0: slice(None),
}  # fmt: skip
"""The step numbers at which results are compared, each with the compared part of the sample.

Each step has another bias correction. torch's operators on a GPU have two loops, which nvcc compiles separately: one for tensors
that begin at a multiple of four elements and have a multiple of four elements, and one for all others."""
_TABLE = 256
"""The number of consecutive steps for which the GPU computes the powers of a beta at once."""


def numbers(variant: Variant, settings: Settings, steps: float) -> dict[str, float]:
    """Returns the numbers that all elements share, as torch computes them: ``foreach`` in Python, ``fused`` on the GPU.

    Args:
        variant: the update.
        settings: the keyword arguments of the fused operator.
        steps: the number of this step; the first is 1.

    Raises:
        ZeroDivisionError: Adam's first beta is 1. torch's ``foreach`` optimizer raises the same error.
    """
    assert variant.like is not None
    lr, decay = float(settings["lr"]), float(settings["weight_decay"])
    if variant.kind == "sgd":
        momentum, damping = settings["momentum"], 1 - settings["dampening"]
        return {"decay": decay, "step": -lr, "momentum": momentum, "damping": damping}
    eps = settings["eps"]
    if variant.kind == "adagrad":
        return {"decay": decay, "step": -lr / (1 + (steps - 1) * settings["lr_decay"]), "eps": eps}
    beta1, beta2 = settings["beta1"], settings["beta2"]
    if variant.like.form == "fused":
        bias1, bias2 = (_bias(variant.like.device, beta, int(steps)) for beta in (beta1, beta2))
        # The GPU computes these numbers in float32. A product, quotient or root of float32 numbers that is computed in double
        # precision and then rounded to float32 is equal to the exact result, rounded once.
        lr32 = float32(lr)
        decayed = float32(lr32 * float32(decay)) if variant.kind == "adamw" else decay
        numbers = {"beta1": beta1, "beta2": beta2, "decay": decayed, "eps": eps}
        return numbers | {"step": float32(lr32 / bias1), "bias2": math.sqrt(bias2)}
    rate = 1 - beta1
    return {
        "rate1": rate, "beyond1": float32(rate) - 1, "beta2": beta2,
        "rate2": 1 - beta2, "bias2": (1 - beta2**steps) ** 0.5, "step": (lr / (1 - beta1**steps)) * -1, "eps": eps,
        "decay": 1 - lr * decay if variant.kind == "adamw" else decay,
    }  # fmt: skip


def _bias(device: torch.device, beta: float, steps: int) -> float:
    """Returns 1 - beta ** steps in float32 as the GPU computes it: the GPU's ``powf`` differs from the CPU's."""
    return float(_bias_table(device, beta, steps // _TABLE)[steps % _TABLE])


@lru_cache(64)
def _bias_table(device: torch.device, beta: float, part: int) -> Tensor:
    """Returns 1 - beta ** steps for :data:`_TABLE` numbers of steps, from ``part * _TABLE`` on, in host memory."""
    steps = torch.arange(part * _TABLE, (part + 1) * _TABLE, dtype=torch.float32, device=device)
    return (1 - torch.pow(torch.full_like(steps, beta), steps)).cpu()


# ---------------------------------------------------------------------- comparison of kernels with the GPU


@cache
def find_confirmed(variant: Variant, run: Run) -> tuple[Compiled, GpuRecipe] | None:
    """Returns a kernel whose results equal those of torch's optimizer on the GPU, with its recipe; None if no kernel's do.

    The first call for a variant compiles kernels and compares them.

    Args:
        variant: an update without casts and changes of the gradient (:attr:`Variant.plain`).
        run: runs a kernel. It is an argument because its file, ``update``, imports this one.
    """
    assert variant.like is not None
    recipes = gpu_recipes(variant)
    if variant.weight is not torch.float32:
        # 16-bit results hide how float32 was rounded, so the recipe is that of float32 weights: the operators' source is the same
        # for all dtypes. The kernel is compared in 16 bits as well.
        of_float32 = find_confirmed(replace(variant, weight=torch.float32).plain, run)
        recipes = [] if of_float32 is None else [of_float32[1]]
    drawn = cache(partial(sample, variant))
    expected = cache(partial(_expected, variant, drawn))  # the GPU computes each step once, for all recipes
    return find_kernel(variant, recipes, partial(_agrees, variant, drawn, expected, run))


Outcome = list[Tensor | None]
"""A weight and its state after an update. In a sample, the gradient is between the two."""


def _expected(variant: Variant, drawn: Callable[[], Outcome], steps: float) -> Outcome:
    """Returns the sample's weight and state after step number ``steps`` of torch's optimizer on the GPU, in host memory."""
    assert variant.like is not None
    # The part is taken on the GPU, because a copy of the part alone would begin at a multiple of four elements.
    weight, gradient, *state = [
        each if each is None else each.to(variant.like.device, copy=True)[_STEPS[steps]] for each in drawn()
    ]
    assert weight is not None
    assert gradient is not None
    state = step_as_torch(variant.kind, variant.like.form, weight, gradient, state, steps, settings_of(variant))
    return [each if each is None else each.cpu() for each in (weight, *state)]


def _agrees(
    variant: Variant,
    drawn: Callable[[], Outcome],
    expected: Callable[[float], Outcome],
    run: Run,
    kernel: Compiled,
    _: GpuRecipe,
) -> bool:
    """Returns True if a kernel updates the sample with the GPU's bits at each of :data:`_STEPS`."""
    with no_inference_mode(), no_dispatch_modes(), torch.no_grad(), torch.DisableTorchFunctionSubclass():
        for steps, part in _STEPS.items():
            weight, gradient, *state = [each if each is None else each[part].clone() for each in drawn()]
            assert weight is not None
            assert gradient is not None
            run(kernel, weight, gradient, state, numbers(variant, settings_of(variant), steps))
            if not all(same(*pair) for pair in zip(expected(steps), (weight, *state), strict=True)):
                return False
        return True


def same(tensor: Tensor | None, other: Tensor | None) -> bool:
    """Returns True if two tensors have the same bits, signs of zeros included. Bits of NaN are not compared."""
    if tensor is None or other is None:
        return tensor is other
    kind = torch.int32 if tensor.dtype is torch.float32 else torch.int16
    mine, others = (torch.where(each.isnan(), torch.nan, each).view(kind) for each in (tensor, other))
    return torch.equal(mine, others)


def sample(variant: Variant) -> list[Tensor | None]:
    """Returns a weight, its gradient, and its state, such that the results of all recipes of a variant differ.

    A third of the elements have normally distributed values. Another third have all exponents, subnormal numbers included. In
    that third, the weight, the gradient and the state of one element have about the same exponent: otherwise one of them alone
    would decide a sum. The other elements have zeros, infinities, NaN, and the least and largest numbers.
    """
    dtype = variant.weight
    count = _COUNT if dtype is torch.float32 else _COUNT_OF_HALVES
    # Devices and dtypes are explicit: users may have set other defaults.
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    part, least = count // 3, torch.finfo(dtype).smallest_normal
    exponents = torch.randint(-150, 129, (part,), generator=generator, device="cpu").to(torch.float64)
    usual, scaled = normal(5, part), normal(5, part) * torch.pow(2.0, exponents)
    special = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, math.nan, least, least / 4, -least / 8, torch.finfo(dtype).max, 1.0, -1.0],
        dtype=torch.float64, device="cpu",
    )  # fmt: skip
    chosen = torch.randint(len(special), (5, count - 2 * part), generator=generator, device="cpu")
    weight, gradient, average, squares, largest = torch.cat([usual, scaled, special[chosen]], dim=1)
    # These two hold squares of gradients, so they are not negative.
    squares, largest = (torch.cat([each[: 2 * part].square(), each[2 * part :].abs()]) for each in (squares, largest))
    made = {"weight": weight, "gradient": gradient, "average": average, "squares": squares, "largest": largest}
    of = {name: each.to(torch.float32).to(dtype) for name, each in made.items()}
    state: list[Tensor | None] = [of["squares"]]  # Adagrad
    if variant.kind in ("adam", "adamw"):
        state = [of["average"], of["squares"], of["largest"] if variant.amsgrad else None]
    elif variant.kind == "sgd":
        state = [of["average"] if variant.momentum else None]
    return [of["weight"], of["gradient"], *state]


def settings_of(variant: Variant) -> dict[str, Any]:
    """Returns keyword arguments of torch's fused operator with which the kernels of a variant are compared."""
    # A fused AdamW step multiplies weight decay by the learning rate. With a small decay, few results show how this product was
    # rounded.
    large = variant.like is not None and variant.like.form == "fused"
    common = {"lr": 0.017, "weight_decay": (5.1 if large else 0.03) * variant.decays, "maximize": variant.maximize}
    if variant.kind in ("adam", "adamw"):
        return common | {"beta1": 0.9 if variant.near else 0.3, "beta2": 0.98, "eps": 1e-7, "amsgrad": variant.amsgrad}
    if variant.kind == "adagrad":
        return common | {"lr_decay": 0.01, "eps": 1e-7}
    own = {"momentum": 0.8 * variant.momentum, "nesterov": variant.nesterov, "is_first_step": variant.first}
    own["lr"] = 0.7  # with a small one, few sums show how the product of rate and gradient was rounded
    return common | own | {"dampening": 0.0 if variant.nesterov else 0.1}
