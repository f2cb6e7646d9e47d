"""Trained weights on a disk: results are those of a run that has them in memory, and few layers' are in memory at a time."""

from __future__ import annotations

import errno
import os
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file, save_file
from torch import nn

from sp_lightning.capabilities.disk import mapped_file
from sp_lightning.capabilities.disk import tier as disk_tier
from sp_lightning.capabilities.disk.mapped_file import is_on_disk
from sp_lightning.capabilities.disk.scratch_file import ScratchFile
from sp_lightning.capabilities.disk.state_placement import OnDisk, choose_on_disk
from tests.support.models import Module, Stack, vectors
from tests.support.on_disk import (
    FAULTS,
    NoBatch,
    break_calls,
    fill_disk,
    mapped_bytes,
    on_disk,
    state_in_memory,
    stay,
    without_room,
)
from tests.support.runs import assert_equal, assert_same, fit, fused
from tests.support.tiers import first

WINDOW = 2
KIB = 1024


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """All trained layers are on the disk, and their state is; two of them are in memory at a time. Gradients are in memory."""

    def choose(*args: Any, **options: Any) -> OnDisk:
        return OnDisk(weights=choose_on_disk(*args, **options).weights)

    without_room(monkeypatch)
    monkeypatch.setattr(disk_tier, "missing_bytes", lambda *_: 2**60)
    monkeypatch.setattr(disk_tier, "choose_on_disk", choose)
    monkeypatch.setattr(mapped_file, "WINDOW", WINDOW)


def stack() -> Module:
    return Module(Stack())


class There(Callback):
    """Notes how many of the module's parameters are on the disk after each batch."""

    def __init__(self) -> None:
        self.count: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.count.append(sum(map(is_on_disk, pl_module.parameters())))


class Wide(Module):
    """Eight layers of a MiB each."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]))


@pytest.mark.long("takes a second or more")
def test_few_layers_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state_in_memory(monkeypatch)
    sizes: list[int] = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            assert all(map(is_on_disk, pl_module.parameters()))
            sizes.append(mapped_bytes(tmp_path))

    batches = [torch.randn(2, 512) for _ in range(3)]
    fit(Wide, batches, on_disk(tmp_path), recorded="nothing", callbacks=[Looks()])
    assert 0 < max(sizes) <= (WINDOW + 1) * 2**20 + 2**16  # one more may be on its way out


@pytest.mark.long("takes a second or more")
def test_a_checkpoint_is_written_with_few_weights_in_memory(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            for parameter in pl_module.parameters():
                parameter.norm()
            assert mapped_bytes(tmp_path) >= 8 * 2**20
            trainer.save_checkpoint(tmp_path / "saved.ckpt")
            sizes.append(mapped_bytes(tmp_path))

    ours = fit(Wide, [torch.randn(2, 512)], on_disk(tmp_path), recorded="nothing", callbacks=[Saves()])
    assert sizes[0] < 2**20  # edges of tensors that share a page
    assert_equal(torch.load(tmp_path / "saved.ckpt")["state_dict"], ours.state, "weights")


# ---------------------------------------------------------------------- what users do with them


@pytest.mark.long("the first tier has that of state on a disk")
def test_checkpoints_are_plain_lightning_s_and_back(tmp_path: Path) -> None:
    make = fused(stack)

    def two_halves(first: Any, second: Any, file: Path) -> Any:
        half = fit(make, vectors(), first, recorded="nothing")
        half.trainer.save_checkpoint(file)
        return fit(make, vectors(), second, recorded="losses", max_epochs=2, ckpt_path=file)

    def disk() -> Any:
        return on_disk(tmp_path, optimizer_overlap="forward")

    plain = two_halves("auto", "auto", tmp_path / "plain.ckpt")
    for one, other, name in ((disk(), disk(), "ours"), ("auto", disk(), "there"), (disk(), "auto", "back")):
        assert_same(two_halves(one, other, tmp_path / f"{name}.ckpt"), plain)


@pytest.mark.long("takes a second or more")
def test_beside_frozen_weights_in_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stay(monkeypatch)
    torch.manual_seed(3)
    save_file(Stack().state_dict(), tmp_path / "net.safetensors")

    def make() -> pl.LightningModule:
        net = Stack()
        net.load_state_dict(load_file(tmp_path / "net.safetensors"), assign=True)
        for parameter in net.blocks[:2].parameters():
            parameter.requires_grad_(False)
        return fused(lambda: Module(net))()

    there, strategy = There(), on_disk(tmp_path, optimizer_overlap="forward")
    ours = fit(make, vectors(), strategy, recorded="losses", callbacks=[there], max_epochs=2)
    assert_same(ours, fit(make, vectors(), recorded="losses", max_epochs=2))
    trained = [p for p in ours.module.parameters() if p.requires_grad]
    assert there.count[0] == len(trained) < len(list(ours.module.parameters()))
    assert strategy.ledger.weights < sum(p.nbytes for p in ours.module.parameters())


# ---------------------------------------------------------------------- faults, refusals


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("overlap", first(["off", "forward", "backward"], "forward", why="its other modes"))
@pytest.mark.parametrize("fault", first(FAULTS, "full", why="another number"))
def test_a_fault_ends_the_step_and_spoils_no_checkpoint(
    fault: str, overlap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint is the one of the first step, with plain Lightning's weights."""
    make = fused(stack)
    plain = fit(make, vectors()[:1], recorded="nothing")

    class Breaks(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                break_calls(monkeypatch, fault, 3)

    saves = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
    options: Any = {"enable_checkpointing": True, "recorded": "nothing"}
    strategy = on_disk(tmp_path, optimizer_overlap=overlap)
    with pytest.raises(OSError, match=f"Weights on the disk {FAULTS[fault][2]}"):
        fit(make, vectors(), strategy, callbacks=[Breaks(), saves], **options)
    monkeypatch.undo()
    files = sorted((tmp_path / "saved").iterdir())
    assert [file.name for file in files] == ["epoch=0-step=1.ckpt"]
    assert_equal(torch.load(files[0])["state_dict"], plain.state, "weights")


@pytest.mark.rest("takes tenths of a second")
def test_a_disk_without_room_for_all_of_it_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was refused file by file: each error named what the next file needed, and who made room for that met the next."""
    few = SimpleNamespace(f_bavail=1, f_frsize=1024)
    monkeypatch.setattr(disk_tier, "choose_on_disk", choose_on_disk)
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda _: few)
        said = r"\d KiB for trained weights and .* KiB for gradients of scratch space are needed, and .* the disk has 1\.0 KiB"
        with pytest.raises(OSError, match=said) as caught:
            fit(stack, vectors(), on_disk(tmp_path), callbacks=[NoBatch()])
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.rest("takes tenths of a second")
def test_state_that_has_no_room_beside_weights_names_what_those_have_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: ScratchFile, *_: Any) -> None:
        if self._what == "optimizer state":
            fill_disk(monkeypatch)
        reserve(self, *_)

    reserve = ScratchFile.reserve
    monkeypatch.setattr(ScratchFile, "reserve", full)
    said = (
        r"needed for optimizer state beside .* KiB for weights and gradients, which the run has taken, and the disk has"
    )
    with pytest.raises(OSError, match=said):
        fit(stack, vectors(), on_disk(tmp_path), callbacks=[NoBatch()])


@pytest.mark.long("runs that look for the least memory that is enough")
def test_more_memory_is_not_refused_where_less_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two decisions, what is on the disk and how much of the state is, the process takes some memory.

    What was measured then was 1 to 3 MiB less, and too little wherever host_memory had just sufficed for one layer more.
    """
    monkeypatch.undo()
    monkeypatch.setattr(disk_tier, "_UNTIL_STATE", 16 * KIB)
    for given in (900, 912, 924, 960, 972):  # without that memory 912 and 972 KiB were refused
        rooms = chain(repeat(given * KIB, 2), repeat((given - 8) * KIB))
        monkeypatch.setattr(disk_tier, "room_for", lambda *_, rooms=rooms: next(rooms))
        with pytest.raises(AssertionError, match="a batch begins"):
            fit(
                lambda: Module(nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(12)))),
                [torch.randn(2, 128)],
                on_disk(tmp_path),
                callbacks=[NoBatch()],
                recorded="nothing",
            )


@pytest.mark.rest("takes tenths of a second")
def test_what_is_where_is_said(tmp_path: Path) -> None:
    strategy = on_disk(tmp_path)
    fit(stack, vectors(), strategy)
    weights = sum(layer.nbytes for layer in strategy.plan.layers)
    assert strategy.ledger.weights == 0
    assert strategy.ledger.weights_on_disk == weights
    assert f"{weights / 2**10:.1f} KiB of trained weights" in str(strategy.ledger)
