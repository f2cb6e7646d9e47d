"""Writes LLVM's assembly of kernels that have the bits of torch's operators on the CPU.

This file imports llvmlite, which may not be installed. So it is imported only when a kernel is compiled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from llvmlite import binding, ir

from sp_lightning.capabilities.kernels.variants import (
    BLOCK,
    RECIPES,
    Arguments,
    NormArguments,
    NormRecipe,
    Recipe,
    Variant,
)

Value = Any  # a value or a type of llvmlite, which has no type annotations
F16, F32, _I8, _I16, I32, I64 = ir.HalfType(), ir.FloatType(), *map(ir.IntType, (8, 16, 32, 64))
PLACE = ir.PointerType()
_GIVEN = {ctypes.c_void_p: PLACE, ctypes.c_int64: I64, ctypes.c_float: F32}
MEMORY = {torch.float32: F32, torch.float16: F16, torch.bfloat16: _I16}
_BYTES = {F32: 4, F16: 2, _I16: 2}
AHEAD = 2048  # a gradient is prefetched into the caches this number of elements before it is read


class Kernel(ir.IRBuilder):
    """A function ``void run(i64 begin, i64 end, ptr arguments)`` that is being written.

    Args:
        arguments: the type of the structure that the function's third argument points to.

    Attributes:
        begin, end: the index of the first item of a call, and the index behind the last one. The kernel's writer chooses what an
            item is: a piece of a tensor, for example.
        given: the values of the structure's fields, by name.
    """

    def __init__(self, arguments: type[ctypes.Structure]) -> None:
        module = ir.Module()
        module.triple = binding.get_process_triple()
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), (I64, I64, PLACE)), "run")
        super().__init__(function.append_basic_block())
        self.begin, self.end, given = function.args
        # All arguments are loaded in the first basic block, so that every later block can use the values.
        self.given = {
            name: self.load(self.at(given, I64(getattr(arguments, name).offset), _I8), typ=_GIVEN[kind])
            for name, kind, *_ in arguments._fields_
        }

    def at(self, place: Value, index: Value, kind: Value) -> Value:
        """Returns the address of the element with an index. For ``i8`` elements the index is a number of bytes."""
        return self.gep(place, [index], source_etype=kind)

    def whole(self, begin: Value, end: Value, size: int) -> Value:
        """Returns the index behind the last whole group of ``size`` elements between ``begin`` and ``end``."""
        return self.sub(end, self.srem(self.sub(end, begin), I64(size)))

    def loop(self, begin: Value, end: Value, step: int, body: Callable[[Value], None]) -> Value:
        """Writes a loop over the indices from ``begin`` to before ``end``, in steps of ``step``.

        Args:
            begin, end: the first index, and the limit.
            step: the difference between two indices.
            body: writes the content of the loop. Called once, with the value that holds the index.

        Returns:
            The value that holds the index: after the loop, the first index that is not less than ``end``.
        """
        before, (test, inside, after) = self.block, [self.append_basic_block() for _ in range(3)]
        self.branch(test)
        self.position_at_end(test)
        index = self.phi(I64)
        self.cbranch(self.icmp_signed("<", index, end), inside, after)
        self.position_at_end(inside)
        body(index)
        index.add_incoming(begin, before)
        # After ``body``, because it may have added blocks: the loop then continues from the last of them.
        index.add_incoming(self.add(index, I64(step)), self.block)
        self.branch(test)
        self.position_at_end(after)
        return index

    def intrinsic(self, name: str, result: Value, *values: Value) -> Value:
        """Writes a call of a function of LLVM, and declares the function at its first call. ``result`` is the result's type."""
        function = self.module.globals.get(name)
        function = function or ir.Function(self.module, ir.FunctionType(result, [each.type for each in values]), name)
        return self.call(function, values)

    def text(self) -> str:
        """Ends the function with a return, and returns its text. Called once, after the whole function was written."""
        self.ret_void()
        return str(self.module)


class Elements:
    """Writes the update of ``width`` elements from an index on.

    Args:
        kernel: the function that the update is written to.
        variant, recipe: the update, and how torch was compiled.
        width: the recipe's number of elements of a vector, or 1 in the rest at the end of a tensor.
        index: the index of the first element.
    """

    def __init__(self, kernel: Kernel, variant: Variant, recipe: Recipe, width: int, index: Value) -> None:
        self._kernel = kernel
        self._variant = variant
        self._recipe: Any = recipe
        self._width = width
        self._index = index
        self._last = width == 1
        self._float, self._int, self._short = map(self._of, (F32, I32, _I16))

    def _of(self, kind: Value) -> Value:
        """Returns the type of ``width`` elements of a type: a vector, or the type itself."""
        return kind if self._last else ir.VectorType(kind, self._width)

    def _number(self, name: str) -> Value:
        """Returns a number of the kernel's arguments, repeated for all elements of a vector."""
        number, nothing = self._kernel.given[name], ir.Constant(self._float, ir.Undefined)
        if self._last:
            return number
        first = self._kernel.insert_element(nothing, number, I32(0))
        return self._kernel.shuffle_vector(first, nothing, ir.Constant(self._int, None))

    def _bits(self, number: int) -> Value:
        return ir.Constant(self._int, number if self._last else [number] * self._width)

    def _load(self, name: str, dtype: torch.dtype) -> Value:
        """Reads elements of a tensor in a dtype. Returns them in float32."""
        kernel, kind = self._kernel, MEMORY[dtype]
        value = kernel.load(kernel.at(kernel.given[name], self._index, kind), align=_BYTES[kind], typ=self._of(kind))
        return self._widened(value, dtype)

    def _widened(self, value: Value, dtype: torch.dtype) -> Value:
        """Converts elements to float32 from the form that they have in memory."""
        kernel = self._kernel
        if dtype is torch.float16:
            return kernel.fpext(value, self._float)
        if dtype is torch.bfloat16:
            return kernel.bitcast(kernel.shl(kernel.zext(value, self._int), self._bits(16)), self._float)
        return value

    def _store(self, name: str, value: Value, dtype: torch.dtype) -> None:
        """Stores float32 elements in a dtype."""
        value = value if dtype is torch.float32 else self._rounded(value, dtype)
        kind = F32 if dtype is torch.float32 else _I16
        self._kernel.store(value, self._kernel.at(self._kernel.given[name], self._index, kind), align=_BYTES[kind])

    def _state(self, number: int) -> Value:
        return self._load(f"s{number}", self._variant.weight)

    def _keep(self, number: int, value: Value) -> None:
        self._store(f"s{number}", value, self._variant.weight)

    def _call(self, name: str, *values: Value) -> Value:
        lanes = "f32" if self._last else f"v{self._width}f32"
        return self._kernel.intrinsic(f"llvm.{name}.{lanes}", self._float, *values)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Returns a · b + c, rounded once if torch was compiled for a processor with ``fma``, otherwise twice."""
        return self._call("fma", a, b, c) if self._recipe.fused else self._kernel.fadd(self._kernel.fmul(a, b), c)

    def _plus(self, a: Value, b: Value, c: Value) -> Value:
        """Returns a · b + c, which torch's source does not fuse. Its compiler may: in the rest, in vectors by the recipe."""
        fused = self._last or self._recipe.contracted
        return self.fma(a, b, c) if fused else self._kernel.fadd(self._kernel.fmul(a, b), c)

    def _mixed(self, average: Value, rate: Value, new: Value, share: Value) -> Value:
        """Returns average · rate + new · share.

        In vectors torch's source fuses the second product. In the rest torch's compiler fuses the first.
        """
        if self._last:
            return self.fma(average, rate, self._kernel.fmul(share, new))
        return self.fma(new, share, self._kernel.fmul(average, rate))

    def _mixed_squares(self, average: Value, rate: Value, new: Value, share: Value) -> Value:
        """Returns average · rate + new · share · new. In vectors, too, torch's compiler chooses the product that is fused."""
        scaled = self._kernel.fmul(share, new)
        if not self._last and self._recipe.contracted == "second":
            return self.fma(new, scaled, self._kernel.fmul(average, rate))
        return self._plus(average, rate, self._kernel.fmul(scaled, new))

    def gradient(self) -> Value:
        """Reads the gradient. Returns it in float32."""
        return self._load("gradient", self._variant.gradient)

    def cast(self, weight: Value) -> Value:
        """Returns the casts of new weights, as 16-bit integers."""
        assert self._variant.cast is not None
        return self._rounded(weight, self._variant.cast)

    def store_cast(self, weight: Value) -> None:
        """Stores the casts of new weights."""
        assert self._variant.cast is not None
        self._store("cast", weight, self._variant.cast)

    def _rounded(self, value: Value, dtype: torch.dtype) -> Value:
        """Returns float32 values rounded to the nearest 16-bit numbers, ties to even, as 16-bit integers."""
        kernel = self._kernel
        if dtype is torch.float16:
            return kernel.bitcast(kernel.fptrunc(value, self._of(F16)), self._short)
        bits = kernel.bitcast(value, self._int)
        odd = kernel.and_(kernel.lshr(bits, self._bits(16)), self._bits(1))
        rounded = kernel.lshr(kernel.add(kernel.add(odd, self._bits(0x7FFF)), bits), self._bits(16))
        nan = kernel.fcmp_unordered("uno", value, value)
        return kernel.trunc(kernel.select(nan, self._bits(0xFFFF), rounded), self._short)

    def update(self) -> Value:
        """Writes the whole update of these elements. Returns their new weights."""
        variant, kernel = self._variant, self._kernel
        weight, gradient = self._load("weight", variant.weight), self.gradient()
        for number in range(variant.factors):
            gradient = kernel.fmul(gradient, self._number(f"factor{number}"))
        if variant.maximize:
            gradient = kernel.fneg(gradient)
        step = {"adam": self._adam, "adamw": self._adam, "sgd": self._sgd, "adagrad": self._adagrad}[variant.kind]
        weight = step(*self._decay(weight, gradient))
        self._store("weight", weight, variant.weight)
        return weight

    def _decay(self, weight: Value, gradient: Value) -> tuple[Value, Value]:
        """Returns a weight and its gradient after weight decay."""
        if self._variant.decays and self._variant.kind == "adamw":
            weight = self._kernel.fmul(weight, self._number("decay"))
        elif self._variant.decays:
            add = self.fma if self._variant.kind == "sgd" else self._plus
            gradient = add(weight, self._number("decay"), gradient)
        return weight, gradient

    def _adam(self, weight: Value, gradient: Value) -> Value:
        kernel, average, squares = self._kernel, self._state(0), self._state(1)
        way = kernel.fsub(gradient, average)
        if self._variant.near:
            average = self.fma(way, self._number("rate1"), average)
        else:
            average = self.fma(way, self._number("beyond1"), gradient)
        squares = self._mixed_squares(squares, self._number("beta2"), gradient, self._number("rate2"))
        self._keep(0, average)
        self._keep(1, squares)
        if self._variant.amsgrad:
            squares = self._larger(self._state(2), squares)
            self._keep(2, squares)
        below = kernel.fadd(kernel.fdiv(self._call("sqrt", squares), self._number("bias2")), self._number("eps"))
        return kernel.fadd(weight, kernel.fdiv(kernel.fmul(average, self._number("step")), below))

    def _larger(self, value: Value, other: Value) -> Value:
        """Returns the larger value, as torch: in vectors NaN if one of the two is NaN, and ``value`` in the rest."""
        kernel = self._kernel
        if self._last:
            return kernel.select(kernel.fcmp_ordered("<", value, other), other, value)
        larger = kernel.select(kernel.fcmp_ordered(">", value, other), value, other)
        nan = kernel.bitcast(self._bits(0xFFFFFFFF), self._float)
        return kernel.select(kernel.fcmp_unordered("uno", value, other), nan, larger)

    def _sgd(self, weight: Value, gradient: Value) -> Value:
        if self._variant.momentum:
            momentum = gradient
            if not self._variant.first:
                before = self._state(0)
                momentum = self._mixed(before, self._number("momentum"), gradient, self._number("damping"))
            self._keep(0, momentum)
            gradient = self.fma(momentum, self._number("momentum"), gradient) if self._variant.nesterov else momentum
        return self._plus(gradient, self._number("step"), weight)

    def _adagrad(self, weight: Value, gradient: Value) -> Value:
        kernel, squares = self._kernel, self._plus(gradient, gradient, self._state(0))
        self._keep(0, squares)
        below = kernel.fadd(self._call("sqrt", squares), self._number("eps"))
        return kernel.fadd(weight, kernel.fdiv(kernel.fmul(gradient, self._number("step")), below))


def text(what: Any, recipe: Any) -> str:
    """Returns the text of a kernel: of an update (``what`` is a variant), or of norms (``what`` is the gradients' dtype)."""
    return (update if isinstance(what, Variant) else _norms)(what, recipe)


def update(variant: Variant, recipe: Any, write: Callable[..., Elements] = Elements) -> str:
    """Returns the text of a kernel that updates a tensor. Its items are blocks of :data:`BLOCK` elements.

    Args:
        variant, recipe: the update, and how torch was compiled.
        write: the class that writes the update of some elements: :class:`Elements`, or a subclass that rounds as a GPU does.
    """
    kernel, width = Kernel(Arguments), recipe.width
    begin, end = (kernel.mul(each, I64(BLOCK)) for each in (kernel.begin, kernel.end))
    end = kernel.select(kernel.icmp_signed("<", end, kernel.given["count"]), end, kernel.given["count"])

    def block(index: Value) -> None:
        made = []
        for more in range(0, BLOCK, width):
            elements = write(kernel, variant, recipe, width, kernel.add(index, I64(more)))
            made.append((elements, elements.update()))
        for more in range(0, BLOCK if variant.cast else 0, 2 * width):
            low, high = (elements.cast(weight) for elements, weight in made[more // width :][:2])
            order = ir.Constant(ir.VectorType(I32, 2 * width), list(range(2 * width)))
            place = kernel.at(kernel.given["cast"], kernel.add(index, I64(more)), _I16)
            stored = kernel.store(kernel.shuffle_vector(low, high, order), place, align=4 * width)
            # The store bypasses the caches: a cast is not read before the next fetch.
            stored.set_metadata("nontemporal", kernel.module.add_metadata([I32(1)]))

    def some(width: int, index: Value) -> None:
        elements = write(kernel, variant, recipe, width, index)
        weight = elements.update()
        if variant.cast:
            elements.store_cast(weight)

    index = kernel.loop(begin, kernel.whole(begin, end, BLOCK), BLOCK, block)
    if variant.cast:  # non-temporal stores are ordered only by a fence
        kernel.fence("seq_cst")
    index = kernel.loop(index, kernel.whole(begin, end, width), width, partial(some, width))
    kernel.loop(index, end, 1, partial(some, 1))
    return kernel.text()


def _norms(dtype: torch.dtype, recipe: NormRecipe) -> str:
    """Returns the text of a kernel that computes norms. Its items are gradients. LLVM keeps the sums in registers.

    torch adds squares in the order of the elements: first in the lanes of one vector. Then it adds the lanes one by one, and then
    the elements of the rest at the end of the tensor.
    """
    kernel, width = Kernel(NormArguments), recipe.width
    vector = ir.VectorType(F32, width)
    sums, total = kernel.alloca(vector), kernel.alloca(F32)
    update = Variant("sgd", dtype, None, 0, maximize=False, decays=False)  # used only to widen gradients of this dtype

    def add(width: int, to: Value, fused: Value, index: Value) -> None:
        """Adds the squares of ``width`` elements to the sum at ``to``, with one rounding if the value ``fused`` is true."""
        elements = Elements(kernel, update, RECIPES[0], width, index)
        wide, before = elements.gradient(), kernel.load(to, typ=to.allocated_type)
        once, twice = elements.fma(wide, wide, before), kernel.fadd(before, kernel.fmul(wide, wide))
        kernel.store(kernel.select(fused, once, twice), to)

    def of_vector(index: Value) -> None:
        ahead = kernel.at(kernel.given["gradient"], kernel.add(index, I64(AHEAD)), _I16)
        kernel.intrinsic("llvm.prefetch.p0", ir.VoidType(), ahead, *map(I32, (0, 3, 1)))
        add(width, sums, ir.IntType(1)(recipe.vectors), index)

    def of_one(fours: Value, index: Value) -> None:
        """Adds the square of one element of the rest.

        For AVX2, torch's compiler squares four elements of the rest at a time. It adds the squares of the elements after the last
        four in another way.
        """
        rest = kernel.icmp_signed(">=", index, fours)
        add(1, total, rest if recipe.last == "rest" else ir.IntType(1)(recipe.last == "all"), index)

    def each(index: Value) -> None:
        given = kernel.given
        given["gradient"] = kernel.load(kernel.at(given["gradients"], index, PLACE), typ=PLACE)
        count = kernel.load(kernel.at(given["counts"], index, I64), typ=I64)
        vectors, fours = (kernel.whole(I64(0), count, size) for size in (width, 4))
        kernel.store(ir.Constant(vector, None), sums)
        begin = kernel.loop(I64(0), vectors, width, of_vector)
        lanes = kernel.load(sums, typ=vector)
        first, *others = (kernel.extract_element(lanes, I32(lane)) for lane in range(width))
        kernel.store(reduce(kernel.fadd, others, first), total)
        kernel.loop(begin, count, 1, partial(of_one, fours))
        root = kernel.intrinsic("llvm.sqrt.f32", F32, kernel.load(total, typ=F32))
        kernel.store(root, kernel.at(given["norms"], index, F32))

    kernel.loop(kernel.begin, kernel.end, 1, each)
    return kernel.text()
