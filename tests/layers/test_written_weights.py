"""Weights that are written, copied, shared or given other memory, between and inside steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from tests.support.bare import assert_like_plain, bare
from tests.support.models import (
    Copies,
    Module,
    Stack,
    vectors,
)
from tests.support.runs import Outcome, assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.simdevice import simulated
from tests.support.tiers import first


class WritesBetweenForwardAndBackward(Module):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.data.mul_(0.9)


class WritesDataInHooks(Module):
    """Outside the step's own code each use of a weight lets go of its layer at once: the write came too late, and was lost."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.data.mul_(0.9)


class RebindsThenCalls(Module):
    def on_train_epoch_start(self) -> None:
        for p in self.parameters():
            p.data = p.data * 0.5
        self.seen = self.net(torch.ones(1, 16)).sum().item()


class WritesThroughOldViews(Module):
    """Views taken before the forward and written after it: an average over ``[p.detach() for p in …]``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        net: Any = self.net
        views = [block.inner.weight.detach() for block in net.blocks] + [net.blocks[1].outer.weight.data]
        self.loss(batch)
        if batch_idx == 2:
            torch._foreach_mul_(views, 0.5)
        return self.loss(batch)


class SwapsData(Module):
    """Weights and their running mean change places by ``.data`` for validation, and back."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.mean = copy.deepcopy(self.net).requires_grad_(False)
        self.seen: list[Any] = []

    def on_train_batch_end(self, *_: Any) -> None:
        for p, mean in zip(self.net.parameters(), self.mean.parameters(), strict=True):
            mean.data.lerp_(p.data, 0.1)
            p.data, mean.data = mean.data, p.data
        self.seen.append(self.loss(torch.ones(2, 16)).item())
        inner = self.net.blocks[0].inner, self.net.blocks[2].inner
        inner[0].weight.data, inner[1].weight.data = inner[1].weight.data, inner[0].weight.data


class SharesMemory(Module):
    """In place: the slot's transfers went on to where the memory had been."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.net.blocks[1].inner.weight.detach().share_memory_()
        return self.loss(batch)


class Transposes(Module):
    """Same address, shape and dtype, other strides."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            weight = self.net.head.weight
            weight.data = weight.data.t()


class WritesCapturedInPlace(Module):
    """In-place writes through references from before the step bump a version, and are seen within the step."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.captured = [list(self.net.parameters())]

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            super().loss(batch)
            for p in self.captured[0]:
                p.mul_(0.9)
        return super().loss(batch)


def test_tying_by_data_is_refused() -> None:
    class Ties(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            self.net.blocks[2].inner.weight.data = self.net.blocks[0].inner.weight.data

    with pytest.raises(
        RuntimeError, match=r"'net.blocks.2.inner.weight' was given the memory of 'net.blocks.0.inner.weight'"
    ):
        bare(lambda: Ties(Stack()), superpipeline())


def test_weights_may_be_written_after_a_call_outside_any_step() -> None:
    """A transfer that the call began may not be reading them any more."""

    class CallsThenWrites(Module):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                self.seen = self.net(batch)
            self.net.blocks[1].inner.weight.data.mul_(0.5)

    with simulated():
        ours = fit(lambda: CallsThenWrites(Stack()), vectors(), superpipeline(k=1))
    assert_same(ours, fit(lambda: CallsThenWrites(Stack()), vectors()))


class WritesAfterBatches(Module):
    """As averaging, clamping and adapters do around validation; a fetch may be under way that nobody waited for."""

    def __init__(self, hook: str) -> None:
        super().__init__(Stack())
        setattr(self, hook, self.write)

    def write(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.97)


@pytest.mark.parametrize(
    "hook",
    first(
        ["on_validation_batch_end", "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end"],
        "on_validation_end",
        why="the same by other hooks",
    ),
)
def test_weights_that_hooks_write_after_a_batch_are_read_by_no_fetch(hook: str) -> None:
    def run(strategy: Any) -> Outcome:
        return fit(lambda: WritesAfterBatches(hook), vectors(), strategy, val=vectors(), max_epochs=2)

    with simulated():
        ours = run(superpipeline(k=1))
    assert_same(ours, run("auto"))


def writes(module: nn.Module) -> None:
    """Weights, in a way that no version shows."""
    for p in module.parameters():
        p.data.mul_(0.9)


class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Steps after ``on_train_batch_end``, unlike others."""

    def step(self, *args: Any) -> None:  # type: ignore[override]
        super().step(*args)
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.data.mul_(0.9)


class WritesLate(Module):
    """Weights are written after the callbacks have heard of the batch's end."""

    def __init__(self, where: str) -> None:
        super().__init__(Stack())
        self.where = where

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        if self.where == "on_save_checkpoint":
            writes(self)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.where != "scheduler":
            return optimizer
        plateau = {"scheduler": Plateau(optimizer), "interval": "step", "monitor": "loss"}
        return {"optimizer": optimizer, "lr_scheduler": plateau}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class Reloads(WritesLate):
    def train_dataloader(self) -> Any:
        writes(self)
        return loader(vectors())


@pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")
@pytest.mark.parametrize("simulation", first([nullcontext, simulated], simulated, why="the same on the CPU"))
@pytest.mark.parametrize("where", ["on_save_checkpoint", "scheduler", "train_dataloader"])
def test_weights_written_after_the_callbacks_are_seen(where: str, simulation: Any, tmp_path: Path) -> None:
    def run(strategy: Any, folder: Path) -> Any:
        pl.seed_everything(3, verbose=False)
        module = Reloads(where) if where == "train_dataloader" else WritesLate(where)
        saves = where == "on_save_checkpoint"
        trainer = trainer_for(
            strategy, max_epochs=2, enable_checkpointing=saves,
            callbacks=[ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)] if saves else [],
            reload_dataloaders_every_n_epochs=int(where == "train_dataloader"),
        )  # fmt: skip
        trainer.fit(module, None if where == "train_dataloader" else loader(vectors()))
        return module.state_dict(), trainer.optimizers[0].state_dict()

    with simulation():
        ours = run(superpipeline(k=2), tmp_path / "ours")
    assert_equal(ours, run("auto", tmp_path / "plain"), where)


# ---------------------------------------------------------------------- tensors of a state_dict() that are kept


class KeepsState(Module):
    """Keeps a layer's ``state_dict()``, which gives references, and views of it; ``how`` gives weights other memory later."""

    def __init__(self, how: str) -> None:
        super().__init__(Stack(2))
        self.how = how
        self.seen: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.kept = self.net.blocks[0].state_dict()  # type: ignore[union-attr, index, operator]
            self.rows = {name: value[:2] for name, value in self.kept.items()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3 and self.how == "in a step":
            self.exchange("inner.bias")
        loss = self.loss(batch)
        if batch_idx == 3 and self.how == "after the forward":
            self.exchange("outer.weight")
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 4:
            if self.how == "written, too":
                self.kept["inner.weight"].mul_(0.5)
            for name in {"one": ("inner.bias",), "two": ("inner.bias", "outer.weight"), "all": self.kept}.get(
                self.how, ()
            ):
                self.exchange(name)
            if self.how == "written, too":
                self.exchange("inner.bias")
                self.kept["inner.bias"].fill_(3.0)
        if self.trainer.global_step > 1:
            self.seen.append([value.clone() for value in (*self.kept.values(), *self.rows.values())])

    def exchange(self, name: str) -> None:
        weight = self.net.blocks[0].get_parameter(name)  # type: ignore[union-attr, index, operator]
        weight.data = weight.data * 0.5


@pytest.mark.parametrize("precision", first(["32-true", "bf16-mixed"], "bf16-mixed", why="the same in float32"))
@pytest.mark.parametrize("how", ["one", "two", "all", "written, too", "in a step", "after the forward"])
def test_kept_tensors_follow_the_weights_that_keep_their_memory(how: str, precision: str) -> None:
    """Those of a layer's other weights did not; and where a step had exchanged a weight, its old tensor showed new values."""
    plain = bare(lambda: KeepsState(how), "auto", vectors(6), precision=precision)
    for options in ({"k": 1}, {"k": 1, "keep_on_gpu": ["net.blocks.0"]}):
        with simulated():
            ours = bare(lambda: KeepsState(how), superpipeline(**options), vectors(6), precision=precision)
        assert_equal(ours, plain, str(options))


CASES: dict[str, tuple[Callable[[], pl.LightningModule], dict[str, Any]]] = {
    "writes-between-forward-and-backward": (lambda: WritesBetweenForwardAndBackward(Stack()), {}),
    "writes-data-in-hooks": (lambda: WritesDataInHooks(Stack()), {}),
    "rebinds-then-calls": (lambda: RebindsThenCalls(Stack()), {"max_epochs": 2}),
    "writes-through-old-views": (lambda: WritesThroughOldViews(Stack()), {}),
    "copies": (lambda: Copies(), {}),
    "writes-captured-in-place": (lambda: WritesCapturedInPlace(), {}),
    "shares-memory": (lambda: SharesMemory(Stack()), {}),
    "transposes": (lambda: Transposes(Stack()), {}),
    "swaps-data": (lambda: SwapsData(), {"max_epochs": 2}),
}


@pytest.mark.parametrize("precision", first(["32-true", "bf16-mixed"], "32-true", why="the same in mixed precision"))
@pytest.mark.parametrize("name", CASES)
def test_like_plain(name: str, precision: str) -> None:
    make, options = CASES[name]
    assert_like_plain(make, **options, precision=precision)


class SetsToItself(nn.Module):
    """Transposes its weight once, in evaluation, by a view of the weight's own memory; and sets it to itself each time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.done = False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight
        with torch.no_grad():
            assert weight.set_(weight) is weight  # type: ignore[call-overload]  # torch takes a tensor, too
        if not (self.training or self.done):
            self.done = True
            weight.set_(weight, 0, weight.shape, weight.stride()[::-1])
        return torch.tanh(self.inner(x))


def test_a_weight_is_set_to_a_view_of_itself() -> None:
    """``weight.set_(weight)`` writes nothing; parametrizations of torch call it so."""

    def make() -> Module:
        return Module(nn.Sequential(nn.Linear(16, 16), SetsToItself(), nn.Linear(16, 16)))

    options: dict[str, Any] = {"val": vectors(1), "max_epochs": 2}
    assert_same(fit(make, vectors(), superpipeline(k=1), **options), fit(make, vectors(), **options))
