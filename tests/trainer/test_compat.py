"""What this package knows of Lightning beyond its public API, asked of the Lightning that is installed, name by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, ModelCheckpoint, StochasticWeightAveraging, Timer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.strategies.strategy import Strategy
from torch import Tensor, nn

from sp_lightning.trainer import compat
from tests.support.models import Module, vectors
from tests.support.nets import Does
from tests.support.runs import loader, trainer_for


class Small(Module):
    """Logs its loss in each step."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("loss", loss := self.loss(batch))
        return loss


class WithTwo(Small):
    """Two optimizers step in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=1e-3) for _ in range(2)]


def asked(question: Any, module: pl.LightningModule, count: int, *callbacks: Callback, **options: Any) -> list[Any]:
    """The answers after each training step."""
    answers: list[Any] = []
    ask = Does(on_train_batch_end=lambda trainer, *_: answers.append(question(trainer)))
    trainer_for("auto", callbacks=[*callbacks, ask], **options).fit(module, loader(vectors(count)))
    return answers


def test_trainer_of() -> None:
    module, trainer = Small(), trainer_for("auto")
    assert compat.trainer_of(module) is None
    trainer.fit(module, loader(vectors(1)))
    assert compat.trainer_of(module) is trainer


def test_attach_callback() -> None:
    timer, file, finder, mine = Timer(), ModelCheckpoint(), BatchSizeFinder(), Callback()
    trainer = pl.Trainer(accelerator="cpu", callbacks=[timer, file, finder], logger=False, enable_progress_bar=False)
    ordered = [each for each in trainer.callbacks if each in (timer, file, finder)]  # type: ignore[attr-defined]
    assert ordered == [finder, timer, file]
    compat.attach_callback(trainer, mine)
    ordered = [each for each in trainer.callbacks if each in (timer, file, finder, mine)]  # type: ignore[attr-defined]
    assert ordered == [finder, timer, mine, file]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_skips_backward() -> None:
    average = StochasticWeightAveraging(1e-3, swa_epoch_start=1)
    # The two epochs; then one more over the batches, for the statistics of BatchNorm.
    assert asked(compat.skips_backward, Small(), 2, average, max_epochs=2) == [False] * 4 + [True] * 2


def test_accumulates() -> None:
    answers = asked(compat.accumulates, Small(), 5, accumulate_grad_batches=2)
    assert answers == [True, False, True, False, False]


def test_logged_step() -> None:
    # Lightning counts a batch after its callbacks; one that only accumulates is not counted.
    assert asked(compat.logged_step, Small(), 4, accumulate_grad_batches=2) == [0, 0, 1, 1]
    assert asked(compat.logged_step, WithTwo(), 3) == [0, 1, 2]
    assert asked(lambda trainer: trainer.global_step, WithTwo(), 3) == [2, 4, 6]


@pytest.mark.filterwarnings("ignore:.*will run with no optimizer:UserWarning")
def test_is_no_optimizer() -> None:
    class Untrained(Small):
        def configure_optimizers(self) -> None:  # type: ignore[override]
            return None

    found = []
    for module in (Untrained(), Small()):
        trainer = trainer_for("auto")
        trainer.strategy.connect(module)
        module.trainer = trainer
        trainer.strategy.setup_optimizers(trainer)
        found += [compat.is_no_optimizer(optimizer) for optimizer in trainer.optimizers]
    assert found == [True, False]


def test_wraps_another() -> None:
    assert compat.wraps_another(AsyncCheckpointIO())
    assert AsyncCheckpointIO(inner := TorchCheckpointIO()).checkpoint_io is inner
    assert not compat.wraps_another(inner)


class Mine(SingleDeviceStrategy):
    """Overrides a property that has a setter."""

    @property
    def checkpoint_io(self) -> CheckpointIO:
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        compat.set_inherited(Mine, self, "checkpoint_io", io)


def test_set_inherited() -> None:
    strategy, io = Mine(), TorchCheckpointIO()
    strategy.checkpoint_io = io
    assert strategy.checkpoint_io is io
    assert Strategy.checkpoint_io.fget(strategy) is io  # type: ignore[attr-defined]


def test_given_checkpoint_io() -> None:
    assert compat.given_checkpoint_io(SingleDeviceStrategy()) is None
    io = TorchCheckpointIO()
    assert compat.given_checkpoint_io(SingleDeviceStrategy(checkpoint_io=io)) is io


def test_forget_module() -> None:
    strategy, module = SingleDeviceStrategy(), Small()
    strategy.connect(module)
    assert strategy.lightning_module is module
    compat.forget_module(strategy)
    assert strategy.lightning_module is None


def test_both_names_are_one() -> None:
    """With classes made up; ``tests/conformance/test_pytorch_lightning.py`` asks those of the other package."""
    theirs = type(
        "Callback", (), {"__module__": pl.Callback.__module__.replace("lightning.pytorch", "pytorch_lightning")}
    )
    value = type("Mine", (theirs,), {})()
    assert compat.path(theirs) == compat.path(pl.Callback) == "lightning.pytorch.callbacks.callback.Callback"
    assert compat.is_a(value, pl.Callback)
    assert not compat.is_a(value, pl.LightningModule)
    assert compat.base_of(value, pl.Callback) is theirs
    assert compat.base_of(SimpleNamespace(), pl.Callback) is pl.Callback
    assert compat.is_exactly(theirs(), [pl.Callback])
    assert not compat.is_exactly(value, [pl.Callback])
