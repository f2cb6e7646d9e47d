"""Norms by a kernel: torch's bits of the widened gradients, whatever their sizes, or torch's operators."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from sp_lightning.kernels import norms
from sp_lightning.kernels.norms import norms_of
from sp_lightning.weights.narrow_gradient import Norms

pytest.importorskip("llvmlite")


@pytest.fixture
def anew() -> Iterator[None]:
    """Nothing is compiled yet."""
    norms._checked.cache_clear()
    yield
    norms._checked.cache_clear()


@pytest.mark.parametrize("threads", [1, 3])
def test_bits(threads: int) -> None:
    torch.manual_seed(threads)
    counts = [*range(2, 70), *(random.Random(7).randrange(70, 300_000) for _ in range(20))]
    gradients = [(torch.randn(count) * 10 ** random.Random(count).uniform(-24, 18)).bfloat16() for count in counts]
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
    assert norms_of([whole, half, cut, empty, one, torch.randn(5)]).keys() == {id(whole)}


def test_a_kernel_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch, anew: None) -> None:
    whole = norms._Text.whole
    monkeypatch.setattr(norms._Text, "whole", lambda self: whole(self).replace("fadd float", "fsub float", 1))
    gradient = torch.randn(1000).bfloat16()
    assert norms_of([gradient]) == {}
    assert torch.equal(Norms().of([gradient])[0], torch.linalg.vector_norm(gradient))
