"""Checkpoints of several devices are plain Lightning's: any number of devices resumes from those of any other."""

from __future__ import annotations

from pathlib import Path
from time import sleep
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from sp_lightning import SuperpipelineStrategy
from sp_lightning.experimental.ranks.owners import RankOwners
from tests.equality.on_ranks import InOrder, divided, seen
from tests.support.models import Module, Stack, vectors
from tests.support.ranks import Number, devices, in_ranks, rank, total
from tests.support.runs import assert_equal, fit

BATCHES = 12


class Net(Module):
    def __init__(self) -> None:
        super().__init__(Stack())


def train(ranks: Number, plain: bool, epochs: int, resume: str | None, save: str) -> dict[str, Any]:
    """Trains up to so many epochs, each of the same number of batches on all devices together."""
    strategy: Any = InOrder() if plain else SuperpipelineStrategy(k=1)
    if plain and ranks == 1:
        strategy = "auto"
    outcome = fit(
        Net, vectors(BATCHES), strategy, ckpt_path=None if resume is None else Path(resume),
        max_epochs=epochs, limit_train_batches=BATCHES // total(ranks), recorded="losses", **devices(ranks),
    )  # fmt: skip
    outcome.trainer.save_checkpoint(save)
    return seen(outcome)


def chain(plain: bool, folder: Path, numbers: tuple[Number, ...]) -> tuple[list[dict[str, Any]], Path]:
    """One epoch on each number of devices, one after the other."""
    resume: str | None = None
    for epoch, ranks in enumerate(numbers, start=1):
        save = str(folder / f"{epoch}.ckpt")
        found = in_ranks(ranks, train, ranks, plain, epoch, resume, save) if ranks != 1 else [
            train(1, plain, epoch, resume, save)
        ]  # fmt: skip
        resume = save
    return found, Path(save)


NODES = pytest.mark.rest("files are the same of one node and of several")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "numbers",
    [pytest.param((2, 1), marks=pytest.mark.rest("the way back")), pytest.param((1, 2), marks=pytest.mark.rest("the way there")),
     (2, 2), pytest.param(((2, 2), 1), marks=NODES), pytest.param((1, (2, 2)), marks=NODES),
     pytest.param(((2, 1), (2, 2), 2), marks=pytest.mark.long("nodes again"))],
    ids=str,
)  # fmt: skip
def test_another_number_of_devices_goes_on(numbers: tuple[Number, ...], tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "ours").mkdir()
    plain, theirs = chain(True, tmp_path / "plain", numbers)
    ours, mine = chain(False, tmp_path / "ours", numbers)
    for number, (a, b) in enumerate(zip(ours, plain, strict=True)):
        assert_equal(a, divided(b, number), f"rank {number}")
    for name in ("state_dict", "optimizer_states"):
        files = [torch.load(file, weights_only=True)[name] for file in (mine, theirs)]
        assert_equal(files[0], files[1], name)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("ranks", [2, pytest.param((2, 2), marks=NODES)], ids=str)
def test_plain_lightning_goes_on_from_ours(ranks: Number, tmp_path: Path) -> None:
    save = str(tmp_path / "2.ckpt")
    in_ranks(ranks, train, ranks, False, 1, None, save)
    plain = train(1, True, 2, save, str(tmp_path / "plain.ckpt"))
    ours = train(1, False, 2, save, str(tmp_path / "ours.ckpt"))
    assert_equal(ours, plain, "resumed")


class Loads(Callback):
    """Loads a state in the middle of training. Rank 1 comes late to it; rank 0 is late in making it everybody's."""

    def __init__(self) -> None:
        self.seen: list[list[torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            return
        state = {name: torch.full_like(value, 0.5) for name, value in pl_module.state_dict().items()}
        sleep(3 * SECONDS * rank())
        self._look(pl_module)
        merge = RankOwners._merge

        def late(owners: Any) -> None:
            sleep(SECONDS * (rank() == 0))
            merge(owners)

        with mock.patch.object(RankOwners, "_merge", late):
            trainer.strategy.load_model_state_dict({"state_dict": state})
        self._look(pl_module)

    def _look(self, module: Any) -> None:
        self.seen.append([parameter.detach().clone() for parameter in module.parameters()])


SECONDS = 0.4


def train_and_load(plain: bool) -> Any:
    loads = Loads()
    strategy: Any = InOrder() if plain else SuperpipelineStrategy(k=1)
    fit(Net, vectors(8), strategy, devices=2, callbacks=[loads])
    return loads.seen


@pytest.mark.long("ranks that are held up; the first tier loads states before training")
def test_a_state_that_is_loaded_in_the_middle() -> None:
    """No rank sees it before it has loaded it, and each sees it afterwards."""
    assert_equal(in_ranks(2, train_and_load, False), in_ranks(2, train_and_load, True), "seen")


# ---------------------------------------------------------------------- loops without training


class Says(Net):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True, batch_size=2)


def evaluate(plain: bool, checkpoint: str) -> Any:
    pl.seed_everything(7, verbose=False)
    from tests.support.runs import loader, trainer_for

    strategy: Any = InOrder() if plain else SuperpipelineStrategy(k=1)
    trainer = trainer_for(strategy, devices=2, enable_progress_bar=False)
    module = Says()
    said = trainer.predict(module, loader(vectors(6)), ckpt_path=checkpoint)
    return said, trainer.test(module, loader(vectors(6)), verbose=False)


@pytest.mark.long("takes a second or more")
def test_predict_and_test_are_lightnings(tmp_path: Path) -> None:
    save = str(tmp_path / "1.ckpt")
    train(1, True, 1, None, save)
    assert_equal(in_ranks(2, evaluate, False, save), in_ranks(2, evaluate, True, save), "evaluated")
