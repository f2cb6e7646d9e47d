"""Whole runs on a GPU beside plain Lightning whose gradients are moved to the CPU, and unscaled, clipped and stepped there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sp_lightning import SuperpipelineStrategy
from tests.support.gpu_reference import BATCHES, DEVICE, GPU, OPTIMIZERS, RUNS, by_place, ways
from tests.support.models import Module, llama
from tests.support.nets import Stepped
from tests.support.runs import assert_equal, fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("deterministic"),
]


def assert_plain(make: Any, batches: Any, *, overlap: Any = "auto", **options: Any) -> SuperpipelineStrategy:
    """Compares losses, weights and state with those of the same program that steps on the CPU."""
    on_host = by_place(0, device=DEVICE)
    plain = fit(make, batches, on_host, **GPU, **options)
    assert on_host.moved
    strategy = SuperpipelineStrategy(k=1, optimizer_overlap=overlap)
    ours = fit(make, batches, strategy, **GPU, **options)
    expected = {name: value.cpu() for name, value in plain.state.items()}
    assert_equal({name: value.cpu() for name, value in ours.state.items()}, expected, "state")
    for mine, theirs in zip(ours.optimizers, plain.optimizers, strict=True):
        for index, values in theirs["state"].items():
            for name, value in values.items():
                own = mine["state"][index][name]
                assert own is value is None or torch.equal(own.cpu(), value.cpu()), (index, name)
    return strategy


UNFUSED = [name for name in OPTIMIZERS if "fused" not in name]
"""A fused optimizer unscales by itself in float16: the log says that its bits differ."""


@pytest.mark.parametrize(
    ("name", "run", "precision"),
    [*ways(OPTIMIZERS, ["32-true", "bf16-mixed", "bf16-true"]), *ways(UNFUSED, ["16-mixed"])],
)
def test_a_program_that_steps_on_the_cpu_has_the_same_bits(name: str, run: str, precision: str) -> None:
    assert_plain(partial(Stepped, OPTIMIZERS[name]), BATCHES, precision=precision, **RUNS[run])


def test_clipping_for_a_fused_optimizer_in_mixed_precision_is_lightnings_error() -> None:
    options = {**GPU, **RUNS["clipped"], "precision": "bf16-mixed"}
    for strategy in (by_place(0, device=DEVICE), SuperpipelineStrategy(k=1)):
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            fit(partial(Stepped, OPTIMIZERS["AdamW, fused"]), BATCHES[:1], strategy, **options)


@pytest.mark.parametrize("overlap", ["off", "forward", "backward"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_whenever_updates_run(precision: str, overlap: str) -> None:
    assert_plain(partial(Stepped, OPTIMIZERS["AdamW"]), BATCHES, precision=precision, overlap=overlap)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_a_language_model(precision: str) -> None:
    tokens = torch.arange(64).view(2, 32) % 61
    batches = [{"input_ids": tokens.roll(step, 1), "labels": tokens.roll(step, 1)} for step in range(4)]
    assert_plain(partial(llama, dropout=0.0), batches, precision=precision, gradient_clip_val=1.0)


def test_large_and_odd_weights() -> None:
    """Norms of more chunks than a block has threads, and of numbers of elements that are no multiple of four."""

    class Odd(Module):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Linear(16, 1003), nn.Linear(1003, 40_009), nn.Linear(40_009, 16)))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    assert_plain(Odd, BATCHES[:3], precision="bf16-mixed", gradient_clip_val=1.0)
