"""Layers that stay on a GPU with their optimizer state: the unchanged program's bits, whatever share stays."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from sp_lightning import SuperpipelineStrategy
from tests.support.plain_bits import BATCHES, GPU, OPTIMIZERS, RUNS, Stepped
from tests.support.runs import Outcome, assert_equal, fit

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("deterministic"),
]


class Looks(Callback):
    """Reads a weight, which brings its layer to the host; writes another one every second time."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        pl_module.net.head.weight.sum()
        if trainer.global_step % 2:
            pl_module.net.stem.weight.data.mul_(0.5)


def compare(make: Any, *, callbacks: Any = tuple, **options: Any) -> tuple[SuperpipelineStrategy, Outcome]:
    """Compares losses, weights and state with the unchanged program's."""
    trainer = {
        name: options.pop(name) for name in (*GPU, "precision", *RUNS["accumulated, clipped"]) if name in options
    }
    plain = fit(make, BATCHES, "auto", callbacks=[*callbacks()], **GPU, **trainer)
    strategy = SuperpipelineStrategy(k=1, **options)
    ours = fit(make, BATCHES, strategy, callbacks=[*callbacks()], **GPU, **trainer)
    expected = {name: value.cpu() for name, value in plain.state.items()}
    assert_equal({name: value.cpu() for name, value in ours.state.items()}, expected, "state")
    for mine, theirs in zip(ours.optimizers, plain.optimizers, strict=True):
        for index, values in theirs["state"].items():
            for name, value in values.items():
                assert torch.equal(mine["state"][index][name].cpu(), value.cpu()), (index, name)
    return strategy, ours


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("overlap", ["off", "auto"])
def test_all_steps_on_the_gpu(overlap: Any, run: str, precision: str) -> None:
    for share in (0.5, 1.0):
        strategy, _ = compare(
            partial(Stepped, OPTIMIZERS["AdamW"]), optimizer_on="gpu", gpu_layers=share, optimizer_overlap=overlap,
            precision=precision, **RUNS[run],
        )  # fmt: skip
        assert strategy.stats().step_download_bytes < 10 * 2**20


def test_code_that_reads_and_writes_weights_finds_them() -> None:
    compare(partial(Stepped, OPTIMIZERS["AdamW"]), optimizer_on="gpu", gpu_layers=1.0, callbacks=lambda: [Looks()])


def test_as_many_stay_as_fit() -> None:
    strategy, _ = compare(
        partial(Stepped, OPTIMIZERS["AdamW"]), optimizer_on="gpu", gpu_layers="auto", gpu_memory="1GiB"
    )
    assert "layers that stay" in str(strategy.plan)
