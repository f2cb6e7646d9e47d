"""A plan and a run: what is said without values is what a run has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sp_lightning import SuperpipelineStrategy
from tests.planner.models import Known, TiedByCode
from tests.support.models import Module, Stack, vectors
from tests.support.planner import plan
from tests.support.runs import fit, fused, superpipeline
from tests.support.simdevice import simulated
from tests.support.tiers import first

WINDOW = ("--k", "1", "--k-prime", "1")
STACK = ("tests.support.models:Stack", "--input", *map(str, vectors()[0].shape), *WINDOW)


@pytest.mark.rest("takes tenths of a second")
def test_layers_and_the_peak_of_device_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Activations included; the simulated device counts every byte."""
    found = plan(capsys, "tests.planner.models:Known", "--precision", "32-true", *WINDOW)
    with simulated(capacity=2**40) as devices:
        outcome = fit(Known, [torch.zeros(4, 16)] * 3, superpipeline(k=1, k_prime=1), recorded="losses")
    run: Any = outcome.trainer.strategy
    assert [each["bytes"] for each in found["layers"]] == [each.nbytes for each in run.plan.layers]
    (window,) = found["windows"]
    assert devices[0].peak <= window["device_bytes"] <= 1.5 * devices[0].peak


@pytest.mark.rest("takes tenths of a second")
def test_the_peak_of_a_table_whose_whole_weight_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    """It was planned as if only rows came: a run's peak was nine times what had been said."""
    options = ["--precision", "32-true", "--optimizer-overlap", "off", *WINDOW]
    found = plan(capsys, "tests.planner.models:TiedByCode", *options)
    bound = found["windows"][0]["device_bytes"] - found["activation_bytes"]
    strategy = SuperpipelineStrategy(k=1, k_prime=1, layers=["tok"])
    fit(TiedByCode, [torch.zeros(2, 4, dtype=torch.long)] * 2, strategy)
    assert 4096 * 32 * 4 < strategy.stats().peak_device_bytes <= bound


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_host_memory_with_layers_that_stay(precision: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options: Any = {"optimizer_on": "gpu", "optimizer_overlap": "forward", "gpu_layers": 2}
    strategy = SuperpipelineStrategy(k=1, k_prime=1, **options)
    fit(lambda: Module(Stack()), vectors(4), strategy, recorded="nothing", precision=precision, gradient_clip_val=0.1)
    asked = ["--optimizer-on", "gpu", "--optimizer-overlap", "forward", "--gpu-layers", "2", "--gradient-clip", "norm"]
    found = plan(capsys, *STACK, "--precision", precision, *asked)
    assert found["host_bytes"] == strategy.ledger.nbytes + strategy.ledger.returning
    assert strategy.ledger.returning > 0
    assert found["windows"][0]["device_bytes"] - found["activation_bytes"] == strategy.plan.peak_device_bytes


STEPS = [(1, None), (4, None), (1, "norm"), (4, "norm"), (4, "value")]


@pytest.mark.parametrize(("batches", "clip"), first(STEPS, (4, "norm"), why="each alone"))
@pytest.mark.parametrize("precision", first(["bf16-mixed", "32-true"], "bf16-mixed", why="without casts"))
def test_host_memory_of_accumulated_and_clipped_batches(
    precision: Any, batches: int, clip: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    options: Any = {} if clip is None else {"gradient_clip_val": 0.1, "gradient_clip_algorithm": clip}
    strategy = SuperpipelineStrategy(k=1, k_prime=1, optimizer_overlap="forward")
    fit(
        fused(lambda: Module(Stack())), vectors(4), strategy, recorded="nothing", precision=precision,
        accumulate_grad_batches=batches, **options,
    )  # fmt: skip
    arguments = ["--accumulate-grad-batches", str(batches), "--precision", precision]
    found = plan(capsys, *STACK, *arguments, *(["--gradient-clip", clip] if clip else []))
    assert found["host_bytes"] == strategy.ledger.nbytes
