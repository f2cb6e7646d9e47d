"""Writes LLVM's assembly of updates and norms that have the bits of torch's operators on a GPU.

Sources: ``adam.py``, ``sgd.py`` and ``adagrad.py`` of ``torch/optim``, ``ForeachFunctors.cuh``, ``DeviceAddCmulCdiv.cuh``,
``Lerp.h`` and ``fused_adam_utils.cuh`` of torch 2.11 to 2.14. ``foreach`` calls one operator after the other. Each operator
computes in float32 and stores its result in the dtype of its tensor, so each result is rounded (``_written``). ``fused`` is one
operator, which rounds only the values that it stores.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from llvmlite import ir

from sp_lightning.capabilities.kernels.ir import (
    AHEAD,
    F16,
    F32,
    I32,
    I64,
    MEMORY,
    PLACE,
    Elements,
    Kernel,
    Value,
    update,
)
from sp_lightning.capabilities.kernels.variants import (
    EACH,
    RECIPES,
    THREADS,
    WARP,
    GpuNormArguments,
    GpuNormRecipe,
    Variant,
)


def text(what: Any, recipe: Any) -> str:
    """Returns the text of a kernel: of an update (``what`` is a variant), or of sums of squares (``what`` is a dtype)."""
    if isinstance(what, Variant):
        assert what.like is not None
        return update(what, recipe, {"foreach": _ForeachStep, "fused": _FusedStep}[what.like.form])
    return _sums(what, recipe)


class _OfGpu(Elements):
    """Writes the operations that the forms ``foreach`` and ``fused`` share."""

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Returns a · b + c with one rounding, on processors without ``fma`` as well."""
        return self._call("fma", a, b, c)

    def _sum(self, operator: str, a: Value, b: Value, c: Value) -> Value:
        """Returns a · b + c, rounded once or twice, as nvcc has compiled ``operator``, a name in :data:`OPEN`."""
        if operator in self._recipe.usual:
            return self.fma(a, b, c)
        return self._kernel.fadd(self._kernel.fmul(a, b), c)

    def _negative(self, value: Value) -> Value:
        return self._kernel.fneg(value)

    def _one(self) -> Value:
        return self._kernel.bitcast(self._bits(0x3F800000), self._float)

    def _decay(self, weight: Value, gradient: Value) -> tuple[Value, Value]:
        return weight, gradient  # each form has its own weight decay, in its steps


class _ForeachStep(_OfGpu):
    """Writes an update as torch's ``foreach`` operators compute it: torch's default on a GPU."""

    def _written(self, value: Value) -> Value:
        """Rounds a result to the dtype in which the next operator reads it. Returns it in float32."""
        dtype, kernel = self._variant.weight, self._kernel
        if dtype is torch.float32:
            return value
        if dtype is torch.float16:
            return kernel.fpext(kernel.fptrunc(value, self._of(F16)), self._float)
        return self._widened(self._rounded(value, dtype), dtype)

    def _add(self, value: Value, other: Value, alpha: Value) -> Value:
        """``_foreach_add(value, other, alpha=alpha)``"""
        return self._written(self._sum("add", alpha, other, value))

    def _decayed(self, weight: Value, gradient: Value) -> Value:
        return self._add(gradient, weight, self._number("decay")) if self._variant.decays else gradient

    def _adam(self, weight: Value, gradient: Value) -> Value:
        kernel, average, squares = self._kernel, self._state(0), self._state(1)
        if self._variant.kind == "adam":
            gradient = self._decayed(weight, gradient)
        elif self._variant.decays:
            weight = self._written(kernel.fmul(weight, self._number("decay")))
        way = kernel.fsub(gradient, average)
        if self._variant.near:
            average = self._written(self._sum("lerp", self._number("rate1"), way, average))
        else:  # torch's second formula of lerp(self, end, weight): end - (end - self) · (1 - weight)
            average = self._written(self._sum("lerp", way, self._number("beyond1"), gradient))
        squares = self._written(kernel.fmul(squares, self._number("beta2")))
        squares = self._written(self._sum("addcmul", self._number("rate2"), kernel.fmul(gradient, gradient), squares))
        self._keep(0, average)
        self._keep(1, squares)
        if self._variant.amsgrad:
            squares = self._larger(self._state(2), squares)
            self._keep(2, squares)
        below = self._written(self._call("sqrt", squares))
        if "div" in self._recipe.usual:
            below = self._written(kernel.fdiv(below, self._number("bias2")))
        else:
            below = self._written(kernel.fmul(below, kernel.fdiv(self._one(), self._number("bias2"))))
        below = self._written(kernel.fadd(below, self._number("eps")))
        return self._written(self._sum("addcdiv", self._number("step"), kernel.fdiv(average, below), weight))

    def _larger(self, value: Value, other: Value) -> Value:
        """Returns the larger value as ``_foreach_maximum`` does: NaN if one of the two is NaN."""
        kernel = self._kernel
        larger = kernel.select(kernel.fcmp_ordered(">", value, other), value, other)
        return kernel.select(kernel.fcmp_unordered("uno", value, value), value, larger)

    def _sgd(self, weight: Value, gradient: Value) -> Value:
        gradient = self._decayed(weight, gradient)
        if self._variant.momentum:
            momentum = gradient
            if not self._variant.first:
                momentum = self._written(self._kernel.fmul(self._state(0), self._number("momentum")))
                momentum = self._add(momentum, gradient, self._number("damping"))
            self._keep(0, momentum)
            if self._variant.nesterov:
                gradient = self._add(gradient, momentum, self._number("momentum"))
                if self._variant.writes_gradient:  # as torch, so that user code reads the same gradient after the step
                    self._store("gradient", gradient, self._variant.gradient)
            else:
                gradient = momentum
        return self._add(weight, gradient, self._number("step"))

    def _adagrad(self, weight: Value, gradient: Value) -> Value:
        kernel, gradient = self._kernel, self._decayed(weight, gradient)
        squares = self._written(self._sum("addcmul", gradient, gradient, self._state(0)))
        self._keep(0, squares)
        below = self._written(kernel.fadd(self._written(self._call("sqrt", squares)), self._number("eps")))
        above = self._written(kernel.fmul(gradient, self._number("step")))
        return self._written(kernel.fadd(weight, kernel.fdiv(above, below)))


class _FusedStep(_OfGpu):
    """Writes an update as torch's optimizers compute it with ``fused=True``: Adam and AdamW."""

    def _adam(self, weight: Value, gradient: Value) -> Value:
        kernel, average, squares = self._kernel, self._state(0), self._state(1)
        if self._variant.decays and self._variant.kind == "adam":
            gradient = self._sum("decay", weight, self._number("decay"), gradient)
        elif self._variant.decays:
            weight = self._sum("decay", self._negative(self._number("decay")), weight, weight)
        beta1, beta2 = (self._number(name) for name in ("beta1", "beta2"))
        average = self.fma(beta1, average, self.fma(self._negative(beta1), gradient, gradient))
        square = kernel.fmul(gradient, gradient)
        squares = self.fma(beta2, squares, self.fma(self._negative(beta2), square, square))
        self._keep(0, average)
        self._keep(1, squares)
        if self._variant.amsgrad:
            largest = self._state(2)  # std::max(largest, squares): ``largest`` if one of the two is NaN
            squares = kernel.select(kernel.fcmp_ordered("<", largest, squares), squares, largest)
            self._keep(2, squares)
        below = kernel.fdiv(self._call("sqrt", squares), self._number("bias2"))
        below = kernel.fadd(below, self._number("eps"))
        return kernel.fsub(weight, kernel.fdiv(kernel.fmul(self._number("step"), average), below))


def _sums(dtype: torch.dtype, recipe: GpuNormRecipe) -> str:
    """Returns the text of a kernel that sums the squares of chunks of gradients in the order of a block of the GPU's threads.

    The kernel's items are chunks. Source: ``LpNormFunctor`` of ``foreach_reduce.cuh`` and ``BlockReduceSum`` of
    ``block_reduce.cuh``. Of each 2,048 elements, every one of 512 threads takes four. They are adjacent if the gradient's number
    of elements is a multiple of four, and 512 apart otherwise. A thread has a sum for each of the four, and adds the four sums at
    the end. Then each warp of 32 threads adds the sums of its threads, and the sums of the 16 warps are added.
    """
    kernel, width, stripe = Kernel(GpuNormArguments), 8, THREADS * EACH
    # Vectors and single elements are read at these addresses, so they are converted to pointers without a type.
    memory = [kernel.alloca(ir.ArrayType(F32, size)) for size in (stripe, THREADS)]
    for each_one in memory:
        each_one.align = 64  # so that no vector lies in two cache lines
    sums, of_threads = (kernel.inttoptr(kernel.ptrtoint(each_one, I64), PLACE) for each_one in memory)
    variant = Variant("sgd", dtype, None, 0, maximize=False, decays=False)  # used only to widen gradients of this dtype
    vector = ir.VectorType(F32, width)

    def add(width: int, at: Value, index: Value) -> None:
        """Adds the squares of ``width`` elements from ``index`` on to as many sums from ``at`` on."""
        elements = _OfGpu(kernel, variant, RECIPES[0], width, index)
        wide, kind = elements.gradient(), F32 if width == 1 else vector
        place = kernel.at(sums, at, F32)
        before = kernel.load(place, typ=kind, align=4)
        added = elements.fma(wide, wide, before) if recipe.fused else kernel.fadd(before, kernel.fmul(wide, wide))
        kernel.store(added, place, align=4)

    def plus(beyond: int, thread: Value) -> None:
        """Adds the sum of thread number ``thread + beyond`` to the sum of ``thread``."""
        places = [kernel.at(of_threads, each, F32) for each in (thread, kernel.add(thread, I64(beyond)))]
        kernel.store(kernel.fadd(*(kernel.load(each, typ=F32) for each in places)), places[0])

    def tree(begin: Value, lanes: int) -> None:
        """Adds the sums of ``lanes`` threads from ``begin`` on, as a warp does. Thread ``begin`` has the total."""
        while lanes > 1:
            lanes //= 2
            last = kernel.add(begin, I64(lanes))
            kernel.loop(begin, last, 1, partial(plus, lanes))

    def each(index: Value) -> None:
        given = kernel.given
        given["gradient"] = kernel.load(kernel.at(given["chunks"], index, PLACE), typ=PLACE)
        count = kernel.load(kernel.at(given["counts"], index, I64), typ=I64)
        in_fours = kernel.load(kernel.at(given["in_fours"], index, I64), typ=I64)
        zero = ir.Constant(vector, None)
        kernel.loop(I64(0), I64(stripe), width, lambda at: kernel.store(zero, kernel.at(sums, at, F32), align=4))

        def stripes(begin: Value) -> None:
            kernel.loop(I64(0), I64(stripe), 8 * width, lambda at: several(begin, at))

        def several(begin: Value, at: Value) -> None:
            ahead = kernel.at(kernel.given["gradient"], kernel.add(kernel.add(begin, at), I64(AHEAD)), MEMORY[dtype])
            kernel.intrinsic("llvm.prefetch.p0", ir.VoidType(), ahead, *map(I32, (0, 3, 1)))
            for more in range(0, 8 * width, width):
                here = kernel.add(at, I64(more))
                add(width, here, kernel.add(begin, here))

        behind = kernel.loop(I64(0), kernel.whole(I64(0), count, stripe), stripe, stripes)
        kernel.loop(behind, count, 1, lambda at: add(1, kernel.sub(at, behind), at))

        def of_thread(thread: Value) -> None:
            total = F32(0.0)
            for one in range(EACH):
                beside = kernel.add(kernel.mul(thread, I64(EACH)), I64(one))
                apart = kernel.add(thread, I64(one * THREADS))
                at = kernel.select(kernel.icmp_signed("!=", in_fours, I64(0)), beside, apart)
                total = kernel.fadd(total, kernel.load(kernel.at(sums, at, F32), typ=F32))
            kernel.store(total, kernel.at(of_threads, thread, F32))

        kernel.loop(I64(0), I64(THREADS), 1, of_thread)
        kernel.loop(I64(0), I64(THREADS), WARP, lambda begin: tree(begin, WARP))

        def gather(warp: Value) -> None:
            first = kernel.load(kernel.at(of_threads, kernel.mul(warp, I64(WARP)), F32), typ=F32)
            kernel.store(first, kernel.at(of_threads, warp, F32))

        kernel.loop(I64(0), I64(THREADS // WARP), 1, gather)
        tree(I64(0), THREADS // WARP)
        kernel.store(kernel.load(kernel.at(of_threads, I64(0), F32), typ=F32), kernel.at(given["sums"], index, F32))

    kernel.loop(kernel.begin, kernel.end, 1, each)
    return kernel.text()
