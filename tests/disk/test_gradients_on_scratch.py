"""Gradients on a disk: results are those of a run that has them in memory, and few layers' are in memory at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from sp_lightning.capabilities.disk import mapped_file
from sp_lightning.capabilities.disk import tier as disk_tier
from sp_lightning.capabilities.disk.mapped_file import is_on_disk
from sp_lightning.capabilities.disk.state_placement import OnDisk, choose_on_disk
from sp_lightning.core.engine.layerwise import LayerwiseStep
from sp_lightning.core.layers.narrow_gradient import NarrowGradient, stored
from tests.support.models import CASES, Module, Stack, vectors
from tests.support.on_disk import (
    FAULTS,
    MODELS,
    NoBatch,
    Unfreezes,
    break_calls,
    counted_writes,
    everything_below,
    fill_disk,
    mapped_bytes,
    on_disk,
    refusal_in_fork,
    state_in_memory,
)
from tests.support.overlapping import taken_apart
from tests.support.runs import Outcome, assert_equal, assert_same, fit, fused, superpipeline
from tests.support.simdevice import simulated
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


class There(Callback):
    """Notes how many gradients are on the disk before each of Lightning's steps, without a look at their values."""

    def __init__(self) -> None:
        self.count: list[int] = []

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        found = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.count.append(sum(map(is_on_disk, found)))


VARIANTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "clipped by norm": {"gradient_clip_val": 0.01},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulated": {"accumulate_grad_batches": 2},
    "mixed": {"precision": "bf16-mixed"},
    "mixed, clipped": {"precision": "bf16-mixed", "gradient_clip_val": 0.01},
    "half": {"precision": "bf16-true"},
    "mixed, clipped, accumulated": {
        "precision": "bf16-mixed", "gradient_clip_val": 0.01, "accumulate_grad_batches": 2,
    },
}  # fmt: skip


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("variant", first(VARIANTS, "mixed, clipped, accumulated", why="other ways to a step"))
@pytest.mark.parametrize("overlap", first(["off", "forward", "backward"], "forward", why="its other modes"))
@pytest.mark.parametrize(
    "weights", first(["in memory", "on the disk"], "in memory", second=[], why="weights there, too; the matrix has it")
)
def test_every_mode_of_updates(
    weights: str, overlap: Any, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_epochs": 2, **VARIANTS[variant]}
    if overlap == "backward" and "gradient_clip_val" in options:
        pytest.skip("clipping needs all gradients at once, and is refused")
    if weights == "in memory":
        gradients_alone(monkeypatch)
    make = stack if overlap == "off" else fused(stack)
    strategy = on_disk(tmp_path, optimizer_overlap=overlap)
    ours = fit(make, vectors(4), strategy, recorded="losses", **options)
    assert_same(ours, fit(make, vectors(4), recorded="losses", **options))
    none = overlap == "backward" and "accumulate_grad_batches" not in options  # a few are in memory
    assert (strategy.ledger.gradients_on_disk == 0) == none
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("name", first(MODELS, "conditional", second=MODELS[:4], why="other models"))
@pytest.mark.parametrize("memory", first(["plain", "simulated"], "simulated", why="where nothing is late"))
@pytest.mark.parametrize("batches", first([1, 2], 2, second=[], why="without accumulation"))
def test_models(name: str, memory: str, batches: int, tmp_path: Path) -> None:
    case, options = CASES[name], {"max_epochs": 2, "recorded": "losses", "accumulate_grad_batches": batches}
    make, strategy = fused(case.make), on_disk(tmp_path, optimizer_overlap="forward")
    plain = fit(make, case.batches(), **options)
    if memory == "simulated":
        with simulated():
            ours = fit(make, case.batches(), strategy, **options)
    else:
        ours = fit(make, case.batches(), strategy, **options)
    assert_same(ours, plain)
    assert strategy.ledger.gradients_on_disk > 0


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


class Reads(Callback):
    """Reads and writes gradients in the ways in which user code does."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.held: list[Any] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        parameters = list(pl_module.parameters())
        self.norms += [float(p.grad.norm()) for p in parameters]
        parameters[0].grad.mul_(0.5)
        parameters[1].grad = torch.ones_like(parameters[1])
        parameters[2].grad = None
        self.held.append(parameters[3].grad)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.held = [each.clone() for each in self.held]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("overlap", first(["off", "forward"], "forward", why="without updates in the background"))
@pytest.mark.parametrize("precision", first(["32-true", "bf16-mixed"], "bf16-mixed", why="without casts"))
def test_code_of_users_that_reads_and_writes(precision: Any, overlap: Any, tmp_path: Path) -> None:
    callbacks = Reads(), Reads()
    make = stack if overlap == "off" else fused(stack)
    options: Any = {"max_epochs": 2, "recorded": "losses", "precision": precision}
    ours = fit(make, vectors(), on_disk(tmp_path, optimizer_overlap=overlap), callbacks=[callbacks[0]], **options)
    assert_same(ours, fit(make, vectors(), callbacks=[callbacks[1]], **options))
    assert callbacks[0].norms == callbacks[1].norms
    assert_equal(callbacks[0].held, callbacks[1].held, "gradients that are held")


class KeepsGradients(Module):
    """Gradients are set to zero in place, so that each batch's are added to them."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="norm")

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("overlap", first(["off", "forward"], "forward", why="without updates in the background"))
def test_gradients_that_stay(overlap: Any, tmp_path: Path) -> None:
    def make() -> Module:
        return KeepsGradients(Stack())

    made: Any = make if overlap == "off" else fused(make)
    there, options = There(), {"max_epochs": 2, "recorded": "losses"}
    ours = fit(made, vectors(), on_disk(tmp_path, optimizer_overlap=overlap), callbacks=[there], **options)
    assert_same(ours, fit(made, vectors(), callbacks=[There()], **options))
    assert there.count[-1] > 0


@pytest.mark.long("takes a second or more")
def test_layers_that_are_unfrozen(tmp_path: Path) -> None:
    options: Any = {"max_epochs": 3, "recorded": "losses"}
    ours = fit(stack, vectors(), on_disk(tmp_path), callbacks=[Unfreezes()], **options)
    assert_same(ours, fit(stack, vectors(), callbacks=[Unfreezes()], **options))


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


@pytest.mark.long("takes a second or more")
def test_an_optimizer_without_state(tmp_path: Path) -> None:
    def make() -> Module:
        module = Wide()
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)  # type: ignore[method-assign]
        return module

    with taken_apart() as layers:
        ours = fit(make, wide(), on_disk(tmp_path), recorded="nothing")
    assert_same(ours, fit(make, wide(), recorded="nothing"))
    assert len(layers) == 8 * len(wide())


@pytest.mark.long("takes a second or more")
def test_a_run_that_scales_its_loss(tmp_path: Path) -> None:
    class Scaled(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 1 else loss  # the scaler skips that step

    def run(strategy: Any) -> Outcome:
        plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8))
        return fit(
            fused(lambda: Scaled(Stack())), vectors(), strategy, recorded="losses", max_epochs=2, plugins=[plugin]
        )

    plain = run("auto")
    with simulated():
        assert_same(run(on_disk(tmp_path, optimizer_overlap="forward")), plain)


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
def test_a_full_disk_is_an_error_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients_alone(monkeypatch)
    fill_disk(monkeypatch)
    with pytest.raises(OSError, match=r"of scratch space are needed for gradients, and .* \(No space left on device\)"):
        fit(stack, vectors(), on_disk(tmp_path), callbacks=[NoBatch()])


@pytest.mark.long("takes a second or more")
def test_a_forked_process_says_that_it_cannot_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients_alone(monkeypatch)
    said: list[str] = []

    class Forks(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            said.append(refusal_in_fork(lambda: next(pl_module.parameters()).grad.norm()))

    ours = fit(stack, vectors(), on_disk(tmp_path), callbacks=[Forks()])
    assert_same(ours, fit(stack, vectors()))
    assert said[0].startswith("This gradient is on a disk")


@pytest.mark.rest("takes tenths of a second")
def test_where_the_file_system_cannot_forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_file.libc, "fallocate", lambda *_: -1)
    make = fused(stack)
    ours = fit(make, vectors(), on_disk(tmp_path, optimizer_overlap="forward"), max_epochs=2)
    assert_same(ours, fit(make, vectors(), max_epochs=2))


@pytest.mark.rest("takes tenths of a second")
def test_what_is_where_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients_alone(monkeypatch)
    strategy = on_disk(tmp_path)
    fit(stack, vectors(), strategy)
    nbytes = strategy.ledger.gradients_on_disk
    assert f"{nbytes / 2**10:.1f} KiB of gradients" in str(strategy.ledger)
    assert any(f"{nbytes / 2**10:.1f} KiB of gradients are on the disk" in each for each in strategy.remarks())
