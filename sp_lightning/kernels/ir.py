"""The text of kernels: what an update does with each element, as torch's fused operators on the CPU do it to the bit.

torch's compiler rounds products and sums in ways that its source does not show. They were found by comparing bits, are written
here, and are compared again when a kernel is compiled: in a vector other ones are added with one rounding (``fma``) than in what
is left at the end of a tensor; and a processor without ``fma``, or with shorter vectors, has another :class:`Recipe`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

BLOCK = 32
"""Elements that a thread takes at least, a multiple of torch's 16: with any number of threads, one has the tensor's end."""

Kind = Literal["adam", "adamw", "sgd", "adagrad"]
_POINTERS = ("weight", "gradient", "cast", "s0", "s1", "s2")
_NUMBERS = (
    "factor0", "factor1", "decay", "step", "rate1", "beyond1", "beta2", "rate2", "bias2", "eps", "momentum", "damping",
)  # fmt: skip
_TEXT = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "i16"}


class Arguments(ctypes.Structure):
    """What a kernel is called with: addresses, the number of elements, and numbers that are the same for all of them."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_float) for name in _NUMBERS),
    ]


@dataclass(frozen=True)
class Recipe:
    """How torch's compiler has made its operators for a kind of processor.

    Attributes:
        width: elements of a vector.
        fused: whether products are added with one rounding, in vectors at least where torch's source says so.
        contracted: which product the compiler fuses in vectors of itself, if it has a choice; None: it fuses none there.
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
"""Those of AVX2, which processors with AVX-512 use, too; of x86-64 without; of NEON; and of SVE with 256 bits. They are tried in
this order."""


@dataclass(frozen=True)
class Variant:
    """An update. What is the same for all elements of a tensor is decided when its kernel is compiled.

    Attributes:
        kind: the optimizer.
        gradient: the dtype in which the gradient came; the weight and the state are float32.
        cast: the dtype that new weights are cast to; None if they are not.
        factors: how many numbers the gradient is multiplied by first: to unscale it, and to clip it.
        maximize, decays, amsgrad, momentum, nesterov: as the optimizer has them.
        near: of Adam: whether its average moves to the gradient by less than half of the way, which torch writes otherwise.
        first: of SGD: whether there is no momentum yet.
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

    @property
    def moments(self) -> int:
        """How many tensors of the weight's size the state has."""
        return {"adam": 2, "adamw": 2, "sgd": int(self.momentum), "adagrad": 1}[self.kind] + self.amsgrad


class Function:
    """The lines of a function, and names for its values."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._count = 0

    def add(self, *lines: str) -> None:
        self.lines += lines

    def value(self, text: str) -> str:
        self._count += 1
        self.add(f"  %r{self._count} = {text}")
        return f"%r{self._count}"

    def loop(
        self, name: str, begin: str, before: str, end: str, step: int, then: str, body: Callable[[str], None]
    ) -> None:
        """Calls ``body`` with the index in steps from ``begin``, which the block ``before`` has, and goes on with ``then``."""
        index = f"%{name}.index"
        self.add(
            f"{name}.test:",
            f"  {index} = phi i64 [ {begin}, %{before} ], [ {index}.next, %{name}.end ]",
            f"  {index}.in = icmp slt i64 {index}, {end}",
            f"  br i1 {index}.in, label %{name}, label %{then}",
            f"{name}:",
        )
        body(index)
        self.add(
            f"  br label %{name}.end",
            f"{name}.end:",
            f"  {index}.next = add i64 {index}, {step}",
            f"  br label %{name}.test",
        )


class Elements:
    """Writes what becomes of ``width`` elements from an index on.

    Args:
        function: where it is written.
        variant, recipe: what, and how.
        width: the recipe's, or 1 for those that are left at the end of a tensor.
        index: the first one's.
    """

    def __init__(self, function: Function, variant: Variant, recipe: Recipe, width: int, index: str) -> None:
        self._value = function.value
        self._add = function.add
        self._variant = variant
        self._fused = recipe.fused
        self._contracted = recipe.contracted
        self._width = width
        self._index = index
        self._last = width == 1
        self._float, self._int, self._bool = self._of("float"), self._of("i32"), self._of("i1")
        self._intrinsic = "f32" if self._last else f"v{width}f32"

    def _of(self, kind: str) -> str:
        return kind if self._last else f"<{self._width} x {kind}>"

    def _number(self, name: str) -> str:
        return f"%n.{name}" if self._last else f"%v.{name}"

    def _constant(self, number: int) -> str:
        return str(number) if self._last else f"<{', '.join([f'i32 {number}'] * self._width)}>"

    def _place(self, name: str, kind: str) -> str:
        return self._value(f"getelementptr {kind}, ptr %{name}, i64 {self._index}")

    def _load(self, name: str) -> str:
        return self._value(f"load {self._float}, ptr {self._place(name, 'float')}, align 4")

    def _store(self, name: str, value: str) -> None:
        self._add(f"  store {self._float} {value}, ptr {self._place(name, 'float')}, align 4")

    def _do(self, operation: str, *values: str, kind: str = "") -> str:
        return self._value(f"{operation} {kind or self._float} {', '.join(values)}")

    def _fma(self, a: str, b: str, c: str) -> str:
        """a · b + c."""
        if not self._fused:
            return self._do("fadd", self._do("fmul", a, b), c)
        of = ", ".join(f"{self._float} {each}" for each in (a, b, c))
        return self._value(f"call {self._float} @llvm.fma.{self._intrinsic}({of})")

    def _plus(self, a: str, b: str, c: str) -> str:
        """a · b + c where torch's source does not say that it is fused."""
        if self._last or self._contracted:
            return self._fma(a, b, c)
        return self._do("fadd", self._do("fmul", a, b), c)

    def _root(self, value: str) -> str:
        return self._value(f"call {self._float} @llvm.sqrt.{self._intrinsic}({self._float} {value})")

    def _choose(self, condition: str, value: str, other: str, kind: str = "") -> str:
        kind = kind or self._float
        return self._value(f"select {self._bool} {condition}, {kind} {value}, {kind} {other}")

    def _mixed(self, average: str, rate: str, new: str, share: str) -> str:
        """average · rate + new · share. In a vector torch fuses the second product, at the end its compiler the first."""
        if self._last:
            return self._fma(average, rate, self._do("fmul", share, new))
        return self._fma(new, share, self._do("fmul", average, rate))

    def _mixed_squares(self, average: str, rate: str, new: str, share: str) -> str:
        """average · rate + new · share · new. In a vector it is up to torch's compiler, too, what is fused."""
        scaled = self._do("fmul", share, new)
        if not self._last and self._contracted == "second":
            return self._fma(new, scaled, self._do("fmul", average, rate))
        return self._plus(average, rate, self._do("fmul", scaled, new))

    def gradient(self) -> str:
        """The gradient in float32."""
        if self._variant.gradient is torch.float32:
            return self._load("gradient")
        kind = _TEXT[self._variant.gradient]
        came = self._value(f"load {self._of(kind)}, ptr {self._place('gradient', kind)}, align 2")
        if kind == "half":
            return self._value(f"fpext {self._of('half')} {came} to {self._float}")
        bits = self._value(f"zext {self._of('i16')} {came} to {self._int}")
        return self._value(
            f"bitcast {self._int} {self._do('shl', bits, self._constant(16), kind=self._int)} to {self._float}"
        )

    def cast(self, weight: str) -> str:
        """A new weight's cast, as 16 bits."""
        if self._variant.cast is torch.float16:
            half = self._value(f"fptrunc {self._float} {weight} to {self._of('half')}")
            return self._value(f"bitcast {self._of('half')} {half} to {self._of('i16')}")
        bits, kind = self._value(f"bitcast {self._float} {weight} to {self._int}"), self._int
        odd = self._do("and", self._do("lshr", bits, self._constant(16), kind=kind), self._constant(1), kind=kind)
        rounded = self._do("add", self._do("add", odd, self._constant(0x7FFF), kind=kind), bits, kind=kind)
        rounded = self._do("lshr", rounded, self._constant(16), kind=kind)
        nan = self._do("fcmp uno", weight, weight)
        return self._value(
            f"trunc {kind} {self._choose(nan, self._constant(0xFFFF), rounded, kind)} to {self._of('i16')}"
        )

    def store_cast(self, cast: str) -> None:
        self._add(f"  store {self._of('i16')} {cast}, ptr {self._place('cast', 'i16')}, align 2")

    def update(self) -> str:
        """Writes the whole update. Returns the new weight."""
        variant, weight, gradient = self._variant, self._load("weight"), self.gradient()
        for number in range(variant.factors):
            gradient = self._do("fmul", gradient, self._number(f"factor{number}"))
        if variant.maximize:
            gradient = self._do("fneg", gradient)
        if variant.decays and variant.kind == "adamw":
            weight = self._do("fmul", weight, self._number("decay"))
        elif variant.decays:
            add = self._fma if variant.kind == "sgd" else self._plus
            gradient = add(weight, self._number("decay"), gradient)
        step = {"adam": self._adam, "adamw": self._adam, "sgd": self._sgd, "adagrad": self._adagrad}[variant.kind]
        weight = step(weight, gradient)
        self._store("weight", weight)
        return weight

    def _adam(self, weight: str, gradient: str) -> str:
        average, squares = self._load("s0"), self._load("s1")
        way = self._do("fsub", gradient, average)
        if self._variant.near:
            average = self._fma(way, self._number("rate1"), average)
        else:
            average = self._fma(way, self._number("beyond1"), gradient)
        squares = self._mixed_squares(squares, self._number("beta2"), gradient, self._number("rate2"))
        self._store("s0", average)
        self._store("s1", squares)
        if self._variant.amsgrad:
            squares = self._larger(self._load("s2"), squares)
            self._store("s2", squares)
        below = self._do("fdiv", self._root(squares), self._number("bias2"))
        below = self._do("fadd", below, self._number("eps"))
        return self._do("fadd", weight, self._do("fdiv", self._do("fmul", average, self._number("step")), below))

    def _larger(self, value: str, other: str) -> str:
        """The larger one. In a vector a NaN of either wins, as in torch's."""
        if self._last:
            return self._choose(self._do("fcmp olt", value, other), other, value)
        larger = self._choose(self._do("fcmp ogt", value, other), value, other)
        nan = self._value(f"bitcast {self._int} {self._constant(-1)} to {self._float}")
        return self._choose(self._do("fcmp uno", value, other), nan, larger)

    def _sgd(self, weight: str, gradient: str) -> str:
        if self._variant.momentum:
            momentum = gradient
            if not self._variant.first:
                before = self._load("s0")
                momentum = self._mixed(before, self._number("momentum"), gradient, self._number("damping"))
            self._store("s0", momentum)
            gradient = self._fma(momentum, self._number("momentum"), gradient) if self._variant.nesterov else momentum
        return self._plus(gradient, self._number("step"), weight)

    def _adagrad(self, weight: str, gradient: str) -> str:
        squares = self._plus(gradient, gradient, self._load("s0"))
        self._store("s0", squares)
        below = self._do("fadd", self._root(squares), self._number("eps"))
        return self._do("fadd", weight, self._do("fdiv", self._do("fmul", gradient, self._number("step")), below))


def update_text(variant: Variant, recipe: Recipe) -> str:
    """A function ``void run(i64 begin, i64 end, ptr arguments)``; begin and end count blocks of :data:`BLOCK` elements.

    Casts go past the caches: nobody reads them before the next fetch.
    """
    function, width = Function(), recipe.width
    function.add("define void @run(i64 %begin, i64 %end, ptr %arguments) {", "entry:")
    _load_arguments(function, width)

    def block(index: str) -> None:
        made = []
        for more in range(0, BLOCK, width):
            there = function.value(f"add i64 {index}, {more}")
            elements = Elements(function, variant, recipe, width, there)
            made.append((there, elements, elements.update()))
        for low, high in zip(made[::2], made[1::2], strict=True) if variant.cast else ():
            _stream(function, width, low[0], low[1].cast(low[2]), high[1].cast(high[2]))

    def some(width: int, index: str) -> None:
        elements = Elements(function, variant, recipe, width, index)
        weight = elements.update()
        if variant.cast:
            elements.store_cast(elements.cast(weight))

    function.loop("block", "%from", "entry", "%blocks", BLOCK, "blocks.done", block)
    function.add("blocks.done:", *["  fence seq_cst"] * bool(variant.cast), "  br label %vector.test")
    function.loop("vector", "%block.index", "blocks.done", "%vectors", width, "vectors.done", partial(some, width))
    function.add("vectors.done:", "  br label %last.test")
    function.loop("last", "%vector.index", "vectors.done", "%to", 1, "done", partial(some, 1))
    return "\n".join([*function.lines, "done:", "  ret void", "}", declarations(width), "!0 = !{i32 1}"])


def _load_arguments(function: Function, width: int) -> None:
    """Loads the arguments, numbers also in all lanes of a vector, and says where whole blocks and whole vectors end."""
    vector = f"<{width} x float>"
    for name in (*_POINTERS, "count", *_NUMBERS):
        function.add(f"  %p.{name} = getelementptr i8, ptr %arguments, i64 {getattr(Arguments, name).offset}")
        if name in _NUMBERS:
            lanes = f"{vector} %i.{name}, {vector} poison, <{width} x i32> zeroinitializer"
            function.add(
                f"  %n.{name} = load float, ptr %p.{name}",
                f"  %i.{name} = insertelement {vector} poison, float %n.{name}, i64 0",
                f"  %v.{name} = shufflevector {lanes}",
            )
        else:
            function.add(f"  %{name} = load {'i64' if name == 'count' else 'ptr'}, ptr %p.{name}")
    function.add(
        f"  %from = mul i64 %begin, {BLOCK}",
        f"  %wanted = mul i64 %end, {BLOCK}",
        "  %to = call i64 @llvm.smin.i64(i64 %wanted, i64 %count)",
        "  %size = sub i64 %to, %from",
        f"  %of.blocks = srem i64 %size, {BLOCK}",
        "  %blocks = sub i64 %to, %of.blocks",
        f"  %of.vectors = srem i64 %size, {width}",
        "  %vectors = sub i64 %to, %of.vectors",
        "  br label %block.test",
    )


def _stream(function: Function, width: int, index: str, low: str, high: str) -> None:
    """Stores the casts of two vectors past the caches."""
    order = ", ".join(f"i32 {lane}" for lane in range(2 * width))
    both = function.value(f"shufflevector <{width} x i16> {low}, <{width} x i16> {high}, <{2 * width} x i32> <{order}>")
    place = function.value(f"getelementptr i16, ptr %cast, i64 {index}")
    function.add(f"  store <{2 * width} x i16> {both}, ptr {place}, align {4 * width}, !nontemporal !0")


def declarations(width: int) -> str:
    """The functions of LLVM that kernels call."""
    lines = ["declare i64 @llvm.smin.i64(i64, i64)"]
    for kind, name in (("float", "f32"), (f"<{width} x float>", f"v{width}f32")):
        lines += [
            f"declare {kind} @llvm.fma.{name}({kind}, {kind}, {kind})",
            f"declare {kind} @llvm.sqrt.{name}({kind})",
        ]
    return "\n".join(lines)
