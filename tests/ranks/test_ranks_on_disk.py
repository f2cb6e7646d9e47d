"""Several devices with a disk: the first rank of each node has the optimizers' state, and so the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch

from sp_lightning import SuperpipelineStrategy
from sp_lightning.disk import tier as disk_tier
from sp_lightning.disk.state_placement import place_state
from sp_lightning.disk.tier import DiskTier
from sp_lightning.trainer.optimizer_steps import OptimizerSteps
from tests.equality.on_ranks import InOrder, seen
from tests.support.models import Module, Stack, vectors
from tests.support.on_disk import NoBatch, fails, on_disk, without_room
from tests.support.ranks import Number, RanksFailed, devices, in_ranks, rank, total
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
            expected = [disk is not None and number % devices(ranks)["devices"] == 0 for number in range(total(ranks))]
            assert [nbytes > 0 for _, nbytes in run] == expected
    for theirs, ours in zip(*files.values(), strict=True):
        a, b = (torch.load(file, weights_only=True) for file in (ours, theirs))
        for name in ("state_dict", "optimizer_states"):
            assert_equal(a[name], b[name], name)
    (plain, _), (ours, _) = (train(1, None, 3, file, str(tmp_path / "3.ckpt")) for _, file in files.values())
    assert_equal(ours, plain, "resumed")
    assert not [each for each in tmp_path.iterdir() if each.suffix != ".ckpt"]


def count_clips(disk: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        without_room(patch)
        clip = mock.Mock(wraps=torch.nn.utils.clip_grad_norm_)
        patch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
        fit(Net, vectors(4), on_disk(Path(disk)), devices=2, gradient_clip_val=0.1)
    return clip.call_count


def test_the_first_rank_clips_for_all(tmp_path: Path) -> None:
    """Otherwise each rank would have a copy of all gradients of its own."""
    assert in_ranks(2, count_clips, str(tmp_path)) == [2, 0]


# ---------------------------------------------------------------------- host memory


def place(disk: str, host_memory: str) -> None:
    fit(Net, vectors(4), on_disk(Path(disk), host_memory=host_memory), devices=2, callbacks=[NoBatch()])


def test_too_little_memory_for_all_processes_is_refused_on_each(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        in_ranks(2, place, str(tmp_path), "100MiB")
    first, second = caught.value.errors
    assert "MemoryError: CPU memory is" in str(first)
    assert "rank 0 has failed" in str(second)
    assert "CPU memory is" in str(second)


def cap(host_memory: str) -> None:
    fit(Net, vectors(4), SuperpipelineStrategy(host_memory=host_memory), devices=2)


@pytest.mark.rest("as with a disk, in the first tier")
def test_without_a_disk_too_little_memory_is_refused_on_each() -> None:
    with pytest.raises(RanksFailed) as caught:
        in_ranks(2, cap, "100MiB")
    for error in caught.value.errors:
        assert 'host_memory="100MiB" is too little' in str(error)
    in_ranks(2, cap, "16GiB")


def room(disk: str, held: int) -> list[int | None]:
    """What host memory leaves for state while the last process holds so many bytes."""
    memory = torch.ones(held * (rank() == 1), dtype=torch.uint8)
    place = mock.Mock(wraps=place_state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_tier, "place_state", place)
        fit(Net, vectors(4), on_disk(Path(disk), host_memory="4GiB"), devices=2)
    assert memory.numel() in (0, held)
    return [arguments[1] for arguments, _ in place.call_args_list]


@pytest.mark.rest("the refusal in the first tier counts all processes, too")
def test_what_other_processes_have_taken_counts(tmp_path: Path) -> None:
    ((few,), none), ((many,), _) = (in_ranks(2, room, str(tmp_path), held) for held in (0, 2**28))
    assert none == []
    assert 0.8 * 2**28 < few - many < 1.2 * 2**28


def counted(disk: str) -> tuple[int, int, list[int]]:
    """The device memory of one rank, what is counted beside state, and what each rank takes for the state's memory."""
    placed, place, place_in = [], DiskTier.place, OptimizerSteps.place_state
    told: list[int] = []

    def spy(tier: Any, optimizers: Any, layer_of: Any, still: Any, others: int, *more: int) -> Any:
        placed.append(others)
        return place(tier, optimizers, layer_of, still, others, *more)

    def tell(steps: Any) -> int:
        told.append(place_in(steps))
        return told[-1]

    with pytest.MonkeyPatch.context() as patch:
        without_room(patch)
        patch.setattr(DiskTier, "place", spy)
        patch.setattr(OptimizerSteps, "place_state", tell)
        outcome = fit(Net, vectors(4), on_disk(Path(disk)), devices=2)
    strategy: Any = outcome.trainer.strategy
    return strategy.plan.peak_device_bytes, sum(placed) - strategy.ledger.gradients, told


@pytest.mark.rest("the refusal in the first tier counts all processes, too")
def test_layers_on_the_device_of_every_process_count_and_all_know_what_state_takes(tmp_path: Path) -> None:
    (one, others, (first,)), (_, _, (second,)) = in_ranks(2, counted, str(tmp_path))
    assert others == 2 * one > 0
    assert first == second > 0


# ---------------------------------------------------------------------- faults


def break_disk(disk: str, call: str, at: int, overlap: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        without_room(patch)
        patch.setattr(os, call, fails(getattr(os, call), at, errno.EIO))
        fit(Net, vectors(16), on_disk(Path(disk), optimizer_overlap=overlap), devices=2, recorded="losses")


@pytest.mark.rest("the first tier has a disk that fails on one device")
@pytest.mark.parametrize("overlap", first(["off", "forward", "backward"], "backward", why="its other modes"))
@pytest.mark.parametrize(
    ("call", "what"),
    [("pwritev", "write to"), pytest.param("preadv", "read from", marks=pytest.mark.rest("writes fail alike"))],
)
def test_a_disk_that_fails_ends_all_ranks_with_its_error(call: str, what: str, overlap: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        in_ranks(2, break_disk, str(tmp_path), call, 10, overlap)
    first, second = caught.value.errors
    assert f"A {what} the scratch file failed: Input/output error" in str(first)
    assert "rank 0 has failed" in str(second)
    assert "Input/output error" in str(second)
    assert list(tmp_path.iterdir()) == []


def begin(disk: str) -> None:
    fit(Net, vectors(4), SuperpipelineStrategy(disk=disk), devices=2, callbacks=[NoBatch()])


@pytest.mark.rest("one device has it in the first tier")
def test_a_folder_that_is_not_there_is_refused_on_each(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        in_ranks(2, begin, str(tmp_path / "none"))
    assert all("none" in str(error) for error in caught.value.errors)


class Looks(pl.Callback):
    """Reads and writes state on the rank that has it, between steps."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            for state in trainer.optimizers[0].state.values():
                state["exp_avg"].mul_(0.5)


def write_state(disk: str | None) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        without_room(patch)
        strategy: Any = SuperpipelineStrategy(k=1, fused_optimizer=False) if disk is None else on_disk(Path(disk))
        return seen(fit(Net, vectors(8), strategy, devices=2, callbacks=[Looks()]))


@pytest.mark.rest("one device has user code of every kind")
def test_state_that_user_code_writes(tmp_path: Path) -> None:
    assert_equal(in_ranks(2, write_state, str(tmp_path)), in_ranks(2, write_state, None), "seen")
