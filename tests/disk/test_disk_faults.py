"""Faults of the disk: each ends in one clear error, with the host's weights whole and the last checkpoint valid."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from sp_lightning.capabilities.disk import mapped_file
from sp_lightning.capabilities.disk import tier as disk_tier
from tests.support.models import Module, Stack, vectors
from tests.support.on_disk import FAULTS, assert_whole, break_calls, counted_writes, on_disk, without_room
from tests.support.runs import assert_same, fit, fused, loader, trainer_for
from tests.support.tiers import first, some


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    without_room(monkeypatch)


class Breaks(Callback):
    """From a batch on, a call of the system fails, not at the first time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fault: str, batch: int, at: int) -> None:
        self.breaks = lambda: break_calls(monkeypatch, fault, at)
        self.batch = batch

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.batch:
            self.breaks()


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
@pytest.mark.parametrize("overlap", first(["off", "forward", "backward"], "forward", why="its other modes"))
@pytest.mark.parametrize("fault", first(FAULTS, "full", "read error", why="another number"))
def test_a_fault_ends_the_step_with_one_error(
    fault: str, overlap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch_folder, checkpoints = tmp_path / "scratch", tmp_path / "checkpoints"
    scratch_folder.mkdir()
    make = fused(lambda: Module(Stack()))
    saver = ModelCheckpoint(checkpoints, every_n_train_steps=1, save_last=True)
    module = make()
    with monkeypatch.context() as patch:
        trainer = trainer_for(
            on_disk(scratch_folder, optimizer_overlap=overlap),
            callbacks=[Breaks(patch, fault, 2, 1), saver],
            enable_checkpointing=True,
            max_epochs=2,
        )
        torch.manual_seed(7)
        with pytest.raises(OSError, match=f"Optimizer state on the disk {FAULTS[fault][2]}. The step was not finished"):
            trainer.fit(module, loader(vectors()))
        with pytest.raises(RuntimeError, match="not those of any whole step"):
            trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert_whole(module, scratch_folder)
    last = checkpoints / "last.ckpt"
    again = on_disk(scratch_folder, optimizer_overlap=overlap)
    ours = fit(make, vectors(), again, recorded="losses", ckpt_path=last, max_epochs=2)
    plain = fit(make, vectors(), recorded="losses", ckpt_path=last, max_epochs=2)
    assert_same(ours, plain)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("fault", first(["full", "read error"], "full", why="reads that fail"))
@pytest.mark.parametrize(
    ("every", "least"),
    first([(7, 4), (3, 8)], (7, 4), second=(), why="more moments"),
    ids=["some moments", "more moments"],
)
def test_a_disk_that_fails_at_any_moment(
    every: int,
    least: int,
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From the first transfer on; the weights are ordinary ones again, and nothing is left."""
    errors = []
    for at in range(0, 40, every):
        module = fused(lambda: Module(Stack()))()
        with monkeypatch.context() as patch:
            break_calls(patch, fault, at)
            trainer = trainer_for(on_disk(tmp_path, optimizer_overlap="forward"), max_epochs=2)
            try:
                trainer.fit(module, loader(vectors()))
            except OSError as error:
                errors.append(error.errno)
        assert_whole(module, tmp_path)
    assert len(set(errors)) == 1
    assert len(errors) >= least
    # It logs what its threads have raised.
    assert "concurrent.futures" not in {record.name for record in caplog.records}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("fault", ["write error", "read error"])
def test_a_checkpoint_of_state_that_the_disk_has_lost_is_an_error(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages whose write has failed may be dropped: then the state is that of an earlier step. A failed read was a signal."""

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            with pytest.raises(OSError, match=FAULTS[fault][2]):
                trainer.save_checkpoint(tmp_path / "saved.ckpt")
            assert not (tmp_path / "saved.ckpt").exists()

    trainers: list[Any] = []

    def train(*callbacks: Callback) -> None:
        trainers.append(trainer_for(on_disk(tmp_path), callbacks=list(callbacks)))
        trainers[-1].fit(Module(Stack()), loader(vectors(1)))

    if fault == "read error":
        train(Breaks(monkeypatch, fault, 0, 0), Saves())  # the step itself reads nothing, because there is no state yet
        return
    with counted_writes() as writes:
        train()
    break_calls(monkeypatch, fault, len(writes) - 1)  # no later write or read of the step would tell it
    with pytest.raises(OSError, match=FAULTS[fault][2]):
        train(Saves())
    with pytest.raises(RuntimeError, match="not those of any whole step"):
        trainers[-1].save_checkpoint(tmp_path / "after.ckpt")


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("how", ["cut off", "removed"])
def test_a_checkpoint_that_is_gone_once_it_was_resumed(how: str, tmp_path: Path) -> None:
    """State is mapped from it while it is loaded, and must not be afterwards."""
    file, make = tmp_path / "half.ckpt", fused(lambda: Module(Stack()))

    class Meanwhile(Callback):
        def __init__(self, happens: Callable[[], Any]) -> None:
            self.happens = happens

        def on_train_start(self, *_: Any) -> None:
            self.happens()

    fit(make, vectors(), recorded="nothing").trainer.save_checkpoint(file)
    resumed: dict[str, Any] = {"recorded": "losses", "ckpt_path": file, "max_epochs": 2}
    plain = fit(make, vectors(), callbacks=[Meanwhile(lambda: None)], **resumed)
    happens = file.unlink if how == "removed" else lambda: os.truncate(file, 0)
    mine = on_disk(tmp_path, optimizer_overlap="forward")
    assert_same(fit(make, vectors(), mine, callbacks=[Meanwhile(happens)], **resumed), plain)


@pytest.mark.long("takes a second or more")
def test_a_slow_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(call: Callable[..., int]) -> Callable[..., int]:
        def called(*arguments: Any) -> int:
            time.sleep(0.01)
            return call(*arguments)

        return called

    for name in ("madvise", "sync_file_range"):
        monkeypatch.setattr(mapped_file.libc, name, slowly(getattr(mapped_file.libc, name)))
    make = fused(lambda: Module(Stack()))
    ours = fit(make, vectors(), on_disk(tmp_path, optimizer_overlap="forward"))
    assert_same(ours, fit(make, vectors()))


@pytest.mark.rest("takes tenths of a second")
def test_a_folder_that_is_not_there_is_refused_before_work(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No file can be created in the folder that disk= names"):
        fit(lambda: Module(Stack()), vectors(), on_disk(tmp_path / "none"))


@pytest.mark.rest("takes tenths of a second")
def test_memory_that_is_called_a_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_tier, "file_system", lambda _: "tmpfs")
    log = logging.getLogger("lightning.pytorch.superpipeline")
    with caplog.at_level(logging.INFO, logger=log.name):
        fit(lambda: Module(Stack()), vectors(), on_disk(tmp_path))
    assert "is on a tmpfs, which is CPU memory and no disk. It saves none: name a folder on a drive." in caplog.text


def _trains(folder: Path, checkpoints: Path) -> None:
    without_room(pytest.MonkeyPatch())
    strategy = on_disk(folder, optimizer_overlap="forward")
    callbacks: list[Callback] = [ModelCheckpoint(checkpoints, every_n_train_steps=1, save_last=True)]
    make = fused(lambda: Module(Stack()))
    fit(make, vectors(4000), strategy, recorded="nothing", callbacks=callbacks, enable_checkpointing=True)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
@pytest.mark.long("a process of its own, which imports everything")
@pytest.mark.parametrize("seconds", some([0.0, 0.1, 0.37], 0.1, why="other moments"))
def test_a_process_that_is_killed_leaves_nothing(seconds: float, tmp_path: Path) -> None:
    """Nothing but the last checkpoint, which is whole."""
    scratch_folder, checkpoints = tmp_path / "scratch", tmp_path / "checkpoints"
    scratch_folder.mkdir()
    process = multiprocessing.get_context("spawn").Process(target=_trains, args=(scratch_folder, checkpoints))
    process.start()
    last = checkpoints / "last.ckpt"
    while not last.exists():
        assert process.exitcode is None
        time.sleep(0.01)
    time.sleep(seconds)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list(scratch_folder.iterdir()) == []
    steps = torch.load(last, weights_only=True)["global_step"]
    make = fused(lambda: Module(Stack()))
    resumed: dict[str, Any] = {"recorded": "losses", "ckpt_path": last, "max_steps": steps + 2}
    ours = fit(make, vectors(4000), on_disk(scratch_folder, optimizer_overlap="forward"), **resumed)
    assert_same(ours, fit(make, vectors(4000), **resumed))
