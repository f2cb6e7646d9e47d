"""Several devices with a disk: each rank has the state of its layers there."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from sp_lightning import SuperpipelineStrategy
from tests.equality.on_ranks import InOrder, seen
from tests.support.models import Module, Stack, vectors
from tests.support.on_disk import FAULTS, NoBatch, break_calls, on_disk, without_room
from tests.support.ranks import Number, RanksFailed, devices, in_ranks, total
from tests.support.runs import assert_equal, fit
from tests.support.tiers import first

BATCHES = 12


class Net(Module):
    def __init__(self) -> None:
        super().__init__(Stack())


def train(ranks: Number, disk: str | None, epochs: int, resume: str | None, save: str, **options: Any) -> Any:
    """Trains up to so many epochs. Returns what is seen, and bytes of the optimizer's state on the disk."""
    with pytest.MonkeyPatch.context() as patch:
        without_room(patch)
        strategy: Any = InOrder() if disk is None else on_disk(Path(disk), **options)
        if disk is None and ranks == 1:
            strategy = "auto"
        outcome = fit(
            Net, vectors(BATCHES), strategy, ckpt_path=None if resume is None else Path(resume),
            max_epochs=epochs, limit_train_batches=BATCHES // total(ranks), recorded="losses", **devices(ranks),
        )  # fmt: skip
        outcome.trainer.save_checkpoint(save)
    return seen(outcome), 0 if disk is None else strategy.ledger.on_disk


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "ranks", [2, pytest.param((2, 2), marks=pytest.mark.long("each node has a disk of its own"))], ids=str
)
def test_files_are_those_of_a_run_without(ranks: Number, tmp_path: Path) -> None:
    """Trained, saved, resumed, saved: ``ddp``'s files; and plain Lightning on one device goes on from them."""
    files = {}
    for disk in (None, str(tmp_path)):
        first, second = (str(tmp_path / f"{epoch} {disk is None}.ckpt") for epoch in (1, 2))
        runs = [
            in_ranks(ranks, train, ranks, disk, 1, None, first),
            in_ranks(ranks, train, ranks, disk, 2, first, second),
        ]
        files[disk] = first, second
        for run in runs:
            assert [nbytes > 0 for _, nbytes in run] == [disk is not None] * total(ranks)
    for theirs, ours in zip(*files.values(), strict=True):
        a, b = (torch.load(file, weights_only=True) for file in (ours, theirs))
        for name in ("state_dict", "optimizer_states"):
            assert_equal(a[name], b[name], name)
    (plain, _), (ours, _) = (train(1, None, 3, file, str(tmp_path / "3.ckpt")) for _, file in files.values())
    assert_equal(ours, plain, "resumed")
    assert not [each for each in tmp_path.iterdir() if each.suffix != ".ckpt"]


# ---------------------------------------------------------------------- host memory


def place(disk: str, host_memory: str) -> None:
    fit(Net, vectors(4), on_disk(Path(disk), host_memory=host_memory), devices=2, callbacks=[NoBatch()])


@pytest.mark.long("takes a second or more")
def test_too_little_memory_for_all_processes_is_refused_on_each(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        in_ranks(2, place, str(tmp_path), "100MiB")
    first, second = caught.value.errors
    assert all("MemoryError" in str(each) and "CPU memory is" in str(each) for each in (first, second))


def cap(host_memory: str) -> None:
    fit(Net, vectors(4), SuperpipelineStrategy(host_memory=host_memory), devices=2)


@pytest.mark.long("as with a disk, in the first tier")
def test_without_a_disk_too_little_memory_is_refused_on_each() -> None:
    with pytest.raises(RanksFailed) as caught:
        in_ranks(2, cap, "100MiB")
    for error in caught.value.errors:
        assert 'host_memory="100MiB" is too little' in str(error)
    in_ranks(2, cap, "16GiB")


# ---------------------------------------------------------------------- faults


def break_disk(disk: str, fault: str, at: int, overlap: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        without_room(patch)
        break_calls(patch, fault, at)
        fit(Net, vectors(16), on_disk(Path(disk), optimizer_overlap=overlap), devices=2, recorded="losses")


@pytest.mark.long("the first tier has a disk that fails on one device")
@pytest.mark.parametrize("overlap", first(["off", "forward"], "forward", why="its other mode"))
@pytest.mark.parametrize("fault", ["write error", "read error"])
def test_a_disk_that_fails_ends_all_ranks_with_its_error(fault: str, overlap: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        in_ranks(2, break_disk, str(tmp_path), fault, 10, overlap)
    first, second = caught.value.errors
    assert any(FAULTS[fault][2] in str(each) for each in (first, second))
    assert all("Input/output error" in str(each) for each in (first, second))
    assert list(tmp_path.iterdir()) == []


class Looks(pl.Callback):
    """Reads and writes state on the rank that has it, between steps."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        optimizer = trainer.optimizers[0]
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            with suppress(RuntimeError):  # another rank has it
                optimizer.state[parameter]["exp_avg"].mul_(0.5)


def write_state(disk: str | None) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        without_room(patch)
        strategy: Any = SuperpipelineStrategy(k=1) if disk is None else on_disk(Path(disk))
        return seen(fit(Net, vectors(8), strategy, devices=2, callbacks=[Looks()]))


@pytest.mark.long("one device has user code of every kind")
def test_state_that_user_code_writes(tmp_path: Path) -> None:
    assert_equal(in_ranks(2, write_state, str(tmp_path)), in_ranks(2, write_state, None), "seen")
