"""Ranks that do different things: each of them ends soon, and the error says where each of them was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from sp_lightning import SuperpipelineStrategy
from sp_lightning.experimental.ranks import collectives
from tests.support.ranks import rank, start
from tests.support.tiers import first

SECONDS = 10
"""How long the ranks may take to end, beside their start."""


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.layers(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Batches(IterableDataset[Any]):
    """Has no length. Each rank has so many batches."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers

    def __iter__(self) -> Iterator[Any]:
        yield from torch.ones(self._numbers[rank()], 2, 16)


class NoLoss(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if rank() and batch_idx == 1 else super().training_step(batch, batch_idx)


class SumsAlone(Net):
    """A path that one rank alone takes has a sum over ranks in it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if rank() == 0 and batch_idx == 1:
            dist.all_reduce(torch.ones(1))
        return loss


class SkipsAnEpoch(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if rank() and batch_idx == 1 else None


class OnOneRank(Callback):
    """Does something in one rank's second batch."""

    def __init__(self, action: Callable[[Any, Any], Any], who: int = 1) -> None:
        self.action, self.who = action, who

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if rank() == self.who and batch_idx == 1:
            self.action(trainer, pl_module)


def exchange_a_layer(trainer: Any, module: Any) -> None:
    module.layers[1] = nn.Linear(16, 16)


def to_double(trainer: Any, module: Any) -> None:
    module.layers[1].double()


def stop(trainer: Any, module: Any) -> None:
    trainer.should_stop = True


def save(trainer: Any, module: Any) -> None:
    with TemporaryDirectory() as folder:
        trainer.save_checkpoint(f"{folder}/never.ckpt")


def look_for_the_folder(trainer: Any, module: Any) -> None:
    trainer.log_dir  # noqa: B018 Lightning sends rank 0's to all ranks


BACKWARD = "backward, batch 1 of epoch 0"
EXCHANGE = "an exchange of parameters or modules"
UNEVEN = Batches(2, 3)
EVEN = Batches(4, 4)
Case = tuple[type[Net], Batches, Callable[[], list[Callback]], tuple[str, ...]]
CASES: dict[str, Case] = {
    "rank 1 has a batch more": (Net, UNEVEN, list, ("rank 0 the end of its run", "batch 1 of epoch 0")),
    "rank 0 has a batch more": (Net, Batches(3, 2), list, ("rank 1 the end of its run", "batch 1 of epoch 0")),
    "a batch more before a checkpoint": (
        Net, UNEVEN, lambda: [ModelCheckpoint(every_n_epochs=1)],
        ("disagree", "Lightning's sum over ranks, batch 1", "the beginning of the next batch, batch 1"),
    ),
    "a batch more in each of two epochs": (
        Net, UNEVEN, lambda: [NextEpoch()], ("disagree", "batch 0 of epoch 1", "batch 2 of epoch 0"),
    ),
    "rank 1 exchanges a layer": (
        Net, EVEN, lambda: [OnOneRank(exchange_a_layer)], ("disagree", EXCHANGE, "batch 1 of epoch 0"),
    ),
    "rank 0 changes a dtype": (
        Net, EVEN, lambda: [OnOneRank(to_double, 0)], ("disagree", EXCHANGE, "batch 1 of epoch 0"),
    ),
    "rank 1 has no loss": (NoLoss, EVEN, list, ("Skipping the `training_step` by returning None",)),
    "rank 1 skips an epoch": (SkipsAnEpoch, EVEN, list, ("rank 1 the end of its run", BACKWARD)),
    "rank 1 stops": (Net, EVEN, lambda: [OnOneRank(stop)], ("rank 1 the end of its run", "batch 1 of epoch 0")),
    "rank 0 saves": (
        Net, EVEN, lambda: [OnOneRank(save, 0)], ("disagree", "gathering of an optimizer's state", BACKWARD),
    ),
    "rank 0 looks for the folder": (
        Net, EVEN, lambda: [OnOneRank(look_for_the_folder, 0)], ("disagree", "Lightning's broadcast", BACKWARD),
    ),
    "the user's own sum": (SumsAlone, EVEN, list, ("has lost other ranks while it waited for backward",)),
}  # fmt: skip


class NextEpoch(Callback):
    """Has two epochs."""

    def on_fit_start(self, trainer: Any, *_: Any) -> None:
        trainer.fit_loop.max_epochs = 2


def train(name: str, folder: str, **options: Any) -> None:
    kind, batches, callbacks, _ = CASES[name]
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=SuperpipelineStrategy(**options), max_epochs=1, logger=False,
        callbacks=(added := callbacks()), enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in added),
    )  # fmt: skip
    (Path(folder) / f"begun by {rank()}").write_text(str(monotonic()))  # a clock that all processes have
    # A process group waits for half an hour.
    with mock.patch.object(collectives, "TIMEOUT", timedelta(seconds=3)):
        try:
            trainer.fit(kind(), DataLoader(batches, batch_size=None))
        except BaseException:
            (Path(folder) / "failed").touch()
            raise
    deadline = monotonic() + SECONDS
    while not (Path(folder) / "failed").exists():  # the other rank does not wait for the end of this process
        assert monotonic() < deadline, "the other rank waits still"
        sleep(0.05)


QUICK = ("rank 1 has a batch more", "rank 1 exchanges a layer")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("name", first(list(CASES), *QUICK, why="two stand for all"))
def test_ranks_that_part_end_soon(name: str, tmp_path: Any) -> None:
    check(name, tmp_path)


@pytest.mark.long("the same as without updates in the background")
@pytest.mark.parametrize("name", ["rank 1 has a batch more", "rank 0 changes a dtype", "rank 1 stops"])
def test_ranks_that_part_while_updates_run_under_forward(name: str, tmp_path: Any) -> None:
    check(name, tmp_path, optimizer_overlap="forward")


def check(name: str, folder: Any, **options: Any) -> None:
    started = start(2, train, name, str(folder), **options)
    errors = [error for error, _ in started.outcomes() if error is not None]
    took = monotonic() - min(float(file.read_text()) for file in Path(folder).glob("begun by *"))
    assert errors
    assert any(all(each in error for each in CASES[name][3]) for error in errors), errors
    assert any("RankError" in error for error in errors)
    assert not any("waits still" in error for error in errors)
    assert took < SECONDS, f"it took {took:.0f} seconds"
    assert not any(process.is_alive() for process in started.processes)
