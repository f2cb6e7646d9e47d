"""``gpu_layers`` on a GPU: layers that stay are ordinary modules there, and steps are divided by place."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from sp_lightning import SuperpipelineStrategy, stream
from tests.support.gpu_reference import BATCHES, DEVICE, GPU, OPTIMIZERS, RUNS, by_place, ways
from tests.support.nets import Stepped
from tests.support.quantised import CASES as QUANTISED
from tests.support.runs import Outcome, assert_equal, fit
from tests.support.simdevice import Mixed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("deterministic"),
]


class Looks(Callback):
    """Reads a weight; writes another one, that stays, every second time."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        pl_module.net.head.weight.sum()
        if trainer.global_step % 2:
            pl_module.net.stem.weight.data.mul_(0.5)


TRAINER = ("precision", *RUNS["accumulated, clipped"], "gradient_clip_algorithm")


def compare(make: Any, *, callbacks: Any = tuple, **options: Any) -> tuple[SuperpipelineStrategy, Outcome]:
    """Compares losses, weights and state with the unchanged program's, or with those of steps that are divided by place."""
    trainer = {name: options.pop(name) for name in TRAINER if name in options}
    reference = "auto" if options.get("optimizer_on") == "gpu" else by_place(options["gpu_layers"], device=DEVICE)
    plain = fit(make, BATCHES, reference, callbacks=[*callbacks()], **GPU, **trainer)
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


@pytest.mark.parametrize("overlap", ["off", "auto"])
@pytest.mark.parametrize(
    ("name", "run", "precision"),
    ways(["AdamW", "AdamW, fused", "SGD, momentum"], ["32-true", "bf16-mixed", "bf16-true", "16-mixed"]),
)
def test_steps_are_divided_by_place(name: str, run: str, precision: str, overlap: Any) -> None:
    """The user's settings hold on the GPU (torch takes ``foreach`` there), and the CPU steps fused."""
    for share in (0.5, 1.0):
        compare(
            partial(Stepped, OPTIMIZERS[name]),
            gpu_layers=share,
            optimizer_overlap=overlap,
            precision=precision,
            **RUNS[run],
        )


class Places(Callback):
    """Looks where weights and their state are, in a run of ours and beside it."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if not isinstance(strategy, SuperpipelineStrategy):
            return
        stay = strategy._run.engine.found.on_gpu
        is_there = strategy._run.engine.device.has
        for p in pl_module.parameters():
            assert is_there(p) is (p in stay)
            for name, value in trainer.optimizers[0].state[p].items():
                assert is_there(value) is (p in stay and name != "step")
        with strategy.gpu_released():
            assert not any(map(is_there, pl_module.parameters()))
        self.is_there = is_there


def test_weights_and_state_are_where_they_stay() -> None:
    places = Places()
    _, ours = compare(partial(Stepped, OPTIMIZERS["AdamW"]), gpu_layers=0.5, callbacks=lambda: [places])
    assert not any(map(places.is_there, ours.module.parameters())), "the run is over"


def test_the_parts_of_quantised_weights_are_moved() -> None:
    module: Any = QUANTISED["int8"]()
    module.net.eval()  # without dropout
    inputs = torch.arange(8).view(1, 8)
    expected = module.net.to(DEVICE)(inputs.to(DEVICE)).logits
    module.net.cpu()
    with torch.no_grad(), stream(module.net, k=1, gpu_layers=0.5):
        assert torch.equal(module.net(inputs.to(DEVICE)).logits, expected)


def test_code_that_mixes_both_places_is_torchs_error() -> None:
    class Mixes(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            pl_module.net.stem.bias + pl_module.net.head.bias

    with pytest.raises((RuntimeError, Mixed), match="device"):
        compare(partial(Stepped, OPTIMIZERS["AdamW"]), gpu_layers=2, callbacks=lambda: [Mixes()])
