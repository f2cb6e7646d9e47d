"""Gradients on a disk: results are those of a run that has them in memory, and few layers' are in memory at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from sp_lightning.capabilities.disk import mapped_file
from sp_lightning.capabilities.disk import tier as disk_tier
from sp_lightning.capabilities.disk.mapped_file import is_on_disk
from sp_lightning.capabilities.disk.state_placement import OnDisk, choose_on_disk
from sp_lightning.core.updates.layerwise import LayerwiseStep
from sp_lightning.core.weights.gradient_roles import NarrowGradient, stored
from tests.support.models import Module, Stack, vectors
from tests.support.on_disk import (
    FAULTS,
    break_calls,
    counted_writes,
    everything_below,
    mapped_bytes,
    on_disk,
    state_in_memory,
)
from tests.support.runs import assert_equal, assert_same, fit, fused, superpipeline
from tests.support.tiers import first

WINDOW = 2


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """All state is on the disk, and all gradients are; two layers' are in memory at a time."""
    everything_below(monkeypatch, window=WINDOW)


def gradients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay in memory."""

    def choose(*args: Any, **options: Any) -> OnDisk:
        return OnDisk(gradients=choose_on_disk(*args, **options).gradients)

    monkeypatch.setattr(disk_tier, "choose_on_disk", choose)


def stack() -> Module:
    return Module(Stack())


# ---------------------------------------------------------------------- what is in memory, what is read and written


class Wide(Module):
    """Eight layers of a MiB each."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]))


def wide() -> list[torch.Tensor]:
    return list(torch.randn(4, 2, 512, generator=torch.Generator().manual_seed(3)))


class Hears(Callback):
    """A hook because of which gradients are clipped where Lightning clips them."""

    def on_before_optimizer_step(self, *_: Any) -> None:
        pass


CLIPS: dict[str, dict[str, Any]] = {
    "not clipped": {},
    "by norm": {"gradient_clip_val": 0.01},
    "by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "overlap", first(["off", "forward"], "forward", second=[], why="without updates in the background")
)
@pytest.mark.parametrize("clip", first(CLIPS, "by norm", why="other ways to clip"))
@pytest.mark.parametrize("heard", first([False, True], True, second=[], why="without a hook"))
def test_few_gradients_are_in_memory(
    heard: bool, clip: str, overlap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_in_memory(monkeypatch)
    sizes: list[int] = []
    take = LayerwiseStep.submit

    def looks(self: Any, *closure: Any) -> bool:  # after backward and clipping, before the updates
        assert sum(is_on_disk(p.grad) for group in self._optimizer.param_groups for p in group["params"]) == 16
        sizes.append(mapped_bytes(tmp_path))
        return take(self, *closure)

    monkeypatch.setattr(LayerwiseStep, "submit", looks)
    make = Wide if overlap == "off" else fused(Wide)
    options: Any = {"callbacks": [Hears()] if heard else [], **CLIPS[clip]}
    ours = fit(make, wide(), on_disk(tmp_path, optimizer_overlap=overlap), recorded="nothing", **options)
    assert_same(ours, fit(make, wide(), recorded="nothing", **options))
    # Two layers' weights and two layers' gradients, and one each on its way out.
    assert 2**20 < max(sizes) <= 2 * (WINDOW + 1) * 2**20 + 2**17


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("batches", first([1, 2], 2, why="without accumulation"))
def test_each_gradient_is_written_and_read_once_for_each_batch(
    batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[Any] = []
    init = mapped_file.MappedFile.__init__

    def noted(self: Any, *args: Any) -> None:
        init(self, *args)
        files.append((self, args[1:]))

    monkeypatch.setattr(mapped_file.MappedFile, "__init__", noted)
    monkeypatch.setattr(mapped_file, "WINDOW", window := 4)
    strategy = on_disk(tmp_path, optimizer_overlap="forward")
    options: Any = {"accumulate_grad_batches": batches, "gradient_clip_val": 0.01, "recorded": "nothing"}
    fit(Wide, wide(), strategy, **options)
    file = next(file for file, what in files if what == ("gradients",))
    total = strategy.ledger.gradients_on_disk
    stay = window * total // 8
    steps = len(wide()) // batches
    # Those in memory at the end of a backward need not come, and those of the last update have not left.
    assert steps * batches * (total - stay) <= file.read_bytes <= steps * batches * total * 1.1
    assert file.written_bytes <= 2 * steps * batches * total


# ---------------------------------------------------------------------- what users do with them


@pytest.mark.long("takes a second or more")
def test_none_is_narrow_because_who_looks_would_have_it_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: set[Any] = set()
    take = LayerwiseStep.submit

    def looks(self: Any, *closure: Any) -> bool:
        kinds.update(type(stored(p)) for group in self._optimizer.param_groups for p in group["params"])
        return take(self, *closure)

    monkeypatch.setattr(LayerwiseStep, "submit", looks)
    for disk, kind in ((on_disk(tmp_path, optimizer_overlap="forward"), torch.Tensor), (None, NarrowGradient)):
        strategy = disk or superpipeline(k=1, optimizer_overlap="forward")
        fit(fused(Wide), wide(), strategy, recorded="nothing", precision="bf16-mixed")
        assert kind in kinds
        assert (NarrowGradient in kinds) == (disk is None)


# ---------------------------------------------------------------------- faults, refusals


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("overlap", first(["off", "forward"], "forward", why="its other modes"))
@pytest.mark.parametrize("fault", first(FAULTS, "write error", why="another number"))
def test_a_fault_ends_the_step_and_spoils_no_checkpoint(
    fault: str, overlap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint is the one of the first step, with plain Lightning's weights."""
    gradients_alone(monkeypatch)
    state_in_memory(monkeypatch)
    make = fused(stack)
    plain = fit(make, vectors()[:1], recorded="nothing")

    class Breaks(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                break_calls(monkeypatch, fault, 1)

    saves = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
    options: Any = {"enable_checkpointing": True, "recorded": "nothing"}
    with pytest.raises(OSError, match=f"Gradients on the disk {FAULTS[fault][2]}"):
        fit(make, vectors(), on_disk(tmp_path, optimizer_overlap=overlap), callbacks=[Breaks(), saves], **options)
    monkeypatch.undo()
    files = sorted((tmp_path / "saved").iterdir())
    assert [file.name for file in files] == ["epoch=0-step=1.ckpt"]
    assert_equal(torch.load(files[0])["state_dict"], plain.state, "weights")


@pytest.mark.long("takes a second or more")
def test_a_failure_of_the_last_write_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No later write or read would tell it. The optimizer has no state, which would be written last."""

    def make() -> Module:
        module = stack()
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)  # type: ignore[method-assign]
        return module

    gradients_alone(monkeypatch)
    with counted_writes() as writes:
        fit(make, vectors(), on_disk(tmp_path), recorded="nothing")
    break_calls(monkeypatch, "write error", len(writes) - 1)
    with pytest.raises(OSError, match=f"Gradients on the disk {FAULTS['write error'][2]}"):
        fit(make, vectors(), on_disk(tmp_path), recorded="nothing")


@pytest.mark.rest("takes tenths of a second")
def test_what_is_where_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients_alone(monkeypatch)
    strategy = on_disk(tmp_path)
    fit(stack, vectors(), strategy)
    nbytes = strategy.ledger.gradients_on_disk
    assert f"{nbytes / 2**10:.1f} KiB of gradients" in str(strategy.ledger)
    assert any(f"{nbytes / 2**10:.1f} KiB of gradients are on the disk" in each for each in strategy.remarks())
