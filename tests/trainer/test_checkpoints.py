"""Checkpoints are Lightning's own: written here they resume anywhere, and the other way round."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.models import CASES
from tests.support.runs import assert_equal, fit, loader, superpipeline, trainer_for
from tests.support.tiers import first


def save(name: str, strategy: Any, folder: Path) -> Path:
    """Train one epoch of a case and return the checkpoint's path."""
    saver = ModelCheckpoint(folder, filename="one", save_on_train_epoch_end=True, save_top_k=-1)
    fit(
        CASES[name].make, CASES[name].batches(), strategy, callbacks=[saver], enable_checkpointing=True,
        accumulate_grad_batches=2,
    )  # fmt: skip
    return folder / "one.ckpt"


def resume(name: str, strategy: Any, checkpoint: Path) -> dict[str, Any]:
    """Train a fresh module from a checkpoint for a second epoch."""
    torch.manual_seed(99)
    module = CASES[name].make()
    saver = ModelCheckpoint(checkpoint.parent, filename="resumed", save_on_train_epoch_end=True, save_top_k=-1)
    trainer = trainer_for(
        strategy, max_epochs=2, accumulate_grad_batches=2, callbacks=[saver], enable_checkpointing=True
    )
    trainer.fit(module, loader(CASES[name].batches()), ckpt_path=checkpoint)
    assert trainer.current_epoch == 2
    return {"state": dict(module.state_dict()), "optimizers": [each.state_dict() for each in trainer.optimizers]}


NAMES = ["llama-dropout", "gpt2-tied", "resnet50", "lstm", "frozen"]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    "name", first(NAMES, if_=lambda name: name != "resnet50", second=[], why="a larger model, with the same parts")
)
def test_files_are_equal_and_resume_across_strategies(name: str, tmp_path: Path) -> None:
    ours, plain = save(name, superpipeline(k=1), tmp_path / "ours"), save(name, "auto", tmp_path / "plain")
    contents = [torch.load(each, weights_only=True) for each in (ours, plain)]
    for content in contents:
        for callback in content["callbacks"].values():  # paths and times differ
            callback.clear()
    assert_equal(contents[0], contents[1], "checkpoint")
    reference = resume(name, "auto", plain)
    assert_equal(resume(name, "auto", ours), reference, "ours resumed by plain")
    assert_equal(resume(name, superpipeline(), plain), reference, "plain resumed by ours")
    assert_equal(resume(name, superpipeline(), ours), reference, "ours resumed by ours")


def test_a_single_parameter_is_saved_alone() -> None:
    """Parameters are views of a layer's block; a file with one of them must not hold the whole block."""
    module = fit(CASES["stack"].make, CASES["stack"].batches(), superpipeline()).module
    weight = module.net.blocks[0].inner.bias  # type: ignore[union-attr,index]
    alone, copied = io.BytesIO(), io.BytesIO()
    torch.save(weight.detach(), alone)
    torch.save(weight.detach().clone(), copied)
    assert alone.tell() == copied.tell()
