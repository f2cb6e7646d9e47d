"""torch's CUDA operators of optimizers on CPU tensors, one operation after the other, as torch's headers have them.

Formulas are written with NumPy and without any of the package's code, so that a mistake there is not repeated here. What nvcc is
free to choose is given. ``tests/kernels/test_emulated_gpu.py`` compares single operations with torch's operators on the CPU and
with C's ``fmaf``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode

from sp_lightning.registry import is_installed
from tests.support.simdevice import SimDevice, simulated

Floats = NDArray[np.float32]
_FOREACH = {
    f"_foreach_{each}" for each in ("neg", "sqrt", "mul", "maximum", "add", "div", "lerp", "addcmul", "addcdiv")
}
ALL = frozenset({"add", "lerp", "addcmul", "addcdiv", "div", "decay", "norm"})


def fma(a: Any, b: Any, c: Any) -> Floats:
    """a · b + c of float32 numbers, rounded once.

    The product is exact in double precision. The sum is rounded to odd there (of two neighbours, the one with an odd last bit),
    after which rounding to float32 is as if it were the only one.
    """
    product = np.multiply(a, b, dtype=np.float64)
    other = np.asarray(c, np.float64)
    total = product + other
    part = total - product
    rest = (product - (total - part)) + (other - part)
    even = (np.ascontiguousarray(total).view(np.int64) & 1) == 0
    towards = np.where(rest > 0, np.inf, -np.inf)
    inexact = np.isfinite(total) & (rest != 0) & np.isfinite(rest) & even.reshape(total.shape)
    return np.where(inexact, np.nextafter(total, towards), total).astype(np.float32)


def norm(values: Floats, *, fused: bool = True, aligned: bool = True) -> Any:
    """The norm of a gradient, added up by blocks of 512 threads, each of which has four sums.

    Args:
        values: the gradient.
        fused: True if a square and a sum are rounded once.
        aligned: True if the gradient begins at a multiple of four numbers in memory.
    """
    chunks = []
    for begin in range(0, len(values), 65536):
        chunk = values[begin : begin + 65536]
        sums = np.zeros(2048, np.float32)
        for row in np.concatenate([chunk, np.zeros(-len(chunk) % 2048, np.float32)]).reshape(-1, 2048):
            with np.errstate(all="ignore"):
                sums = fma(row, row, sums) if fused else sums + row * row
        total = np.zeros(512, np.float32)
        for each in sums.reshape(512, 4).T if len(values) % 4 == 0 and aligned else sums.reshape(4, 512):
            total = total + each
        chunks.append(_block(total))
    of_threads = np.zeros(512, np.float32)
    for at, each in enumerate(chunks):
        of_threads[at % 512] += each
    return np.sqrt(_block(of_threads))


def _block(of_threads: Floats) -> Any:
    """The sum of 512 threads, of which each 32 add theirs up first."""
    return _warp(np.append(_warp(of_threads.reshape(16, 32)), np.zeros(16, np.float32))[None])[0]


def _warp(sums: Any) -> Any:
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def _one(number: float) -> np.float32:
    return np.float32(number)


class EmulatedGpu(TorchFunctionMode):
    """While this mode is active, torch's ``foreach`` and fused operators compute on the CPU as they do on a GPU.

    Args:
        usual: the operators that nvcc compiles as usual: sums are rounded once, and a division is one.
    """

    def __init__(self, usual: frozenset[str] = ALL) -> None:
        super().__init__()
        self._usual = usual

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in (torch._fused_adam_, torch._fused_adamw_):
            return self._fused(*args, **kwargs, decoupled=func is torch._fused_adamw_)
        # Counts of steps have no dimensions; copies do not compute.
        if func is torch._foreach_norm:
            tensors, order = args
            assert order == 2
            in_memory = [each.as_strided((each.numel(),), (1,)) for each in tensors]  # as a GPU reads them
            norms = [
                norm(_numpy(each), fused="norm" in self._usual, aligned=each.storage_offset() % 4 == 0)
                for each in in_memory
            ]
            return tuple(torch.tensor(each).to(tensor.dtype) for each, tensor in zip(norms, tensors, strict=True))
        # A whole number, or a tensor of one, is added to counts of steps.
        counts = name == "_foreach_add_" and isinstance(args[1], (int, Tensor))
        if name.removesuffix("_") in _FOREACH and not counts:
            with np.errstate(all="ignore"):
                return self._foreach(name, *args, **kwargs)
        return func(*args, **kwargs)

    def _sum(self, operator: str, a: Any, b: Any, c: Any) -> Floats:
        return fma(a, b, c) if operator in self._usual else np.float32(a) * b + c

    def _foreach(self, name: str, tensors: Sequence[Tensor], *others: Any, **settings: Any) -> Any:
        inplace, kind = name.endswith("_"), name.removeprefix("_foreach_").removesuffix("_")
        results = []
        for at, tensor in enumerate(tensors):
            given = [each[at] if isinstance(each, (list, tuple)) else each for each in others]
            numbers = [_numpy(each) if isinstance(each, Tensor) else _one(each) for each in given]
            result = self._on_one(kind, _numpy(tensor), *numbers, **settings)
            made = torch.from_numpy(np.ascontiguousarray(result)).to(tensor.dtype).reshape(tensor.shape)
            results.append(tensor.copy_(made) if inplace else torch.empty_like(tensor).copy_(made))
        return None if inplace else tuple(results)

    def _on_one(self, kind: str, own: Floats, *others: Any, alpha: float = 1.0, value: float = 1.0) -> Any:
        """One operator on one tensor; ``alpha`` and ``value`` are torch's names for a factor."""
        factor = _one(value) if len(others) < 3 else others[2]
        if kind == "neg":
            return -own
        if kind == "sqrt":
            return np.sqrt(own)
        if kind == "mul":
            return own * others[0]
        if kind == "maximum":
            return np.maximum(own, others[0])
        if kind == "add":
            return self._sum("add", _one(alpha), others[0], own)
        if kind == "div":
            return own / others[0] if "div" in self._usual else own * (np.float32(1) / others[0])
        if kind == "lerp":
            end, weight = others
            if abs(weight) < 0.5:
                return self._sum("lerp", weight, end - own, own)
            return self._sum("lerp", -(end - own), np.float32(1) - weight, end)
        if kind == "addcmul":
            if factor == 1 and "addcmul" in self._usual:
                return fma(others[0], others[1], own)
            return self._sum("addcmul", factor, others[0] * others[1], own)
        if kind == "addcdiv":
            quotient = others[0] / others[1]
            return own + quotient if factor == 1 else self._sum("addcdiv", factor, quotient, own)
        raise NotImplementedError(kind)

    def _fused(
        self, weights: Any, gradients: Any, averages: Any, squares: Any, largest: Any, steps: Any, *, decoupled: bool,
        lr: float, beta1: float, beta2: float, weight_decay: float, eps: float, amsgrad: bool, maximize: bool,
        grad_scale: Any = None, found_inf: Any = None,
    ) -> None:  # fmt: skip
        assert grad_scale is found_inf is None
        for at, weight in enumerate(weights):
            p, g, m, v = (_numpy(each[at]) for each in (weights, gradients, averages, squares))
            b1, b2, rate, decay = map(_one, (beta1, beta2, lr, weight_decay))
            # A GPU has one powf; torch has two on the CPU, of which vectors have this one.
            powers = (
                torch.pow(*(torch.full((256,), each, dtype=torch.float32) for each in (beta, float(steps[at]))))
                for beta in (beta1, beta2)
            )
            bias1, bias2 = (1 - each[0] for each in powers)
            with np.errstate(all="ignore"):
                g = -g if maximize else g
                if decay and decoupled:
                    p = self._sum("decay", -(rate * decay), p, p)
                elif decay:
                    g = self._sum("decay", p, decay, g)
                m = fma(b1, m, fma(-b1, g, g))
                v = fma(b2, v, fma(-b2, g * g, g * g))
                root = v
                if amsgrad:
                    before = _numpy(largest[at])
                    root = np.where(before < v, v, before)
                    _set(largest[at], root)
                below = np.sqrt(root) / np.sqrt(_one(float(bias2))) + _one(eps)
                p = p - (rate / _one(float(bias1))) * m / below
            for tensor, values in ((weight, p), (averages[at], m), (squares[at], v)):
                _set(tensor, values)


@contextmanager
def plain_gpu(usual: frozenset[str] = ALL) -> Iterator[None]:
    """Plain Lightning on a CPU steps here as on a GPU, where ``foreach`` is the default."""
    kinds = [*optimizers._get_foreach_kernels_supported_devices(), "cpu"]
    with (
        mock.patch.object(optimizers, "_get_foreach_kernels_supported_devices", return_value=kinds),
        EmulatedGpu(usual),
    ):
        yield


@contextmanager
def gpu_device(usual: frozenset[str] = ALL, **options: Any) -> Iterator[list[SimDevice]]:
    """Every strategy inside runs on a simulated device, which confirms formulas as such a GPU does."""
    from sp_lightning.capabilities.kernels import gpu, gpu_norms

    def on_gpu_only(function: Callable[..., Any]) -> Callable[..., Any]:
        def computed(*args: Any) -> Any:
            with EmulatedGpu(usual):
                return function(*args)

        return computed

    # Of a GPU that compiles as usual the first formula is the right one: a small sample confirms it, too.
    small = {gpu: {"_COUNT": 1 << 10, "_COUNT_OF_HALVES": 1 << 12}, gpu_norms: {"_COUNTS": (1, 3, 4, 2049, 70_000)}}
    forget()
    try:
        on_gpu = mock.patch.object(SimDevice, "plain_steps_on", torch.device("cpu"))
        # In any thread, and not for what else computes on the host.
        steps = mock.patch.object(gpu, "step_as_torch", on_gpu_only(gpu.step_as_torch))
        norms = mock.patch.object(gpu_norms, "foreach_norm", on_gpu_only(gpu_norms.foreach_norm))
        with ExitStack() as stack:
            for module, counts in small.items() if usual == ALL else ():
                stack.enter_context(mock.patch.multiple(module, **counts))
            for each in (on_gpu, steps, norms, _steps_on_gpu(usual)):
                stack.enter_context(each)
            yield stack.enter_context(simulated(**options))
    finally:
        forget()


@contextmanager
def _steps_on_gpu(usual: frozenset[str]) -> Iterator[None]:
    """Layers that are stepped on the simulated device are stepped as on such a GPU, and norms are taken so there."""
    if not is_installed("capabilities.gpu_steps"):
        yield
        return
    from sp_lightning.capabilities.gpu_steps.on_device import StepsOnDevice
    from sp_lightning.capabilities.gpu_steps.staying import StayingLayers

    norms = StepsOnDevice.norms

    def as_on_gpu(step: Callable[..., None]) -> Callable[..., None]:
        def stepped(self: Any, key: Any, part_of: Any, run: Callable[[], Any], **options: Any) -> None:
            def emulated() -> Any:
                with plain_gpu(usual):
                    return run()

            step(self, key, part_of, emulated, **options)

        return stepped

    def taken(self: StepsOnDevice, gradients: Sequence[Tensor]) -> list[Tensor]:
        with EmulatedGpu(usual):
            return norms(self, gradients)

    with (
        mock.patch.object(StayingLayers, "step", as_on_gpu(StayingLayers.step)),
        mock.patch.object(StepsOnDevice, "step", as_on_gpu(StepsOnDevice.step)),
        mock.patch.object(StepsOnDevice, "norms", taken),
    ):
        yield


def forget() -> None:
    """Formulas are compared anew."""
    from sp_lightning.capabilities.kernels import gpu, gpu_norms, update

    for cached in (gpu.find_confirmed, update._checked, gpu_norms._confirmed, gpu_norms._adds_up_many):
        cached.cache_clear()


def _numpy(tensor: Tensor) -> Floats:
    found: Floats = tensor.detach().to(torch.float32).numpy()
    return found


def _set(tensor: Tensor, values: Any) -> None:
    tensor.copy_(torch.from_numpy(np.ascontiguousarray(values)).reshape(tensor.shape))
