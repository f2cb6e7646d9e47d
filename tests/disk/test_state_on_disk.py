"""The optimizer's state on a disk: results are those of a run that has it in memory, whatever user code does with it."""

from __future__ import annotations

import io
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.capabilities.disk import host_budget
from sp_lightning.capabilities.disk import tier as disk_tier
from sp_lightning.capabilities.disk.away import save
from sp_lightning.capabilities.disk.mapped_file import MappedFile
from sp_lightning.capabilities.disk.state_placement import place_state
from sp_lightning.core.plan.units import parse_bytes
from sp_lightning.trainer import host_memory
from tests.support.models import Module, Stack, vectors
from tests.support.on_disk import away, mapped_bytes, on_disk, without_room
from tests.support.runs import assert_equal, assert_same, fit, fused
from tests.support.tiers import first


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    without_room(monkeypatch)


def stack() -> Module:
    return Module(Stack())


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("overlap", first(["off", "forward", "backward"], "forward", why="its other modes"))
def test_files_are_plain_lightning_s_and_back(overlap: Any, tmp_path: Path) -> None:
    make = fused(stack)

    def two_halves(first: Any, second: Any, file: Path) -> Any:
        half = fit(make, vectors(), first, recorded="nothing", max_epochs=1)
        looks = away(half.trainer.optimizers[0])
        half.trainer.save_checkpoint(file)
        assert away(half.trainer.optimizers[0]) == looks
        return fit(make, vectors(), second, recorded="losses", max_epochs=2, ckpt_path=file)

    def disk() -> SuperpipelineStrategy:
        return on_disk(tmp_path, optimizer_overlap=overlap)

    plain = two_halves("auto", "auto", tmp_path / "plain.ckpt")
    for one, other, name in ((disk(), disk(), "ours"), ("auto", disk(), "there"), (disk(), "auto", "back")):
        assert_same(two_halves(one, other, tmp_path / f"{name}.ckpt"), plain)
    theirs, ours = (torch.load(tmp_path / f"{name}.ckpt")["optimizer_states"] for name in ("plain", "back"))
    assert_equal(ours, theirs, "optimizer_states")


@pytest.mark.rest("takes tenths of a second")
def test_loaded_state_is_on_the_disk_before_the_first_step(tmp_path: Path) -> None:
    """What is still mapped from the checkpoint is copied to memory then, which must not bring back what was moved."""
    found: list[int] = []

    class Begins(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            found.append(away(trainer.optimizers[0]))

    make = stack
    fit(make, vectors(1), recorded="nothing").trainer.save_checkpoint(tmp_path / "half.ckpt")
    options: Any = {"recorded": "nothing", "max_epochs": 2, "ckpt_path": tmp_path / "half.ckpt"}
    fit(make, vectors(1), on_disk(tmp_path), callbacks=[Begins()], **options)
    assert found == [2 * len(list(Stack().parameters()))]


@pytest.mark.rest("takes tenths of a second")
def test_a_checkpoint_is_written_tensor_by_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors stay away, and the file is the one that ``torch.save`` writes."""
    strategy = on_disk(tmp_path)
    files: list[bytes] = []

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            (optimizer,) = trainer.optimizers
            count = away(optimizer)
            save(optimizer.state_dict(), ours := io.BytesIO())
            assert away(optimizer) == count > 0
            torch.save(optimizer.state_dict(), theirs := io.BytesIO())
            files.extend((ours.getvalue(), theirs.getvalue()))

    fit(stack, vectors(1), strategy, callbacks=[Saves()])
    ours, theirs = (torch.load(io.BytesIO(file)) for file in files)
    assert_equal(ours, theirs, "state")
    assert len(files[0]) == len(files[1])


# ---------------------------------------------------------------------- forks, refusals


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("given", "remedy"),
    [("64GiB", 'host_memory="65553MiB" is enough'), (None, "free 17MiB")],
)
def test_host_memory_that_does_not_suffice_is_refused(
    given: Any, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "place_state", lambda sizes, _, given: place_state(sizes, 2**10, given))
    with pytest.raises(MemoryError, match=r"CPU memory is 63.0 KiB too small for the process") as raised:
        fit(stack, vectors(), on_disk(tmp_path, host_memory=given))
    assert f": {remedy}." in str(raised.value)
    assert re.search(r"the process, which itself takes \d+\.\d [MG]iB, for data", str(raised.value))
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    ours = [
        frame.name
        for frame in raised.traceback
        if "sp_lightning" in str(frame.path) and "/tests/" not in str(frame.path)
    ]
    assert ours == ["setup"]


@pytest.mark.parametrize("given", [2**28, 2**33])
@pytest.mark.parametrize("missing", [2**20, 2**31])
def test_the_host_memory_that_is_named_is_no_more_than_is_needed(
    given: int, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,045 MiB were named where 1,000 ran: a sixteenth was added although 96 MiB are kept for the process anyway."""
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: 2**29)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: None)
    room = host_budget.room_for(given)
    assert room is not None
    (named,) = re.findall(r'"(.+)"', host_budget.remedy_for(missing, given))
    enough = host_budget.room_for(parse_bytes("host_memory", named))
    assert enough is not None
    assert room + missing <= enough <= room + missing + 18 * 2**20


@pytest.mark.rest("takes tenths of a second")
def test_the_ledger_has_the_disk_s_traffic(tmp_path: Path) -> None:
    strategy = on_disk(tmp_path)
    fit(stack, vectors(), strategy, recorded="nothing")
    ledger = strategy.ledger
    assert ledger.state == ledger.on_disk  # all of it
    assert ledger.nbytes == ledger.weights + ledger.gradients + ledger.staging
    pages = ledger.disk_traffic / (2 * ledger.on_disk)  # tensors of small models are in whole pages
    assert 1 < pages < 6
    assert "of the optimizer state are on a disk" in str(ledger)
    assert "in each step except the first: " in str(ledger)


def deep() -> Module:
    """Layers of one size, more than are in memory at a time, with an optimizer that can step them in backward."""
    module = Module(nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(8))))
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), fused=True)  # type: ignore[method-assign]
    return module


def few(count: int) -> list[Tensor]:
    return list(torch.randn(count, 2, 32, generator=torch.Generator().manual_seed(3)))


# ---------------------------------------------------------------------- what is read, what is in memory


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[MappedFile]:
    """The files of state of every run, to look at afterwards."""
    made: list[MappedFile] = []

    def noted(*arguments: Any) -> MappedFile:
        made.append(MappedFile(*arguments))
        return made[-1]

    monkeypatch.setattr(disk_tier, "MappedFile", noted)
    return made


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("overlap", first(["off", "forward", "backward"], "forward", why="its other modes"))
def test_nothing_is_read_in_vain(overlap: Any, tmp_path: Path, files: list[MappedFile]) -> None:
    """There is no state to be read in the first step. Each other step reads each layer's state once."""
    read: list[int] = []

    class Notes(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            assert trainer.optimizers[0].state  # waits for the updates
            read.append(files[-1].read_bytes)

    strategy = on_disk(tmp_path, optimizer_overlap=overlap)
    fit(deep, few(6), strategy, callbacks=[Notes()], recorded="nothing")
    whole = 8 * 4 * 4096  # four tensors, of a page each
    stay = 2 * whole // 8  # two layers are in memory when a step begins, and are updated first or last
    steps = [after - before for before, after in pairwise([0, *read])]
    assert steps[0] == 0
    assert all(whole - stay <= each <= whole for each in steps[1:])
    assert files[-1].written_bytes >= 5 * whole - stay


class Wide(Module):
    """Eight layers with two MiB of state each."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("overlap", first(["off", "forward", "backward"], "backward", why="its other modes"))
def test_few_layers_are_in_memory(overlap: Any, tmp_path: Path) -> None:
    """What user code reads is mapped until the next update of its layer; a checkpoint reads one tensor at a time."""
    sizes: list[tuple[int, ...]] = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            states = trainer.optimizers[0].state.values()
            stepped = mapped_bytes(tmp_path)
            assert sum(float(state["exp_avg_sq"].sum()) for state in states) > 0
            read = mapped_bytes(tmp_path)
            trainer.save_checkpoint(tmp_path / "saved.ckpt")
            sizes.append((stepped, read, mapped_bytes(tmp_path)))

    batches = list(torch.randn(3, 2, 512))
    options: Any = {"recorded": "nothing", "callbacks": [Looks()]}
    fit(Wide, batches, on_disk(tmp_path, optimizer_overlap=overlap), **options)
    for stepped, read, saved in sizes:
        assert 0 < stepped <= 3 * 2 * 2**20 + 2**16
        assert read >= 8 * 2**20
        assert saved < 2**20


@pytest.mark.rest("takes tenths of a second")
def test_memory_and_disk_space_of_replaced_state_are_free_again(tmp_path: Path, files: list[MappedFile]) -> None:
    """User code gives each layer a new average after each batch."""

    class Replaces(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            for state in trainer.optimizers[0].state.values():
                state["exp_avg"] = state["exp_avg"] * 0.5

    strategy = on_disk(tmp_path)
    ours = fit(deep, few(12), strategy, callbacks=[Replaces()])
    assert_same(ours, fit(deep, few(12), callbacks=[Replaces()]))
    whole = 8 * 4 * 4096
    assert os.fstat(files[0]._file.descriptor).st_size <= 2 * whole + 4096
