"""Several devices: Lightning's features give every rank what they give it under ``ddp``, bitwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from torch import nn

from sp_lightning import SuperpipelineStrategy
from tests.equality.on_ranks import EveryBatch, divided, seen
from tests.support.models import vectors
from tests.support.ranks import Number, devices, in_ranks
from tests.support.runs import assert_equal, fit, loader, trainer_for
from tests.support.tiers import first, some


class Net(pl.LightningModule):
    """Has buffers, and logs sums over ranks."""

    def __init__(self, lr: float = 0.1, fused: bool = False) -> None:
        super().__init__()
        self.lr, self.fused = lr, fused
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(3))
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layers(batch).square().mean()
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layers(batch).square().mean(), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.layers(batch).square().mean(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=self.fused)


class Two(Net):
    """Two optimizers that are stepped by hand, one of them clipped."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizers: Any = self.optimizers()
        for number, optimizer in enumerate(optimizers):
            self.toggle_optimizer(optimizer)
            loss = self.layers(batch).square().mean() * (number + 1)
            self.manual_backward(loss)
            if number:
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        return loss

    def configure_optimizers(self) -> Any:
        first, second = self.layers[:2].parameters(), self.layers[2].parameters()
        return [torch.optim.AdamW(first, lr=0.1), torch.optim.SGD(second, lr=0.1, momentum=0.9)]


class DropsGradients(Net):
    """A hook of its optimizer takes a gradient away."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

        def drop(optimizer: Any, *_: Any) -> None:
            optimizer.param_groups[0]["params"][0].grad = None

        optimizer.register_step_pre_hook(drop)
        return optimizer


class Gathers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self.layers(batch)
        everybody: Any = self.all_gather(y, sync_grads=True)
        mean: Any = self.all_gather(y.detach())
        return (everybody - mean.mean()).square().mean()


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)


class Looks(Callback):
    """Looks at weights, and writes them, between batches."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                self.seen.append(parameter.clone())
                parameter.mul_(0.99)


class ManyBuffers(Net):
    """Buffers of dtypes that do not go into each other, which each rank counts by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.tensor([2**60 + 1]))
        self.register_buffer("exact", torch.tensor([1 + 2.0**-40], dtype=torch.float64))
        self.register_buffer("short", torch.ones(2, dtype=torch.bfloat16))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for name in ("whole", "exact", "short"):
            self.get_buffer(name).add_(1 + self.global_rank)
        return super().training_step(batch, batch_idx)


class Average(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(avg_fn=lambda average, value, number: average * 0.9 + value * 0.1)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None


def prunes(lottery: bool = False) -> Any:
    return ModelPruning(
        "l1_unstructured", amount=0.3, parameter_names=["weight"], use_lottery_ticket_hypothesis=lottery
    )


def swa() -> Any:
    return StochasticWeightAveraging(0.1, 1)


FORWARD = {"optimizer_overlap": "forward"}
TRAINED: dict[str, tuple[Callable[[], Net], dict[str, Any], Callable[[], list[Any]], dict[str, Any]]] = {
    "two optimizers": (Two, {}, list, {}),
    "a hook drops a gradient": (DropsGradients, {}, list, {}),
    "tensors are gathered": (Gathers, {}, list, {}),
    "frozen weights are not saved": (Frozen, {"save_frozen": False}, list, {}),
    "buffers of many dtypes": (ManyBuffers, {}, list, {}),
    "looks under forward": (partial(Net, fused=True), FORWARD, lambda: [Looks()], {}),
    "averages under forward": (partial(Net, fused=True), FORWARD, lambda: [Average()], {"max_epochs": 2}),
    "SWA under forward": (partial(Net, fused=True), FORWARD, lambda: [swa()], {"max_epochs": 3}),
    "averages": (Net, {}, lambda: [Average()], {"max_epochs": 2, "val": 2}),
    "pruning": (Net, {}, lambda: [prunes()], {"max_epochs": 3}),
    "lottery tickets": (Net, {}, lambda: [prunes(lottery=True)], {"max_epochs": 3}),
    "early stopping": (
        Net, {}, lambda: [EarlyStopping("val", patience=0, mode="max")], {"max_epochs": 4, "val": 4},
    ),
    "limits": (
        Net, {}, list, {"limit_train_batches": 3, "limit_val_batches": 1, "val": 4, "max_epochs": 2, "val_check_interval": 2},
    ),
    "overfitting": (Net, {}, list, {"overfit_batches": 1, "max_epochs": 2, "val": 4}),
    "a fast run": (Net, {}, list, {"fast_dev_run": 2, "val": 4}),
}  # fmt: skip


def copy_to_another_device(new: Any, old: Any, name: str) -> None:
    """As on a GPU. On the CPU Lightning's copy of the original weights shares memory with the weights that it becomes."""
    weights = getattr(new, f"{name}_orig", getattr(new, name))
    weights.data = getattr(old, name).data.clone()


def train(name: str, ours: bool, folder: str, ranks: Number) -> Any:
    make, strategy, callbacks, options = TRAINED[name]
    added, validated = callbacks(), {**options}.pop("val", 0)
    options = {key: value for key, value in options.items() if key != "val"}
    with mock.patch.object(ModelPruning, "_copy_param", staticmethod(copy_to_another_device)):
        outcome = fit(
            make, vectors(8), chosen(ours, strategy), val=vectors(validated) if validated else None, callbacks=added,
            recorded="losses" if strategy.get("optimizer_overlap") else "gradients", **devices(ranks), **options,
        )  # fmt: skip
    looked = [getattr(callback, "seen", None) for callback in added]
    return seen(outcome), looked, dict(outcome.trainer.callback_metrics)


def chosen(ours: bool, strategy: dict[str, Any]) -> Any:
    return SuperpipelineStrategy(**{"k": 1, **strategy}) if ours else EveryBatch()


def compare(function: Callable[..., Any], name: str, folder: Path, ranks: Number = 2) -> None:
    (folder / "ours").mkdir()
    (folder / "plain").mkdir()
    ours = in_ranks(ranks, function, name, True, str(folder / "ours"), ranks)
    plain = in_ranks(ranks, function, name, False, str(folder / "plain"), ranks)
    for number, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        if function is train:
            theirs = divided(theirs[0], number), *theirs[1:]
        assert_equal(mine, theirs, f"rank {number}")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("name", first(list(TRAINED), "two optimizers", "pruning", why="two stand for all features"))
def test_features_of_training(name: str, tmp_path: Path) -> None:
    compare(train, name, tmp_path)


NODES = "one node has the features; two add up what they sum"


@pytest.mark.long(NODES)
@pytest.mark.parametrize("name", some(TRAINED, "averages", "tensors are gathered", why=NODES))
def test_features_of_training_on_two_nodes(name: str, tmp_path: Path) -> None:
    compare(train, name, tmp_path, (2, 1))


def state(module: Any) -> dict[str, torch.Tensor]:
    return copy.deepcopy(module.state_dict())


def fit_twice(trainer: Any, module: Any, folder: str) -> Any:
    trainer.fit(module, loader(vectors(8)), loader(vectors(2)))
    between = state(module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(vectors(8)))
    return between


def everything(trainer: Any, module: Any, folder: str) -> Any:
    """Each loop after the other, and files of both names."""
    data = loader(vectors(4))
    trainer.fit(module, loader(vectors(8)), data)
    found = [
        trainer.test(module, data, verbose=False),
        trainer.predict(module, data),
        trainer.validate(module, data, verbose=False),
        trainer.test(module, data, ckpt_path="best", verbose=False),
        trainer.validate(module, data, ckpt_path="last", verbose=False),
    ]
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader(vectors(8)), data, ckpt_path="last")
    return found, sorted(path.name for path in Path(folder).glob("*.ckpt"))


def find_a_learning_rate(trainer: Any, module: Any, folder: str) -> Any:
    found: Any = Tuner(trainer).lr_find(module, loader(vectors(8)), num_training=8)
    trainer.fit(module, loader(vectors(8)))
    return found.results, module.lr


def evaluate(trainer: Any, module: Any, folder: str) -> Any:
    data = loader(vectors(4))
    return trainer.validate(module, data, verbose=False), trainer.predict(module, data)


SCRIPTS = {each.__name__: each for each in (fit_twice, everything, find_a_learning_rate, evaluate)}


def run_script(name: str, ours: bool, folder: str, ranks: Number) -> Any:
    pl.seed_everything(7, verbose=False)
    trainer = trainer_for(
        chosen(ours, {}), **devices(ranks), default_root_dir=folder, enable_checkpointing=name == "everything",
        callbacks=[ModelCheckpoint(folder, save_last=True, monitor="val", filename="best")] if name == "everything" else [],
    )  # fmt: skip
    module = Net()
    return SCRIPTS[name](trainer, module, folder), state(module)


@pytest.mark.long("loops after one another; the first tier has each of them")
@pytest.mark.parametrize("name", SCRIPTS)
def test_loops_after_one_another(name: str, tmp_path: Path) -> None:
    compare(run_script, name, tmp_path)


@pytest.mark.long("loops after one another, on two nodes")
@pytest.mark.parametrize("name", some(SCRIPTS, "everything", why=NODES))
def test_loops_after_one_another_on_two_nodes(name: str, tmp_path: Path) -> None:
    compare(run_script, name, tmp_path, (2, 1))
