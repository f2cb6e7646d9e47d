"""The heart: training through a window of layers is bitwise equal to plain Lightning."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from tests.support.bare import assert_like_plain
from tests.support.models import (
    CASES,
    llama,
    tokens,
)
from tests.support.poison import poisoned
from tests.support.reference import plain, run
from tests.support.runs import Outcome, assert_same, fit, superpipeline

ALL = 99  # more than any model here has


@pytest.mark.parametrize("k_prime", [1, 2])
@pytest.mark.parametrize("k", [1, 2, 3, ALL])
@pytest.mark.parametrize("name", CASES)
def test_training_is_bitwise_equal(name: str, k: int, k_prime: int) -> None:
    assert_same(run(CASES[name], superpipeline(k=k, k_prime=k_prime)), plain(name))


@pytest.mark.parametrize(("k", "k_prime"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("name", CASES)
def test_nobody_reads_memory_that_is_not_theirs(name: str, k: int, k_prime: int) -> None:
    with poisoned():
        ours = run(CASES[name], superpipeline(k=k, k_prime=k_prime))
    assert_same(ours, plain(name))


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
        {"gradient_clip_val": 0.1, "max_epochs": 2, "val_check_interval": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "name", ["llama-dropout", "llama-checkpoint-reentrant", "gpt2-tied", "resnet50", "reused", "frozen", "returns-view"]
)
def test_accumulation_and_clipping(name: str, options: dict[str, Any], poison: bool) -> None:
    with poisoned() if poison else nullcontext():
        ours = run(CASES[name], superpipeline(k=2, k_prime=1), **options)
    assert_same(ours, plain(name, **options))


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_bf16_mixed(name: str, k: int) -> None:
    """Autocast keeps copies of its own for backward; what it leaves alone comes from wherever the weight is then."""
    options: dict[str, Any] = {"precision": "bf16-mixed"}
    if name not in ("gan", "lbfgs"):
        options |= {"accumulate_grad_batches": 2}
    with poisoned():
        ours = run(CASES[name], superpipeline(k=k), **options)
    assert_same(ours, plain(name, **options))


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
@pytest.mark.parametrize("name", ["llama-dropout", "resnet50", "t5-checkpoint", "lstm"])
def test_precision(name: str, precision: Any) -> None:
    if (name, precision) == ("t5-checkpoint", "16-true"):
        pytest.skip("its recompute has another dtype on plain Lightning, and autograd refuses it")

    def make() -> Any:
        module = CASES[name].make()
        convert = {"64-true": module.double, "bf16-true": module.bfloat16, "16-true": module.half}.get(
            precision, lambda: module
        )
        return convert()

    def batches() -> Any:
        return CASES[name].batches()

    reference = fit(make, batches(), precision=precision)
    assert_same(fit(make, batches(), superpipeline(k=1, k_prime=2), precision=precision), reference)


@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize("init_scale", [2.0**10, 2.0**40])
@pytest.mark.parametrize("name", ["llama-dropout", "stack"])
def test_16_mixed_scales_skips_and_grows(name: str, init_scale: float, clip: float | None) -> None:
    """With the scaler's state; the larger scale makes gradients infinite, so that steps are skipped."""

    def run(strategy: Any) -> tuple[Outcome, dict[str, Any]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2, backoff_factor=2.0**-20)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        options = {"plugins": [plugin], "gradient_clip_val": clip, "max_epochs": 2}
        return fit(CASES[name].make, CASES[name].batches(), strategy, **options), plugin.state_dict()

    (ours, our_scaler), (plain, plain_scaler) = run(superpipeline(k=1)), run("auto")
    assert_same(ours, plain)
    assert our_scaler == plain_scaler
    assert plain_scaler["scale"] != init_scale


def test_the_comparison_can_fail() -> None:
    """A wrong gradient in one layer, one bit in one parameter: both are seen."""
    reference = plain("stack")
    ours = run(CASES["stack"], superpipeline())
    name = "net.blocks.2.inner.weight"
    ours.state[name] = ours.state[name].clone()
    ours.state[name].view(-1)[3] += 1e-7
    with pytest.raises(AssertionError, match=name):
        assert_same(ours, reference)


@pytest.mark.parametrize("batch_count", [1, 5])
def test_without_the_callback(batch_count: int) -> None:
    """The strategy alone is right; the callback only makes it fast and legible."""
    batches = tokens(batch_count)
    ours = fit(llama, batches, superpipeline(callback=False), val=batches)
    assert_same(ours, fit(llama, batches, val=batches))


@pytest.mark.parametrize("name", CASES)
def test_the_path_that_users_take(name: str) -> None:
    """The recorder of the equality tests overrides a hook, so with it copies were never kept: this runs without it."""
    if name == "checkpoint-whole":
        pytest.skip("its batches need gradients of their own")
    assert_like_plain(CASES[name].make, CASES[name].batches(), max_epochs=2)
