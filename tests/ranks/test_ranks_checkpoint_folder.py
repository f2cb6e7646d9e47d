"""Checkpoints that several ranks write together have rank 0's values, and any number of devices resumes from them."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from sp_lightning.ranks import checkpoint_folder
from sp_lightning.ranks.checkpoint_folder import read
from tests.equality.on_ranks import InOrder, seen
from tests.support.folders import Net, Saves, together
from tests.support.models import vectors
from tests.support.ranks import Number, RanksFailed, devices, in_ranks, rank, total
from tests.support.runs import assert_equal, fit

BATCHES = 12


def train(ranks: Number, kind: str, epochs: int, resume: str | None, save: str) -> dict[str, Any]:
    """Trains up to so many epochs, each of the same number of batches on all devices together."""
    with mock.patch.object(checkpoint_folder, "MAPPED", 1):
        strategy: Any = together(save_distributed_checkpoint=kind == "folder") if kind != "plain" else InOrder()
        if kind == "plain" and ranks == 1:
            strategy = "auto"
        saves = ModelCheckpoint(Path(save).parent, Path(save).stem, save_top_k=1, every_n_epochs=1)
        outcome = fit(
            Net, vectors(BATCHES), strategy, ckpt_path=None if resume is None else Path(resume), callbacks=[saves],
            max_epochs=epochs, limit_train_batches=BATCHES // total(ranks), recorded="losses", enable_checkpointing=True,
            **devices(ranks),
        )  # fmt: skip
        return seen(outcome)


def chain(kind: str, folder: Path, numbers: tuple[Number, ...]) -> tuple[list[dict[str, Any]], Path]:
    """One epoch on each number of devices, one after the other."""
    resume: str | None = None
    found: list[dict[str, Any]] = []
    for epoch, ranks in enumerate(numbers, start=1):
        save = str(folder / f"{epoch}.ckpt")
        arguments = (ranks, kind, epoch, resume, save)
        found = in_ranks(ranks, train, *arguments) if ranks != 1 else [train(*arguments)]
        resume = save
    return found, Path(str(resume))


NODES = pytest.mark.rest("several nodes; two ranks of one node write together in the first tier")


@pytest.mark.parametrize(
    "numbers",
    [pytest.param((2, 1), marks=pytest.mark.rest("one device goes on from its own in the first tier")),
     pytest.param((1, 2), marks=pytest.mark.rest("the way back")),
     pytest.param(((2, 2), 1), marks=pytest.mark.long("nodes of one device each")),
     pytest.param(((2, 1), (2, 2), 2), marks=pytest.mark.long("nodes again"))],
    ids=str,
)  # fmt: skip
def test_another_number_of_devices_goes_on(numbers: tuple[Number, ...], tmp_path: Path) -> None:
    for name in ("plain", "folder"):
        (tmp_path / name).mkdir()
    plain, theirs = chain("plain", tmp_path / "plain", numbers)
    ours, mine = chain("folder", tmp_path / "folder", numbers)
    for number, (a, b) in enumerate(zip(ours, plain, strict=True)):
        follows = number % devices(numbers[-1])["devices"]
        optimizers = [{**each, "state": {}} for each in b["optimizers"]] if follows else b["optimizers"]
        assert_equal(a, {**b, "optimizers": optimizers}, f"rank {number}")
    file = torch.load(theirs, weights_only=True)
    for name in ("state_dict", "optimizer_states"):
        assert_equal(read(mine, True)[name], file[name], name)


@pytest.mark.parametrize("ranks", [2, pytest.param((2, 2), marks=NODES)], ids=str)
def test_all_ranks_write(ranks: Number, tmp_path: Path) -> None:
    in_ranks(ranks, train, ranks, "folder", 1, None, str(tmp_path / "1.ckpt"))
    sizes = dict.fromkeys(range(total(ranks)), 0)
    for file in (tmp_path / "1.ckpt").glob("*.distcp"):
        sizes[int(re.findall(r"__(\d+)_", file.name)[0])] += file.stat().st_size
    assert all(sizes.values()), sizes
    if ranks == 2:  # rank 0 writes the optimizer's state, which rank 1 does not have
        places = FileSystemReader(tmp_path / "1.ckpt").read_metadata().storage_data.items()
        assert all("__1_" in place.relative_path for index, place in places if index.fqn.startswith("state_dict."))
    state = read(tmp_path / "1.ckpt", True)["optimizer_states"]
    assert state[0]["state"]


class Fills(Callback):
    """Writes weights of these ranks' own after the update that they are saved after."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in pl_module.parameters() if rank() in self.ranks and batch_idx == 1 else ():
            parameter.fill_(1.0 + rank())


def fill(folder: str, *ranks: int) -> None:
    with mock.patch.object(checkpoint_folder, "MAPPED", 1):
        callbacks = [Fills(*ranks), Saves(folder)]
        fit(Net, vectors(4), together(), callbacks=callbacks, recorded="nothing", **devices(2))


def test_weights_that_a_rank_has_written_since_the_update_are_its_own(tmp_path: Path) -> None:
    for name, ranks in {"nobody": (), "rank 1": (1,), "both": (0, 1)}.items():
        in_ranks(2, fill, str(tmp_path / name), *ranks)
    found = {file.name: read(file, True)["state_dict"] for file in tmp_path.iterdir()}
    assert all(bool((value == 1).all()) for value in found["both"].values())
    assert_equal(found["rank 1"], found["nobody"], "rank 1 writes its own")


def apart(folder: str, what: str) -> None:
    """Rank 1 does something else than rank 0 when a checkpoint is saved."""

    class Apart(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if what == "hook" and rank() == 0:
                checkpoint["state_dict"] = {name: value * 2 for name, value in checkpoint["state_dict"].items()}
            if what == "raises" and rank() == 1:
                raise ValueError("what the user's code says")
            if what == "no pickle" and rank() == 0:
                checkpoint["mine"] = lambda: None
            if what == "state" and rank() == 1:
                for state in self.trainer.optimizers[0].state.values():
                    state["exp_avg"].add_(1)

    def broken(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def elsewhere(self: Any, *arguments: Any) -> Any:
        """As on a node that has a file system of its own under this name."""
        self.path = Path(f"{folder} of another node")
        self.path.mkdir()
        return write_data(self, *arguments)

    write_data = FileSystemWriter.write_data
    patches = [mock.patch.object(checkpoint_folder, "MAPPED", 1)]
    if rank() == 1 and what == "full":
        patches.append(mock.patch.object(FileSystemWriter, "write_data", broken))
    if rank() == 1 and what == "blind":
        patches.append(mock.patch.object(FileSystemWriter, "write_data", elsewhere))
    for patch in patches:
        patch.start()
    try:
        ranks: Number = (2, 1) if what == "state" else 2
        fit(Apart, vectors(4), together(), callbacks=[Saves(folder)], recorded="nothing", **devices(ranks))
    finally:
        mock.patch.stopall()


def test_what_rank_0_puts_into_it_is_written_by_rank_0(tmp_path: Path) -> None:
    in_ranks(2, apart, str(tmp_path / "a"), "hook")
    in_ranks(2, apart, str(tmp_path / "b"), "nothing")
    ours, theirs = read(tmp_path / "a", True)["state_dict"], read(tmp_path / "b", True)["state_dict"]
    assert_equal(ours, {name: value * 2 for name, value in theirs.items()}, "doubled")


@pytest.mark.parametrize(
    ("what", "ranks", "said"),
    [
        ("full", 2, "The checkpoint could not be written: rank 1: No space left on device"),
        *(
            pytest.param(what, 2, said, marks=pytest.mark.rest("one error is in the first tier"))
            for what, said in (
                ("blind", "rank 0: files of rank 1 are not in the folder"),
                ("raises", "what the user's code says"),
                ("no pickle", "AttributeError: Can't pickle local object"),
            )
        ),
        pytest.param("state", (2, 1), "digests of the weights for a checkpoint", marks=NODES),
    ],
)
def test_what_one_rank_cannot_do_is_said_by_all(what: str, ranks: Number, said: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        in_ranks(ranks, apart, str(tmp_path / "a"), what)
    assert all(error is not None and said in error for error in failed.value.errors)
    assert [each for each in os.listdir(tmp_path) if "another node" not in each] == []
