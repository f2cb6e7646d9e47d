"""Several nodes, of which one fails, stands still, or has something else: one error names it, soon, and no file is torn.

Processes stand for nodes, so a node that goes is two processes that are killed, and one that stands still two that are stopped.
"""

from __future__ import annotations

import os
import re
import signal
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from sp_lightning import SuperpipelineStrategy
from sp_lightning.experimental.ranks import collectives
from tests.support.ranks import rank, start
from tests.support.tiers import some

pytestmark = pytest.mark.rest("four processes each; test_ranks_faults has errors in the first tier")

NODES = (2, 2)
SECONDS = 10
"""How long the others may take to end."""
WAITS = 4
"""Seconds that take the place of the half an hour that a process group waits, where somebody does not come."""


def node() -> int:
    return int(os.environ["NODE_RANK"])


class Net(pl.LightningModule):
    """Is another one on node 1, in one way, or does something there in its second batch."""

    def __init__(self, how: str, who: int, where: str) -> None:
        super().__init__()
        self.how, self.who, self.where = how, who, where
        width = 24 if how == "another model" and node() else 16
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, width), nn.Linear(width, 16)) for _ in range(3)))
        if how == "another weight" and node():
            with torch.no_grad():
                self.layers[1][0].weight[3, 5] += 1e-6

    def training_step(self, batch: Any, index: int) -> Any:
        self.at("forward", index)
        x = self.layers(batch)
        x.register_hook(lambda gradient: self.at("backward", index))
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        optimizer.register_step_post_hook(lambda *_: self.at("step", self.trainer.fit_loop.batch_idx))
        return optimizer

    def at(self, where: str, index: int) -> None:
        if where != self.where or index != 2:
            return
        if self.how == "raises" and rank() == self.who:
            raise ValueError("what the user's code says")
        if self.how == "is killed" and rank() == self.who:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "goes" and node() == self.who:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "stands still" and node() == self.who:
            os.kill(os.getpid(), signal.SIGSTOP)


class Batches(IterableDataset[torch.Tensor]):
    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Any:
        return iter([torch.ones(2, 16)] * self.number)


class Drifts(Callback):
    """Writes a weight on node 1 alone, after its second batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and node():
            with torch.no_grad():
                pl_module.layers[2][1].bias.mul_(0.5)


def train(how: str, who: int, where: str, folder: str) -> None:
    pl.seed_everything(1, verbose=False)
    saves = ModelCheckpoint(f"{folder}/saved", every_n_train_steps=1, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, num_nodes=2, strategy=SuperpipelineStrategy(k=1), max_epochs=1, logger=False,
        callbacks=[saves, *([Drifts()] if how == "drifts" else [])], enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    capability = "another one" if how == "another CPU" and node() else torch.backends.cpu.get_cpu_capability()
    batches = Batches(5 if how == "has a batch more" and node() == who else 4)
    waits = 60 if how == "raises" else WAITS  # who raises says so, however slow the machine is
    with (
        mock.patch.object(collectives, "TIMEOUT", timedelta(seconds=waits)),
        mock.patch.object(torch.backends.cpu, "get_cpu_capability", return_value=capability),
    ):
        trainer.fit(Net(how, who, where), DataLoader(batches, batch_size=None))


def fail(how: str, who: int, where: str, folder: Path) -> list[str]:
    """Returns how each rank has ended. Files that are there can be read."""
    started = start(NODES, train, how, who, where, str(folder))
    began = monotonic()
    if how == "stands still":
        wake(started, who)
    errors = [error or "" for error, _ in started.outcomes()]
    took = monotonic() - began
    assert took < SECONDS + 15, f"it took {took:.0f} seconds, with the start"
    for file in folder.glob("saved/*"):
        steps = torch.load(file, weights_only=True)["global_step"]
        assert file.name == f"epoch=0-step={steps}.ckpt"
    return errors


def wake(started: Any, who: int) -> None:
    """Lets the processes of a node go on when the others have ended."""
    mine, others = (started.processes[2 * each : 2 * each + 2] for each in (who, 1 - who))
    deadline = monotonic() + SECONDS + 15
    while any(each.is_alive() for each in others):
        assert monotonic() < deadline, "the others wait still"
        sleep(0.1)
    for each in mine:
        os.kill(each.pid, signal.SIGCONT)


WHERE = ("forward", "backward", "step")
SOME = [(3, "backward")]
ALL = [(who, where) for who in range(4) for where in WHERE]
WHY = "the second tier has two moments"


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(("who", "where"), some(ALL, *SOME, why=WHY))
def test_an_error_is_told_on_all_nodes(who: int, where: str, tmp_path: Path) -> None:
    errors = fail("raises", who, where, tmp_path)
    assert "ValueError: what the user's code says" in errors[who]
    for number, error in enumerate(errors):
        if number != who:
            assert "RankError" in error
            assert "what the user's code says" in error
            waited = rf"while rank {number} \(node {number // 2}\) waited for .*: ValueError"
            assert re.search(rf"rank {who} \(node {who // 2}\) has failed {waited}", error), error


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(("who", "where"), some(ALL, *SOME, why=WHY))
def test_a_process_that_is_killed_is_named_on_all_nodes(who: int, where: str, tmp_path: Path) -> None:
    errors = fail("is killed", who, where, tmp_path)
    for number, error in enumerate(errors):
        if number != who:
            assert "RankError" in error
            assert f"node {who // 2}" in error


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("where", some(WHERE, "backward", why=WHY))
@pytest.mark.parametrize("who", some([0, 1], 1, why=WHY))
def test_a_node_that_goes_is_noticed(who: int, where: str, tmp_path: Path) -> None:
    errors = fail("goes", who, where, tmp_path)
    for number in (2, 3) if who == 0 else (0, 1):
        assert re.search(r"RankError: .*(has lost other ranks|has failed) while", errors[number])


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("where", some(WHERE, "forward", why=WHY))
@pytest.mark.parametrize("who", some([0, 1], 1, why=WHY))
def test_a_node_that_stands_still_is_noticed_in_time(who: int, where: str, tmp_path: Path) -> None:
    errors = fail("stands still", who, where, tmp_path)
    others = (2, 3) if who == 0 else (0, 1)
    assert all("RankError" in error for error in errors)
    assert all("has lost other ranks while it waited for" in errors[number] for number in others), errors


DIFFERENT = {
    "another model": r"parameters of rank 2 \(node 1\) are not .* layers\.0\.0\.weight is float32 of shape \(24, 16\) on rank 2",
    "another CPU": r"kernels of rank 2 \(node 1\) are not those of rank 0: CPU capability is another one on rank 2",
    "drifts": r"writes to weights of rank 2 \(node 1\) are not those of rank 0: layers\.2 is",
}


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("how", DIFFERENT)
def test_a_node_that_has_something_else_is_named(how: str, tmp_path: Path) -> None:
    """On all ranks, and before the next step."""
    errors = fail(how, 1, "", tmp_path)
    assert all(re.search(f"ValueError: The .*{DIFFERENT[how]}", error) for error in errors), errors
    assert len(list(tmp_path.glob("saved/*"))) == 2 * (how == "drifts")


@pytest.mark.long("takes a second or more")
def test_all_nodes_begin_with_the_weights_of_rank_0(tmp_path: Path) -> None:
    assert fail("another weight", 1, "", tmp_path) == [""] * 4


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("who", some([0, 1], 1, why=WHY))
def test_a_node_with_a_batch_more_is_told_from_the_other(who: int, tmp_path: Path) -> None:
    errors = fail("has a batch more", who, "", tmp_path)
    told = [error for error in errors if "RankError" in error]
    assert told
    assert any(re.search("disagree", error) for error in told), errors
