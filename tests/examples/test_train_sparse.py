"""The always-sparse recipe: plain Lightning's results to the bit, and what Top-KAST says of weights, gradients and levels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from examples.demos import train_sparse
from examples.demos.train_sparse import FineTune, SparseLM, TopKast
from sp_lightning import SuperpipelineStrategy
from tests.support.models import llama
from tests.support.runs import Outcome, assert_equal, assert_same, fit, fused, loader, trainer_for
from tests.support.simdevice import simulated
from tests.support.tiers import first

LEVEL = ".parametrizations.weight.0.level"
TOKENS = torch.arange(6 * 2 * 16).mul(37).remainder(61).view(6, 2, 16)
BATCHES = [{"input_ids": each, "labels": each} for each in TOKENS]


@pytest.fixture(autouse=True)
def _levels_change_every_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_sparse, "EVERY", 2)


def small() -> SparseLM:
    """Its learning rate is large, so that weights come into use within six steps."""
    return SparseLM(llama(layers=2, dropout=0.0).net, lr=1e-2, steps=len(BATCHES))


def sparse_weights(module: SparseLM) -> Iterator[TopKast]:
    return (each for each in module.modules() if isinstance(each, TopKast))


def levels(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items() if name.endswith(LEVEL)}


class LevelRecorder(Callback):
    """Notes the levels that each step had."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(levels(pl_module.state_dict()))


@pytest.fixture(scope="module")
def plain() -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_sparse, "EVERY", 2)
        return fit(fused(small), BATCHES)


# ---------------------------------------------------------------------- equality with plain Lightning

OPTIONS: list[dict[str, Any]] = [
    {},
    {"activations": "recompute", "k": 1},
    {"activations": "offload"},
    {"optimizer_overlap": "forward"},
]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("options", first(OPTIONS, *OPTIONS[:2], why="other models have these ways, too"), ids=str)
@pytest.mark.parametrize("device", [nullcontext, simulated], ids=["cpu", "a device of its own"])
def test_training_is_that_of_plain_lightning(
    device: type[AbstractContextManager[Any]], options: dict[str, Any], plain: Outcome
) -> None:
    """The state has the levels, which are chosen on the host and used on the device; the optimizers' has the moments."""
    with device():
        ours = fit(fused(small), BATCHES, SuperpipelineStrategy(**options))
    assert_same(ours, plain)
    assert len(levels(ours.state)) == 2 * 7


@pytest.mark.rest("takes tenths of a second")
def test_levels_travel_with_their_layers_and_none_stays_on_the_device() -> None:
    def of(kind: type[FineTune]) -> tuple[int, int]:
        strategy = SuperpipelineStrategy(k=1)
        fit(lambda: kind(llama(layers=2, dropout=0.0).net, lr=1e-2, steps=6), BATCHES, strategy)
        return strategy.stats().fetched_bytes // len(BATCHES), strategy.plan.resident_bytes

    (fetched, resident), (fetched_dense, resident_dense) = of(SparseLM), of(FineTune)
    one_layer, two_layers = (sum(each.level.nbytes for each in list(sparse_weights(small()))[:n]) for n in (7, 14))
    # In forward and in backward, but the last layer of a forward is there when backward begins.
    assert fetched - fetched_dense == two_layers + one_layer
    assert resident == resident_dense


# ---------------------------------------------------------------------- checkpoints


def saved(strategy: Strategy | str, folder: Path) -> Path:
    """Trains one epoch of three steps: the levels are those that step 2 had, and would be chosen anew at step 4."""
    saver = ModelCheckpoint(folder, filename="middle", save_on_train_epoch_end=True, save_top_k=-1)
    fit(fused(small), BATCHES[:3], strategy, callbacks=[saver], enable_checkpointing=True)
    return folder / "middle.ckpt"


def resumed(strategy: Strategy | str, checkpoint: Path) -> dict[str, Any]:
    """Trains another epoch, in a model of other random weights."""
    seed_everything(99, verbose=False)
    module, recorder = fused(small)(), LevelRecorder()
    saver = ModelCheckpoint(checkpoint.parent, filename="end", save_on_train_epoch_end=True, save_top_k=-1)
    trainer = trainer_for(strategy, max_epochs=2, callbacks=[recorder, saver], enable_checkpointing=True)
    trainer.fit(module, loader(BATCHES[:3]), ckpt_path=checkpoint)
    return left_by(module, trainer, recorder)


def left_by(module: Any, trainer: Any, recorder: LevelRecorder) -> dict[str, Any]:
    assert trainer.global_step == 6
    optimizers = [each.state_dict() for each in trainer.optimizers]
    return {"levels": recorder.seen[-3:], "state": dict(module.state_dict()), "optimizers": optimizers}


@pytest.mark.long("takes a second or more")
def test_a_run_that_resumes_ends_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    ours, plain = saved(SuperpipelineStrategy(k=1), tmp_path / "ours"), saved("auto", tmp_path / "plain")
    content, expected = (torch.load(path, weights_only=True) for path in (ours, plain))
    for each in (content, expected):
        for callback in each["callbacks"].values():  # paths and times differ
            callback.clear()
    assert_equal(content, expected, "checkpoint")
    assert len(levels(content["state_dict"])) == 2 * 7

    recorder = LevelRecorder()
    whole = fit(fused(small), BATCHES[:3], max_epochs=2, callbacks=[recorder])
    uninterrupted = left_by(whole.module, whole.trainer, recorder)
    assert_equal(resumed("auto", plain), uninterrupted, "plain resumed by plain")
    assert_equal(resumed(SuperpipelineStrategy(k=1), ours), uninterrupted, "ours resumed by ours")
    assert_equal(resumed("auto", ours), uninterrupted, "ours resumed by plain")
    assert_equal(resumed(SuperpipelineStrategy(), plain), uninterrupted, "plain resumed by ours")


# ---------------------------------------------------------------------- the method


@pytest.mark.parametrize("strategy", ["auto", "superpipeline"])
def test_levels_change_every_two_steps_and_the_rest_never_moves(strategy: str) -> None:
    recorder = LevelRecorder()
    run = fit(small, BATCHES, strategy, callbacks=[recorder])
    seed_everything(7, verbose=False)  # as fit does
    begun = small().state_dict()
    for name in levels(run.state):
        seen = torch.stack([each[name] for each in recorder.seen])
        changed = (seen[1:] != seen[:-1]).flatten(1).any(1)
        assert changed.tolist() == [False, True, False, True, False], name
        came = (seen[-1] == 2) & (seen[0] != 2)
        assert came.any(), name
        never = (seen == 0).all(0)
        weight = name.replace(".0.level", ".original")
        assert torch.equal(run.state[weight][never], begun[weight][never])
        assert not torch.equal(run.state[weight], begun[weight])


# ---------------------------------------------------------------------- the demonstration


@pytest.mark.long("seconds of training")
def test_the_demonstration_compares_with_dense_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``"keep"``: the used weights of all layers would stay on the device between forward and backward."""
    made: list[str] = []

    def make(**options: Any) -> Any:
        made.append(options["activations"])
        return SuperpipelineStrategy(**options)

    monkeypatch.setattr(train_sparse, "SuperpipelineStrategy", make)
    arguments = ["--steps", "3", "--batch-size", "2", "--output", str(tmp_path), "--accelerator", "cpu"]
    train_sparse.main(arguments)
    assert made == ["recompute"] * 2
    said = capsys.readouterr().out
    dense, sparse = (int(each.replace(",", "")) for each in re.findall(r"rows [\d.]+, ([\d,]+) bytes fetched", said))
    assert dense < sparse  # with validations; of training alone, a test above says by how much
    assert "Used are 20.0% of sparse weights, trained 50.0%." in said
    assert len(levels(torch.load(tmp_path / "SparseLM.ckpt", weights_only=True)["state_dict"])) == 6 * 7
