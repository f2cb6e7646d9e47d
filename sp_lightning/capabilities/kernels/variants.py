"""Descriptions of kernels: their arguments, the variants of updates, and *recipes*, which describe how torch was compiled.

torch's source does not show how torch's compiler rounds products and sums. The recipes were found by comparing bits, and are
compared again when a kernel is compiled. The products that are added with one rounding (``fma``) are not the same in a vector and
in the rest at the end of a tensor. A processor without ``fma``, or with shorter vectors, has another recipe.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch

from sp_lightning.core.torch_compat.private import Kind

BLOCK = 32
"""The least number of elements of a thread, a multiple of torch's 16. So only one thread has elements that do not fill a vector:
the thread with the tensor's end."""


def float32(number: float) -> float:
    """Returns a number rounded to float32."""
    return ctypes.c_float(number).value


def is_near(beta1: float) -> bool:
    """Returns True if Adam's average moves by less than half of the way to the gradient. torch has a formula for each case."""
    return abs(float32(1 - beta1)) < 0.5


_POINTERS = ("weight", "gradient", "cast", "s0", "s1", "s2")
_NUMBERS = (
    "factor0", "factor1", "decay", "step", "rate1", "beyond1", "beta1", "beta2", "rate2", "bias2", "eps", "momentum", "damping",
)  # fmt: skip


class Arguments(ctypes.Structure):
    """The arguments of an update: addresses, the number of elements, and numbers that are the same for all elements."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_float) for name in _NUMBERS),
    ]


class NormArguments(ctypes.Structure):
    """The arguments of norms: arrays with the addresses of gradients, their numbers of elements, and their norms."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("gradients", "counts", "norms")]


@dataclass(frozen=True)
class Recipe:
    """How torch's operators were compiled for a kind of processor.

    Attributes:
        width: elements of a vector.
        fused: True if a product is added with one rounding. In vectors only the products are that torch's source fuses, and
            the one in ``contracted``.
        contracted: the product that the compiler fuses in vectors of its own accord, if it has a choice; None if it fuses none.
    """

    width: int
    fused: bool
    contracted: Literal["first", "second"] | None


RECIPES = (
    Recipe(8, fused=True, contracted="second"),
    Recipe(8, fused=False, contracted=None),
    Recipe(4, fused=True, contracted="first"),
    Recipe(8, fused=True, contracted=None),
)
"""Recipes of AVX2, which processors with AVX-512 use as well; of x86-64 without AVX2; of NEON; of SVE with 256 bits. They are
tried in this order."""


Form = Literal["foreach", "fused"]
"""One of torch's two ways to step on a GPU: ``foreach`` is the default, ``fused`` is ``fused=True``."""


@dataclass(frozen=True)
class Like:
    """The reference of an update: torch's optimizer on a device.

    Attributes:
        device: the GPU.
        form: the operators of torch that step on the GPU.
    """

    device: torch.device
    form: Form


@dataclass(frozen=True)
class GpuRecipe:
    """How nvcc has compiled those parts of torch's operators for a GPU for which it has a choice.

    nvcc may compute a · b + c with one rounding (``fma``) or with two. Within one operator its choice is always the same.

    Attributes:
        usual: the names in :data:`OPEN` for which nvcc has made its usual choice.
        width: elements of a vector on the CPU. It does not change results.
    """

    usual: frozenset[str]
    width: int = 8


OPEN: dict[tuple[Kind, Form], tuple[str, ...]] = {
    ("adam", "foreach"): ("add", "lerp", "addcmul", "addcdiv", "div"),
    ("adamw", "foreach"): ("lerp", "addcmul", "addcdiv", "div"),
    ("sgd", "foreach"): ("add",),
    ("adagrad", "foreach"): ("add", "addcmul"),
    ("adam", "fused"): ("decay",),
    ("adamw", "fused"): ("decay",),
}
"""The operators for which nvcc has a choice, by optimizer and form. Usually their sums are rounded once; otherwise twice. ``div``
usually divides a root by a number; otherwise it multiplies by the reciprocal. ``decay`` is a line of the fused operator.

In torch 2.10 nvcc has a choice for ``addcmul`` and ``addcdiv``; later versions call ``std::fma``. The fused operators of torch
2.10, and those of SGD and Adagrad in all versions, compute in double precision. These formulas are not supported."""


def gpu_recipes(variant: Variant) -> list[GpuRecipe]:
    """Returns all ways in which nvcc may have compiled a variant's operators, the likeliest first.

    The list is empty if the formulas of the optimizer and its form are not supported.
    """
    assert variant.like is not None
    names = OPEN.get((variant.kind, variant.like.form))
    if names is None:
        return []
    if not variant.decays:  # operators that are used only for weight decay have no effect
        names = tuple(name for name in names if not (name == "decay" or (name == "add" and variant.kind != "sgd")))
    choices = product((True, False), repeat=len(names))
    return [GpuRecipe(frozenset(name for name, fused in zip(names, each, strict=True) if fused)) for each in choices]


@dataclass(frozen=True)
class Variant:
    """A kind of update. Each has its own kernel, so that no element needs a decision.

    Attributes:
        kind: the optimizer.
        gradient: the dtype of the gradient.
        cast: the dtype that new weights are cast to; None if they are not cast.
        factors: how many numbers the gradient is multiplied by first, to unscale and to clip it.
        maximize, decays, amsgrad, momentum, nesterov: the optimizer's settings.
        near: for Adam, True if the average moves by less than half of the way to the gradient. torch has a formula for each case.
        first: for SGD, True if there is no momentum yet.
        weight: the dtype of the weight and of its state: float32, or 16 bits like the gradient's. 16-bit values are read as
            float32, and rounded when they are stored. With ``foreach`` on a GPU, the result of each operator is rounded as well.
        like: the GPU whose bits the update has; None for the bits of torch's fused operators on the CPU.
    """

    kind: Kind
    gradient: torch.dtype
    cast: torch.dtype | None
    factors: int
    maximize: bool
    decays: bool
    amsgrad: bool = False
    near: bool = False
    momentum: bool = False
    first: bool = False
    nesterov: bool = False
    weight: torch.dtype = torch.float32
    like: Like | None = None

    @property
    def writes_gradient(self) -> bool:
        """True if torch's step writes the gradient.

        It adds Nesterov momentum to the gradient in place, if neither weight decay nor ``maximize`` has made a copy first.
        """
        foreach = self.like is not None and self.like.form == "foreach"
        return foreach and self.nesterov and not (self.decays or self.maximize) and self.gradient is self.weight

    @property
    def plain(self) -> Variant:
        """The update alone: its gradient has the weight's dtype, nothing changes it, and the new weight is not cast."""
        return replace(self, gradient=self.weight, cast=None, factors=0)

    @property
    def moments(self) -> int:
        """How many tensors of the weight's size the state has."""
        return {"adam": 2, "adamw": 2, "sgd": int(self.momentum), "adagrad": 1}[self.kind] + self.amsgrad


# Sizes of torch's ``foreach`` operators (``MultiTensorApply.cuh``, ``block_reduce.cuh``).
CHUNK = 65536
"""Elements of a tensor that one block of threads reads."""
THREADS = 512
"""Threads of a block."""
EACH = 4
"""Elements that a thread reads at a time."""
WARP = 32
"""Threads of a warp, which add up their sums together."""


class GpuNormArguments(ctypes.Structure):
    """Arguments of a GPU's norms: arrays with each chunk's address, number of elements, order of reading, and sum."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("chunks", "counts", "in_fours", "sums")]


@dataclass(frozen=True)
class GpuNormRecipe:
    """How nvcc has compiled ``_foreach_norm``.

    Attributes:
        fused: True if squares are added with one rounding, as usual.
    """

    fused: bool


@dataclass(frozen=True)
class NormRecipe:
    """How torch's compiler adds squares: with one rounding or with two, in vectors and in the rest at the end of a tensor.

    Attributes:
        width: elements of a vector.
        vectors: whether squares in vectors are added with one rounding.
        last: the squares of the rest that are added with one rounding: those after the last whole four, all, or none.
    """

    width: int
    vectors: bool
    last: Literal["rest", "all", "none"]


NORM_RECIPES = (
    NormRecipe(8, False, "rest"),
    NormRecipe(8, False, "none"),
    NormRecipe(4, True, "all"),
    NormRecipe(4, True, "none"),
)
"""Recipes of AVX2; of x86-64 without AVX2, and of SVE with 256 bits; of NEON; of SVE with 128 bits."""
