"""Norms by a kernel: torch's bits of the widened gradients, whatever their sizes, or torch's operators."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from sp_lightning.capabilities.kernels import norms
from sp_lightning.capabilities.kernels.jit import Compiled
from sp_lightning.capabilities.kernels.norms import norms_of
from sp_lightning.capabilities.kernels.variants import NORM_RECIPES
from sp_lightning.core.device.host_kernels import HostKernels
from sp_lightning.core.layers import narrow_gradient
from sp_lightning.core.layers.narrow_gradient import Factor, Norms, change, keep_narrow, stored
from sp_lightning.core.updates.scaler import _are_finite

pytest.importorskip("llvmlite")
from sp_lightning.capabilities.kernels.ir import text


@pytest.fixture
def anew() -> Iterator[None]:
    """Nothing is compiled yet."""
    norms._checked.cache_clear()
    yield
    norms._checked.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threads", [1, 3])
def test_bits(threads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(threads)
    counts = [*range(2, 70), *(random.Random(7).randrange(70, 300_000) for _ in range(20))]
    least, most = (-24, 18) if dtype is torch.bfloat16 else (-7, 4.5)
    gradients = [(torch.randn(count) * 10 ** random.Random(count).uniform(least, most)).to(dtype) for count in counts]
    gradients[5][0], gradients[30][7] = torch.inf, torch.nan
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = norms_of(gradients)
    finally:
        torch.set_num_threads(before)
    assert len(found) == len(gradients)
    for gradient in gradients:
        norm = found[id(gradient)]
        assert norm.ndim == 0
        assert torch.equal(norm.nan_to_num(-1.0), torch.linalg.vector_norm(gradient.float()).nan_to_num(-1.0))


def test_what_it_leaves_to_torch() -> None:
    whole, half = torch.randn(100).bfloat16(), torch.randn(100).half()
    cut, empty = torch.randn(10, 20).bfloat16()[:, ::2], torch.zeros(0, dtype=torch.bfloat16)
    one = torch.full((1,), 1e20, dtype=torch.bfloat16)  # whose norm torch has without a square
    assert norms_of([whole, half, cut, empty, one, torch.randn(5)]).keys() == {id(whole), id(half)}


def test_a_kernel_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch, anew: None) -> None:
    monkeypatch.setattr(
        "sp_lightning.capabilities.kernels.ir.text", lambda *given: text(*given).replace("fadd float", "fsub float", 1)
    )
    gradient = torch.randn(1000).bfloat16()
    assert norms_of([gradient]) == {}
    assert torch.equal(Norms().of([gradient])[0], torch.linalg.vector_norm(gradient))


def test_other_recipes_are_other_bits_here() -> None:
    """But for float16, whose squares are exact: with one rounding or two."""
    agree = [norms._agrees(torch.bfloat16, Compiled(text(torch.bfloat16, recipe)), recipe) for recipe in NORM_RECIPES]
    assert agree.count(True) == 1


@pytest.mark.parametrize(
    ("number", "by_kernel"),
    [(2.0**-16, True), (1.0, True), (2.0**-37, True), (2.0**-38, False), (2.0, False), (0.75, False)],
)
def test_what_was_unscaled_has_its_norm_multiplied(
    number: float, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that is exact, the smallest numbers included."""
    asked = Mock(wraps=norms_of)
    monkeypatch.setattr(narrow_gradient, "host_kernels", lambda: HostKernels(norms=asked))
    factor, parameters = Factor(torch.tensor(number)), [nn.Parameter(torch.zeros(1001)) for _ in range(3)]
    came = [(torch.randn(1001) * scale).half() for scale in (2e4, 1.0, 1e-7)]
    for parameter, gradient in zip(parameters, came, strict=True):
        keep_narrow(parameter, gradient, lambda: None)
        assert change(parameter, factor)
    found = Norms().of([stored(parameter) for parameter in parameters])  # type: ignore[misc]
    assert len(asked.call_args.args[0]) == 3 * by_kernel
    for norm, gradient in zip(found, came, strict=True):
        assert torch.equal(norm, torch.linalg.vector_norm(gradient.float() * number))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 65504.0, -65504.0])
def test_what_is_not_finite_is_found(value: float, dtype: torch.dtype) -> None:
    gradients = [torch.full((70_000,), 65000.0).to(dtype), torch.randn(50).to(dtype), torch.ones(1, dtype=dtype)]
    if dtype is torch.bfloat16:
        gradients[0].mul_(1e30)  # whose squares are infinite
    assert _are_finite(gradients)
    for gradient in gradients:
        before, gradient[-1] = gradient[-1].clone(), value
        assert _are_finite(gradients) is math.isfinite(value)
        gradient[-1] = before
