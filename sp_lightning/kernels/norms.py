"""Norms of gradients in 16 bits, as torch has them of the widened gradients: read once, and several side by side.

torch adds squares up in one chain, from the first element to the last: in the lanes of a vector, then lane by lane, then what is
left. So one thread has all of a gradient. Squares of 16-bit numbers are exact but for those of numbers below 1e-19.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Literal

import torch
from torch import Tensor

from sp_lightning.device.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.kernels.ir import RECIPES, Elements, Function, Variant, declarations
from sp_lightning.kernels.jit import Compiled, compile_or_none

_AHEAD = 2048  # elements that are fetched from memory before they are read
_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Recipe:
    """How torch's compiler adds squares: in vectors of ``width`` elements, and what is left, with one rounding or with two.

    Attributes:
        vectors: whether in a vector there is one.
        last: of what is left, which squares are added with one: those that are no whole four, all, or none.
    """

    width: int
    vectors: bool
    last: Literal["rest", "all", "none"]


# Those of AVX2; of x86-64 without, and of SVE with 256 bits; of NEON; and of SVE with 128 bits.
_RECIPES = (_Recipe(8, False, "rest"), _Recipe(8, False, "none"), _Recipe(4, True, "all"), _Recipe(4, True, "none"))


class _Arguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("gradients", "counts", "norms")]


def norms_of(gradients: Sequence[Tensor]) -> dict[int, Tensor]:
    """The norms of some gradients, each of the gradient in float32.

    Args:
        gradients: on the host.

    Returns:
        A float32 tensor without dimensions, by the ``id`` of the gradient, for each that a kernel can read.
    """
    found = dict[int, Tensor]()
    for dtype in _DTYPES:
        dense = [each for each in gradients if each.dtype is dtype and each.is_contiguous() and each.numel() > 1]
        if dense and (kernel := _checked(dtype)) is not None:
            found |= zip(map(id, dense), _run(kernel, dense), strict=True)
    return found


def _run(kernel: Compiled, gradients: Sequence[Tensor]) -> list[Tensor]:
    found, many = torch.empty(len(gradients), dtype=torch.float32, device="cpu"), ctypes.c_int64 * len(gradients)
    places, counts = many(*(each.data_ptr() for each in gradients)), many(*(each.numel() for each in gradients))
    kernel.run(len(gradients), 1, _Arguments(ctypes.addressof(places), ctypes.addressof(counts), found.data_ptr()))
    return list(found.unbind())


@cache
def _checked(dtype: torch.dtype) -> Compiled | None:
    """The kernel that has torch's bits; None if there is none."""
    for recipe in _RECIPES:
        kernel = compile_or_none(_Text(recipe, dtype).whole())
        if kernel is None:
            return None
        if _agrees(kernel, dtype):
            return kernel
    return None


def _agrees(kernel: Compiled, dtype: torch.dtype) -> bool:
    with no_inference_mode(), no_dispatch_modes(), torch.no_grad(), torch.DisableTorchFunctionSubclass():
        generator, gradients = torch.Generator("cpu").manual_seed(0), list[Tensor]()
        for count in (4099, 100_000, *range(2, 40)):  # users may have set another default dtype or device
            drawn = torch.randn(count, generator=generator, dtype=torch.float32, device="cpu")
            gradients += [(drawn * scale).to(dtype) for scale in (1.0, 1e-21, 1e-23, 1e15)]
        theirs = [torch.linalg.vector_norm(each.to(torch.float32)) for each in gradients]
        return all(map(torch.equal, _run(kernel, gradients), theirs))


class _Text:
    """A function ``void run(i64 begin, i64 end, ptr arguments)``; begin and end count gradients.

    Args:
        recipe: how torch's compiler has made its own.
        dtype: of the gradients.
    """

    def __init__(self, recipe: _Recipe, dtype: torch.dtype) -> None:
        self._function = Function()
        self._recipe = recipe
        self._width = recipe.width
        self._vector = f"<{recipe.width} x float>"
        # An update widens gradients in the same way.
        self._update = Variant("sgd", dtype, None, 0, maximize=False, decays=False)

    def whole(self) -> str:
        """All of it."""
        function = self._function
        function.add("define void @run(i64 %begin, i64 %end, ptr %arguments) {", "entry:")
        function.add(f"  %sums = alloca {self._vector}, align 32", "  %sum = alloca float, align 4")
        for at, name in enumerate(("gradients", "counts", "norms")):
            function.add(f"  %p.{name} = getelementptr ptr, ptr %arguments, i64 {at}")
            function.add(f"  %{name} = load ptr, ptr %p.{name}")
        function.add("  br label %each.test")
        function.loop("each", "%begin", "entry", "%end", 1, "done", self._each)
        more = "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"
        return "\n".join([*function.lines, "done:", "  ret void", "}", declarations(self._width), more])

    def _each(self, index: str) -> None:
        function, vector, width = self._function, self._vector, self._width
        for name, kind in (("gradients", "ptr"), ("counts", "i64")):
            function.add(f"  %of.{name} = getelementptr {kind}, ptr %{name}, i64 {index}")
        function.add("  %gradient = load ptr, ptr %of.gradients", "  %count = load i64, ptr %of.counts")
        for name, size in (("vectors", width), ("fours", 4)):
            function.add(f"  %left.{name} = srem i64 %count, {size}", f"  %in.{name} = sub i64 %count, %left.{name}")
        function.add(f"  store {vector} zeroinitializer, ptr %sums", "  br label %vector.test")
        function.loop("vector", "0", "each", "%in.vectors", width, "vectors.done", self._add_vector)
        function.add("vectors.done:", f"  %lanes = load {vector}, ptr %sums")
        lanes = [function.value(f"extractelement {vector} %lanes, i64 {lane}") for lane in range(width)]
        total = reduce(lambda total, lane: function.value(f"fadd float {total}, {lane}"), lanes)
        function.add(f"  store float {total}, ptr %sum", "  br label %last.test")
        function.loop("last", "%vector.index", "vectors.done", "%count", 1, "last.done", self._add_one)
        function.add("last.done:", "  %whole = load float, ptr %sum")
        root = function.value("call float @llvm.sqrt.f32(float %whole)")
        place = function.value(f"getelementptr float, ptr %norms, i64 {index}")
        function.add(f"  store float {root}, ptr {place}")

    def _add_vector(self, index: str) -> None:
        place = self._function.value(f"getelementptr i16, ptr %gradient, i64 {index}")
        ahead = self._function.value(f"getelementptr i16, ptr {place}, i64 {_AHEAD}")
        self._function.add(f"  call void @llvm.prefetch.p0(ptr {ahead}, i32 0, i32 3, i32 1)")
        before, square, wide = self._squared(index, self._width, self._vector, "%sums")
        after = self._function.value(f"fadd {self._vector} {before}, {square}")
        if self._recipe.vectors:
            of = ", ".join(f"{self._vector} {each}" for each in (wide, wide, before))
            after = self._function.value(f"call {self._vector} @llvm.fma.v{self._width}f32({of})")
        self._function.add(f"  store {self._vector} {after}, ptr %sums")

    def _add_one(self, index: str) -> None:
        """What is left. For AVX2 torch's compiler squares four at a time, and adds those of the rest otherwise."""
        value = self._function.value
        before, square, wide = self._squared(index, 1, "float", "%sum")
        after = value(f"fadd float {before}, {square}")
        if self._recipe.last != "none":
            fused = value(f"call float @llvm.fma.f32(float {wide}, float {wide}, float {before})")
            of_four = value(f"icmp slt i64 {index}, %in.fours") if self._recipe.last == "rest" else "false"
            after = value(f"select i1 {of_four}, float {after}, float {fused}")
        self._function.add(f"  store float {after}, ptr %sum")

    def _squared(self, index: str, lanes: int, kind: str, to: str) -> tuple[str, str, str]:
        """A sum, which LLVM keeps in a register, the squares of some elements, and those."""
        value = self._function.value
        wide = Elements(self._function, self._update, RECIPES[0], lanes, index).gradient()
        return value(f"load {kind}, ptr {to}"), value(f"fmul {kind} {wide}, {wide}"), wide
