"""The emulator of a GPU's operators: each of its operations, compared with what rounds as a GPU does."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.emulated_gpu import EmulatedGpu, fma, norm

NONE: frozenset[str] = frozenset()


def numbers(count: int, seed: int) -> Any:
    """Numbers of all exponents, and special ones."""
    generator = np.random.default_rng(seed)
    found = generator.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    near = generator.standard_normal(count).astype(np.float32)
    return np.concatenate([found, near, np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45], np.float32)])


def test_sums_are_rounded_once_as_by_c() -> None:
    """A product that nearly cancels against the other summand shows a second rounding."""
    fmaf = ctypes.CDLL("libm.so.6").fmaf
    fmaf.argtypes, fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float
    a, b, c = (numbers(4000, seed) for seed in range(3))
    with np.errstate(all="ignore"):
        near = -(a * b)
        found = fma(np.append(a, a), np.append(b, b), np.append(c, near))
    theirs = np.array([fmaf(*each) for each in zip(np.append(a, a), np.append(b, b), np.append(c, near), strict=True)])
    np.testing.assert_array_equal(found, theirs.astype(np.float32))


OPERATORS: dict[str, Any] = {
    "neg": lambda x, y: torch._foreach_neg([x]),
    "sqrt": lambda x, y: torch._foreach_sqrt([x.abs()]),
    "mul": lambda x, y: torch._foreach_mul([x], 0.37),
    "mul by several": lambda x, y: torch._foreach_mul([x], [0.37]),
    "add a number": lambda x, y: torch._foreach_add([x], 1e-8),
    "maximum": lambda x, y: torch._foreach_maximum([x], [y]),
    "div": lambda x, y: torch._foreach_div([x], [0.37]),
    "a sum without a factor": lambda x, y: torch._foreach_add([x], [y]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_single_operations_are_torchs(name: str, dtype: torch.dtype) -> None:
    """Where one rounding is all, a GPU and a CPU agree. Roots are compared with Python's, because torch's may be MKL's."""
    x, y = (torch.randn(1000).to(dtype) for _ in range(2))
    (expected,) = OPERATORS[name](x, y)
    if name == "sqrt":
        expected = torch.tensor([math.sqrt(each) for each in x.abs().tolist()]).to(dtype)
    with EmulatedGpu():
        (found,) = OPERATORS[name](x, y)
    assert torch.equal(found, expected)


def test_what_is_open_changes_bits() -> None:
    x, y, z = (torch.randn(100_000) for _ in range(3))
    calls = {
        "add": lambda: torch._foreach_add([x], [y], alpha=0.37),
        "lerp": lambda: torch._foreach_lerp([x], [y], 0.1),
        "addcmul": lambda: torch._foreach_addcmul([x], [y], [z], 0.37),
        "addcdiv": lambda: torch._foreach_addcdiv([x], [y], [z], 0.37),
        "div": lambda: torch._foreach_div([x], [0.37]),
    }
    for name, call in calls.items():
        with EmulatedGpu(NONE):
            (twice,) = call()
        with EmulatedGpu(frozenset({name})):
            (once,) = call()
        assert not torch.equal(once, twice), name
        assert torch.allclose(once, twice, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("count", [1, 3, 8, 2047, 65536, 65537, 200_000])
def test_norms_are_norms(count: int) -> None:
    values = torch.randn(count)
    assert float(norm(values.numpy())) == pytest.approx(float(values.double().norm()), rel=1e-6)
