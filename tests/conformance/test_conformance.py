"""Lightning's features under this strategy: each runs under plain Lightning and under ours, and all that can be seen is equal.

Which ones is in CONFORMANCE.md, which ``python -m tests.conformance.test_conformance`` writes.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import datetime
import gc
import importlib
import inspect
import itertools
import json
import logging
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
import torchvision
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import callbacks as plc
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.core.saving import load_hparams_from_yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.support.models import CASES, Classifier, Gan, Lbfgs, Module, Stack, images, tokens, vectors
from tests.support.runs import assert_equal, collate, fused, loader, superpipeline, trainer_for
from tests.support.simdevice import simulated

LOGGING = "Logging and profiling"
GROUPS = (
    "Checkpoints", "Callbacks", LOGGING, "Loops and flags", "Optimization", "Hooks", "Precision",
    "Set-up and data", "Command line",
)  # fmt: skip
TABLE = Path(__file__).parents[1] / "CONFORMANCE.md"
FEATURES: list[tuple[str, str, Callable[..., None]]] = []

pytestmark = [
    # Lightning's advice to who resumes without the callbacks that saved.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create:UserWarning"),
]

Seen = dict[str, Any]
Overlaps = Sequence[str]
EVERY = ("off", "forward", "backward")
LATE = ("off", "forward")
"""Where code of users looks at gradients, which are gone where updates run under backward."""


def feature(group: str, *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Names what a test is about."""
    assert group in GROUPS

    def note(test: Callable[..., None]) -> Callable[..., None]:
        FEATURES.extend((group, name, test) for name in names)
        return test

    return note


# ---------------------------------------------------------------------- what is compared


class Way:
    """One way to run: plain Lightning, or a strategy of ours for each trainer."""

    def __init__(self, folder: Path, overlap: str | None, **options: Any) -> None:
        self.overlap = overlap
        self.folder = folder / (overlap or "plain")
        self.folder.mkdir(parents=True)
        self.strategies: list[Any] = []
        self._options = options

    def strategy(self) -> Any:
        if self.overlap is None:
            return "auto"
        self.strategies.append(superpipeline(k=2, k_prime=1, optimizer_overlap=self.overlap, **self._options))
        return self.strategies[-1]

    def trainer(self, **options: Any) -> pl.Trainer:
        """Seeded, with a logger that keeps what it gets."""
        pl.seed_everything(7, verbose=False)
        options = {"logger": Notes(), "log_every_n_steps": 1, "default_root_dir": self.folder, **options}
        return trainer_for(self.strategy(), **options)

    def fit(
        self,
        make: Callable[[], pl.LightningModule] | None = None,
        batches: int | Sequence[Any] = 6,
        val: int | Sequence[Any] = 2,
        ckpt_path: Any = None,
        **options: Any,
    ) -> Seen:
        """Train a module; everything that is left."""
        trainer = self.trainer(**options)
        module = (make or Net)()
        before = copy.deepcopy(module.state_dict())
        training, validation = (vectors(each) if isinstance(each, int) else each for each in (batches, val))
        trainer.fit(module, loader(training), loader(validation), ckpt_path=ckpt_path)
        after = module.state_dict()
        assert any(not torch.equal(before[name], after[name]) for name in before if name in after), "nothing trained"
        return left(trainer)


def compare(run: Callable[[Way], Seen], folder: Path, overlaps: Overlaps = EVERY, **options: Any) -> Seen:
    """Run under plain Lightning and in each of our ways; returns what plain left."""
    way = Way(folder, None)
    plain = scrubbed(run(way), way.folder)
    assert plain, "there is nothing to compare"
    for overlap in overlaps:
        way = Way(folder, overlap, **options)
        ours = scrubbed(run(way), way.folder)
        assert way.strategies
        for strategy in way.strategies:
            assert strategy.stats().fetched_layers, "nothing was streamed"
        assert_equal(ours, plain, overlap)
    return plain


def scrubbed(value: Any, folder: Path) -> Any:
    """Without the folder in paths, and in types that ``==`` compares."""
    if isinstance(value, dict):
        return {scrubbed(key, folder): scrubbed(each, folder) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrubbed(each, folder) for each in value]
    if isinstance(value, (str, Path)):
        return str(value).replace(str(folder), "…")
    return value.tolist() if isinstance(value, np.ndarray) else value


def left(trainer: pl.Trainer, *more: pl.LightningModule) -> Seen:
    """Everything that a run leaves behind."""
    module = trainer.lightning_module
    notes = [logger for logger in trainer.loggers if isinstance(logger, Notes)]
    return {
        "state": {key: copy.deepcopy(value) for key, value in module.state_dict().items()},
        "more": [copy.deepcopy(dict(each.state_dict())) for each in more],
        "optimizers": [copy.deepcopy(each.state_dict()) for each in trainer.optimizers],
        "schedulers": [copy.deepcopy(each.scheduler.state_dict()) for each in trainer.lr_scheduler_configs],
        "metrics": [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics],
        "logged": [(each.lines, each.hparams) for each in notes],
        "loops": [copy.deepcopy(each.state_dict()) for each in (trainer.fit_loop, trainer.validate_loop)],
        "progress": [trainer.global_step, trainer.current_epoch, trainer.should_stop, str(trainer.state.status)],
        "frozen": {name: not p.requires_grad for name, p in module.named_parameters()},
        "modes": {name: each.training for name, each in module.named_modules()},
        "device": [str(module.device), str(module.dtype)],
        "random state": [torch.get_rng_state(), random.getstate(), np.random.get_state()],
    }


def files(folder: Path) -> Seen:
    """The checkpoints in a folder, and where links lead."""
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else torch.load(path, weights_only=False, map_location="cpu")
        for path in sorted(folder.rglob("*.ckpt"))
    }


class Notes(Logger):
    """Keeps what it gets, but for what the partner callback adds."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, Any]]] = []
        self.hparams: list[Any] = []

    name = "notes"
    version = 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.lines.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.hparams.append(copy.deepcopy(dict(params)))


class Net(Module):
    """Logs in all ways; its optimizer is fused, so that updates may run in the background."""

    def __init__(self, net: nn.Module | None = None, lr: float = 1e-2) -> None:
        super().__init__(Stack(4) if net is None else net)
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=4)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=4, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr, fused=True)


class Quiet(Net):
    """Logs nothing."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """A barebones trainer warns."""


class Images(Classifier, Net):
    """A model of torchvision's, with BatchNorm."""

    def __init__(self) -> None:
        Net.__init__(self, torchvision.models.ShuffleNetV2([1, 2, 1], [8, 16, 32, 48, 64], 5))


def middle(module: Any) -> Tensor:
    """A weight of a layer that is streamed, as it is now."""
    return module.net.blocks[1].inner.weight.detach().clone()


@contextlib.contextmanager
def clock(module: Any, *names: str) -> Iterator[None]:
    """Time passes in a module of Lightning's by one second with each look at it."""
    seconds = itertools.count().__next__
    with mock.patch.object(module, "time", SimpleNamespace(**dict.fromkeys(names, lambda: float(seconds())))):
        yield


@contextlib.contextmanager
def fails(where: str) -> Iterator[None]:
    """Lightning ends the program after an interrupt."""
    with pytest.raises(SystemExit if where == "interrupt" else KeyError, match=None if where == "interrupt" else where):
        yield


class Does(Callback):
    """Calls functions from hooks: ``Does(on_train_batch_end=f)``; they get the trainer, the module, and the rest."""

    def __init__(self, **hooks: Callable[..., None]) -> None:
        for name, hook in hooks.items():
            setattr(self, name, hook)


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """Another learning rate in one of the ways is noticed."""
    with pytest.raises(AssertionError, match="differ"):
        compare(lambda way: way.fit(lambda: Net(lr=1e-2 if way.overlap is None else 1.1e-2)), tmp_path)
    with pytest.raises(AssertionError, match="nothing was streamed"):
        compare(lambda way: way.fit(), tmp_path / "resident", resident=["**"])


# ---------------------------------------------------------------------- checkpoints

SAVERS: dict[str, dict[str, Any]] = {
    "monitor, min": {"monitor": "val_loss"},
    "monitor, max": {"monitor": "train_loss_step", "mode": "max", "save_top_k": 2},
    "save_top_k=0": {"save_top_k": 0, "save_last": True},
    "save_top_k=-1": {"save_top_k": -1},
    "save_last": {"save_last": True, "monitor": "val_loss"},
    "save_last=link": {"save_last": "link", "save_top_k": -1},
    "every_n_train_steps": {"every_n_train_steps": 4, "save_top_k": -1},
    "train_time_interval": {"train_time_interval": datetime.timedelta(seconds=4), "save_top_k": -1},
    "every_n_epochs": {"every_n_epochs": 2, "save_top_k": -1},
    "save_on_train_epoch_end": {"save_on_train_epoch_end": True, "monitor": "train_loss_epoch", "save_top_k": 2},
    "save_weights_only": {"save_weights_only": True, "save_top_k": -1},
}


@feature("Checkpoints", *(f"`ModelCheckpoint`: {name}" for name in SAVERS))
@pytest.mark.parametrize("name", SAVERS)
def test_model_checkpoint(name: str, tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        saver = ModelCheckpoint(way.folder, "{epoch}-{step}-{train_loss_step:.9f}", **SAVERS[name])
        with clock(plc.model_checkpoint, "monotonic"):
            seen = way.fit(callbacks=[saver], enable_checkpointing=True, max_epochs=2)
        return {**seen, "saver": saver.state_dict(), "last": saver.last_model_path, "files": files(way.folder)}

    found = compare(run, tmp_path)["files"]
    assert found
    assert all(isinstance(each, str) or each["state_dict"] for each in found.values())


class Fails(Callback):
    """Raises somewhere in the fourth batch."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._fail("before", batch_idx)
        self._fail("interrupt", batch_idx)
        if self.where == "forward" and batch_idx == 3:
            pl_module.net.blocks[2].register_forward_hook(lambda *_: self._fail("forward", 3))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._fail("after", batch_idx)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._fail("validation", 3)

    def _fail(self, where: str, batch_idx: int) -> None:
        if where == self.where and batch_idx == 3:
            raise (KeyboardInterrupt if where == "interrupt" else KeyError)(where)


@feature("Checkpoints", "`ModelCheckpoint`: save_on_exception", "`OnExceptionCheckpoint`")
@pytest.mark.filterwarnings("ignore:.*.fit.ckpt_path=.*(without a model|no last checkpoint).*:UserWarning")
@pytest.mark.parametrize("where", ["before", "forward", "after", "validation", "interrupt"])
def test_saved_on_exception(where: str, tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        savers = [
            ModelCheckpoint(way.folder / "a", save_on_exception=True),
            plc.OnExceptionCheckpoint(way.folder / "b"),
        ]
        trainer = way.trainer(callbacks=[*savers, Fails(where)], enable_checkpointing=True)
        module = Net()
        with fails(where):
            trainer.fit(module, loader(vectors(6)), loader(vectors(2)))
        return {"files": files(way.folder), "state": dict(module.state_dict()), "step": trainer.global_step}

    assert len(compare(run, tmp_path)["files"]) == 2


class SavesAt(Callback):
    """Saves after a batch, wherever that is in an epoch or an accumulation."""

    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == self.batch:
            trainer.save_checkpoint(self.path)


@feature("Checkpoints", "resume in mid-epoch", "resume in mid-accumulation", "resume across strategies")
@pytest.mark.parametrize("batch", [3, 4], ids=["mid-epoch", "mid-accumulation"])
def test_resumes_in_the_middle(batch: int, tmp_path: Path) -> None:
    """Both ways to write a file, with all ways to read it."""
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 3, "batches": 7}

    def write(way: Way) -> Seen:
        seen = way.fit(callbacks=[SavesAt(way.folder / "mid.ckpt", batch)], **options)
        return {**seen, "files": files(way.folder)}

    def read(way: Way, path: Path) -> Seen:
        return {**way.fit(ckpt_path=path, **options), "path": ""}

    assert compare(write, tmp_path)["files"]
    for writer in ("plain", "off", "forward"):
        seen = compare(partial(read, path=tmp_path / writer / "mid.ckpt"), tmp_path / f"from {writer}")
        assert seen["progress"][0] == 12
        assert seen["logged"][0][0][0][0] >= 6, "it began at the beginning"


@feature("Checkpoints", '`ckpt_path="best"` and `"last"`', "`Trainer.save_checkpoint(weights_only=True)`")
def test_best_and_last(tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        saver = ModelCheckpoint(way.folder, monitor="val_loss", mode="max", save_last=True, save_top_k=2)
        trainer = way.trainer(callbacks=[saver], enable_checkpointing=True, max_epochs=2)
        module = Net()
        trainer.fit(module, loader(vectors(6)), loader(vectors(2)))
        last = trainer.test(module, loader(vectors(2)), ckpt_path="last", verbose=False)
        best = trainer.test(module, loader(vectors(2)), ckpt_path="best", verbose=False)
        trainer.save_checkpoint(way.folder / "weights.ckpt", weights_only=True)
        return {"last": last, "best": best, "files": files(way.folder), **left(trainer)}

    seen = compare(run, tmp_path)
    assert seen["last"] != seen["best"]
    assert "optimizer_states" not in seen["files"]["weights.ckpt"]


class WithExtras(Net):
    """Saves more, and hyperparameters."""

    def __init__(self, depth: int = 3, rate: float = 1e-2) -> None:
        super().__init__(Stack(depth), rate)
        self.save_hyperparameters()
        self.seen = torch.zeros(16)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch.mean(0)
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen.clone()
        checkpoint["norm"] = sum(value.norm() for value in checkpoint["state_dict"].values())
        checkpoint["weight"] = self.net.blocks[0].inner.weight.detach().clone()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]
        checkpoint["state_dict"]["net.head.bias"] = checkpoint["state_dict"]["net.head.bias"] + 1


class Counts(Callback):
    """A callback with a state."""

    def __init__(self) -> None:
        self.total = torch.zeros(())
        self.calls: list[str] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.total += outputs["loss"]

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")
        self.total = state_dict["total"]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.calls.append("save")
        checkpoint["mean"] = {name: value.mean() for name, value in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.calls.append("load")
        checkpoint["callbacks"]["Counts"]["total"] += 1


@feature(
    "Checkpoints", "`on_save_checkpoint` and `on_load_checkpoint` of module and callback", "`Callback.state_dict`",
    "`save_hyperparameters`, `load_from_checkpoint`",
)  # fmt: skip
def test_states_of_ones_own(tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        saver = ModelCheckpoint(way.folder, "one", every_n_train_steps=4)
        first = Counts()
        fitted = way.fit(partial(WithExtras, 4, 2e-2), callbacks=[first, saver], enable_checkpointing=True)
        second = Counts()
        resumed = way.fit(partial(WithExtras, 4), callbacks=[second], max_epochs=2, ckpt_path=way.folder / "one.ckpt")
        loaded = WithExtras.load_from_checkpoint(way.folder / "one.ckpt", weights_only=False)
        return {
            "fitted": fitted, "resumed": resumed, "files": files(way.folder), "loaded": dict(loaded.state_dict()),
            "totals": [first.total, second.total, first.calls, second.calls], "hparams": dict(loaded.hparams),
        }  # fmt: skip

    seen = compare(run, tmp_path)
    assert seen["hparams"] == {"depth": 4, "rate": 2e-2}
    assert seen["files"]["one.ckpt"]["mean"]
    assert seen["totals"][1] > seen["totals"][0] + 1


class Partial(Net):
    """Leaves some of its weights out of checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "blocks.1" not in name}


@feature("Checkpoints", "`strict_loading=False`, `state_dict` override")
def test_strict_loading(tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        saver = ModelCheckpoint(way.folder, "one", every_n_train_steps=4)
        fitted = way.fit(Partial, callbacks=[saver], enable_checkpointing=True)
        resumed = way.fit(Partial, max_epochs=2, ckpt_path=way.folder / "one.ckpt")
        return {"fitted": fitted, "resumed": resumed, "files": files(way.folder)}

    state = compare(run, tmp_path)["files"]["one.ckpt"]["state_dict"]
    assert state
    assert not any("blocks.1" in name for name in state)


class SlowIO(TorchCheckpointIO):
    """Writes after some training has gone on."""

    def __init__(self, trained: threading.Event) -> None:
        self.trained = trained

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        assert self.trained.wait(60)
        super().save_checkpoint(checkpoint, path, storage_options)


@feature("Checkpoints", "`AsyncCheckpointIO`")
def test_async_checkpoints(tmp_path: Path) -> None:
    """A file is of the moment when it was asked for, though training goes on before it is written."""

    def run(way: Way) -> Seen:
        trained = threading.Event()
        io = AsyncCheckpointIO(SlowIO(trained))
        saver = ModelCheckpoint(way.folder, every_n_train_steps=2, save_top_k=-1)
        lets_go = Does(on_train_batch_end=lambda *args: trained.set() if args[-1] == 4 else None)
        seen = way.fit(callbacks=[lets_go, saver], plugins=[io], enable_checkpointing=True)
        return {**seen, "files": files(way.folder)}

    found = list(compare(run, tmp_path)["files"].values())
    assert len(found) == 3
    name = "net.blocks.1.inner.weight"
    assert not torch.equal(found[0]["state_dict"][name], found[1]["state_dict"][name])


# ---------------------------------------------------------------------- callbacks


@feature("Callbacks", "`EarlyStopping`")
@pytest.mark.parametrize(
    "options",
    [
        {"monitor": "val_loss", "mode": "max", "patience": 1},
        {"monitor": "train_loss", "stopping_threshold": 1e-2, "check_on_train_epoch_end": True, "patience": 9},
    ],
    ids=["patience", "threshold"],
)
def test_early_stopping(options: dict[str, Any], tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        stopping = plc.EarlyStopping(**options)
        seen = way.fit(callbacks=[stopping], max_epochs=20, batches=3)
        return {**seen, "stopping": stopping.state_dict(), "reason": str(stopping.stopping_reason)}

    seen = compare(run, tmp_path)
    assert 0 < seen["stopping"]["stopped_epoch"] < 19


class Scheduled(Net):
    """Schedulers by name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedulers = torch.optim.lr_scheduler
        chosen: dict[str, Any] = {
            "epoch": lambda: schedulers.StepLR(optimizer, 1, 0.5),
            "step": lambda: {"scheduler": schedulers.ExponentialLR(optimizer, 0.8), "interval": "step", "frequency": 2},
            "plateau": lambda: {
                "scheduler": schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9), "monitor": "val_loss",
            },
            "plateau, step": lambda: {
                "scheduler": schedulers.ReduceLROnPlateau(optimizer, patience=1, threshold=0.9),
                "monitor": "train_loss_step", "interval": "step",
            },
            "one cycle": lambda: {
                "scheduler": schedulers.OneCycleLR(optimizer, 0.1, total_steps=20), "interval": "step", "name": "cycle",
            },
            "sequential": lambda: {
                "scheduler": schedulers.SequentialLR(
                    optimizer,
                    [schedulers.LinearLR(optimizer, 0.1, total_iters=3), schedulers.CosineAnnealingLR(optimizer, 9)],
                    [3],
                ),
                "interval": "step",
            },
        }  # fmt: skip
        return {"optimizer": optimizer, "lr_scheduler": chosen[self.kind]()}


@feature("Callbacks", "`LearningRateMonitor`")
def test_learning_rate_monitor(tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        monitor = plc.LearningRateMonitor(log_momentum=True, log_weight_decay=True)
        return {**way.fit(partial(Scheduled, "one cycle"), callbacks=[monitor]), "rates": monitor.lrs}

    lines = compare(run, tmp_path)["logged"][0][0]
    rates = [line["cycle"] for _, line in lines if "cycle" in line]
    assert len(set(rates)) > 3
    assert any("cycle-weight_decay" in line for _, line in lines)


@feature("Callbacks", "`Tuner.lr_find`", "`LearningRateFinder`")
@pytest.mark.parametrize("callback", [False, True], ids=["tuner", "callback"])
def test_learning_rate_finder(callback: bool, tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        trainer = way.trainer(callbacks=[plc.LearningRateFinder(num_training_steps=25)] if callback else [])
        module = Net()
        if callback:
            trainer.fit(module, loader(vectors(20)), loader(vectors(2)))
            finder = trainer.callbacks[0].optimal_lr
        else:
            finder = Tuner(trainer).lr_find(module, loader(vectors(20)), loader(vectors(2)), num_training=25)
            trainer.fit(module, loader(vectors(20)), loader(vectors(2)))
        return {**left(trainer), "results": finder.results, "suggestion": finder.suggestion(), "rate": module.lr}

    seen = compare(run, tmp_path)
    assert seen["rate"] != 1e-2
    assert len(seen["results"]["loss"]) > 5


class Sized(Net):
    """Has its own data and batch size, and runs out of memory above a certain one."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.batch_size, self.limit = 2, limit
        self.tried: list[int] = []

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.cat(list(vectors(16)))), self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.cat(list(vectors(2)))), self.batch_size)

    def loss(self, batch: Any) -> Tensor:
        if self.training:
            self.tried.append(len(batch[0]))
        found = super().loss(batch[0])
        if len(batch[0]) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return found


@pytest.fixture
def _small_heap() -> Iterator[None]:
    """Lightning collects garbage before each trial, which takes long where much is imported."""
    gc.freeze()
    yield
    gc.unfreeze()


@feature("Callbacks", "`Tuner.scale_batch_size`: power", "`Tuner.scale_batch_size`: binsearch", "`BatchSizeFinder`")
@pytest.mark.usefixtures("_small_heap")
@pytest.mark.parametrize("limit", [11, 100], ids=["out of memory", "enough memory"])
@pytest.mark.parametrize("way_to_find", ["power", "binsearch", "callback"])
def test_batch_size_scaler(way_to_find: str, limit: int, tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        finder = plc.BatchSizeFinder(steps_per_trial=2, max_trials=4)
        trainer = way.trainer(callbacks=[finder] if way_to_find == "callback" else [], limit_train_batches=4)
        module = Sized(limit)
        if way_to_find != "callback":
            Tuner(trainer).scale_batch_size(module, mode=way_to_find, steps_per_trial=2, max_trials=4)
        trainer.fit(module)
        return {**left(trainer), "tried": module.tried, "size": module.batch_size}

    seen = compare(run, tmp_path)
    assert seen["size"] > 2
    assert (max(seen["tried"]) > limit) == (limit == 11)


@feature("Callbacks", "`StochasticWeightAveraging`, with BatchNorm")
@pytest.mark.parametrize("device", [None, "cpu"])
def test_stochastic_weight_averaging(device: str | None, tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        averaging = plc.StochasticWeightAveraging(0.05, 1, annealing_epochs=2, device=device)
        saver = ModelCheckpoint(way.folder, every_n_train_steps=5, save_top_k=-1)
        data = {"batches": images(16, 2), "val": images(16, 1)}
        seen = way.fit(Images, **data, callbacks=[averaging, saver], enable_checkpointing=True, max_epochs=4)
        return {**seen, "averages": dict(averaging._average_model.state_dict()), "files": files(way.folder)}

    seen = compare(run, tmp_path, LATE)
    assert seen["averages"]
    assert seen["files"]
    assert seen["state"]["net.conv1.1.num_batches_tracked"] > 0


class Averages(plc.WeightAveraging):
    """From the third step on, and after each epoch."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None or (step_idx is not None and step_idx > 1)


@feature("Callbacks", "`WeightAveraging`, on the device and on the CPU", "`EMAWeightAveraging`")
@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("kind", [plc.WeightAveraging, plc.EMAWeightAveraging, Averages])
def test_weight_averaging(kind: Any, device: str | None, tmp_path: Path) -> None:
    """Validation sees the averages; a file has both, and a run resumes with both."""

    def run(way: Way) -> Seen:
        made = partial(kind, device, **({"decay": 0.8} if kind is plc.EMAWeightAveraging else {}))
        saver = ModelCheckpoint(way.folder, "{step}", every_n_train_steps=4, save_top_k=-1)
        data: dict[str, Any] = {"make": Images, "batches": images(16, 3), "val": images(16, 1)}
        options = {"val_check_interval": 2, **data}
        seen = way.fit(**options, callbacks=[made(), saver], enable_checkpointing=True, max_epochs=2)
        found = files(way.folder)
        resumed = way.fit(**options, callbacks=[made()], max_epochs=3, ckpt_path=way.folder / "step=4.ckpt")
        return {"first": seen, "files": found, "resumed": resumed}

    saved = compare(run, tmp_path)["files"]["step=4.ckpt"]
    name = "net.stage3.1.branch2.0.weight"
    assert not torch.equal(saved["current_model_state"][name], saved["state_dict"][name])


@feature("Callbacks", "`GradientAccumulationScheduler`")
def test_accumulation_scheduler(tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        return way.fit(callbacks=[plc.GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})], max_epochs=4)

    assert compare(run, tmp_path)["progress"][0] == 6 + 3 + 2 + 2


class Thaws(plc.BaseFinetuning):
    """Freezes the front, unfreezes a block in each epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.net.stem, *pl_module.net.blocks])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if 0 < epoch < 4:
            self.unfreeze_and_add_param_group(pl_module.net.blocks[4 - epoch], optimizer, lr=5e-3)


@feature("Callbacks", "`BaseFinetuning`")
def test_finetuning(tmp_path: Path) -> None:
    """Blocks are unfrozen in the middle of a fit; a run that resumes has their groups."""

    def run(way: Way) -> Seen:
        saver = ModelCheckpoint(way.folder, "{epoch}", save_top_k=-1)
        seen = way.fit(callbacks=[Thaws(), saver], enable_checkpointing=True, max_epochs=5, batches=2)
        resumed = way.fit(callbacks=[Thaws()], max_epochs=5, batches=2, ckpt_path=way.folder / "epoch=1.ckpt")
        return {"fit": seen, "files": files(way.folder), "resumed": resumed}

    seen = compare(run, tmp_path)["fit"]
    assert len(seen["optimizers"][0]["param_groups"]) == 4
    assert seen["frozen"]["net.stem.weight"]
    assert not seen["frozen"]["net.blocks.2.inner.weight"]


class WithBackbone(Images):
    """A backbone with BatchNorm and a head."""

    def __init__(self) -> None:
        super().__init__()
        found: Any = self.net
        self.backbone = nn.Sequential(found.conv1, found.stage2, found.stage3, found.stage4, found.conv5)
        self.net = nn.Sequential(self.backbone, nn.AdaptiveAvgPool2d(1), nn.Flatten(), found.fc)


@feature("Callbacks", "`BackboneFinetuning`")
@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist:UserWarning")  # BatchNorm's
@pytest.mark.parametrize("train_bn", [True, False])
def test_backbone_finetuning(train_bn: bool, tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        callback = plc.BackboneFinetuning(1, lambda epoch: 1.5, train_bn=train_bn, backbone_initial_ratio_lr=0.1)
        return way.fit(WithBackbone, images(16, 2), images(16, 1), callbacks=[callback], max_epochs=3)

    seen = compare(run, tmp_path)
    assert len(seen["optimizers"][0]["param_groups"]) == 2
    assert not any(seen["frozen"].values())


METHODS: dict[str, dict[str, Any]] = {
    "l1_unstructured": {},
    "random_unstructured": {},
    "ln_structured": {"use_global_unstructured": False, "pruning_dim": 0, "pruning_norm": 2},
}


def prune(way: Way, method: str, lottery: bool) -> Seen:
    callback = plc.ModelPruning(
        method, amount=0.3, use_lottery_ticket_hypothesis=lottery, parameter_names=["weight"], **METHODS[method]
    )
    saver = ModelCheckpoint(way.folder, "{epoch}", save_top_k=-1)
    seen = way.fit(callbacks=[callback, saver], enable_checkpointing=True, max_epochs=3, batches=3)
    return {**seen, "files": files(way.folder)}


@feature("Callbacks", *(f"`ModelPruning`: {method}" for method in METHODS))
@pytest.mark.parametrize("method", METHODS)
def test_pruning(method: str, tmp_path: Path) -> None:
    """Weights are exchanged for masked ones in the middle of a fit."""
    seen = compare(partial(prune, method=method, lottery=False), tmp_path)
    assert (seen["state"]["net.blocks.1.inner.weight"] == 0).float().mean() > 0.2
    assert seen["files"]


def copy_to_another_device(new: nn.Module, old: nn.Module, name: str) -> None:
    """As Lightning's, whose ``.to(device)`` copies where the module is not on the CPU."""
    target = getattr(new, f"{name}_orig", getattr(new, name))
    target.data = getattr(old, name).data.clone()


@feature("Callbacks", "`ModelPruning`: lottery tickets")
def test_lottery_tickets(tmp_path: Path) -> None:
    """Weights go back to what they were when training began, as they do under plain Lightning on a GPU."""
    with mock.patch.object(plc.ModelPruning, "_copy_param", staticmethod(copy_to_another_device)):
        seen = compare(partial(prune, method="l1_unstructured", lottery=True), tmp_path)
    assert (seen["state"]["net.blocks.1.inner.weight"] == 0).float().mean() > 0.2


@feature("Callbacks", "`ModelPruning`: lottery tickets, as plain Lightning draws them on the CPU")
@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="there weights share memory with Lightning's copy of the original ones and training overwrites it; here "
    "`p.data = x` copies",
)
def test_lottery_tickets_that_share_memory(tmp_path: Path) -> None:
    compare(partial(prune, method="l1_unstructured", lottery=True), tmp_path, ["off"])


@feature("Callbacks", "`ModelPruning` on an accelerator (a simulated one)")
@pytest.mark.parametrize("method", METHODS)
def test_pruning_on_a_device_of_its_own(method: str, tmp_path: Path) -> None:
    """The second pruning draws masks from what the last forward has left, and multiplies them with weights."""
    with simulated():
        seen = compare(partial(prune, method=method, lottery=False), tmp_path, ["off"])
    assert (seen["state"]["net.blocks.1.inner.weight"] == 0).float().mean() > 0.2


class Summarized(Net):
    example_input_array = torch.ones(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@feature("Callbacks", "`ModelSummary`, `example_input_array`", "`RichModelSummary`")
@pytest.mark.parametrize("kind", [plc.ModelSummary, plc.RichModelSummary])
def test_summary(
    kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The same table, and the same run after it."""
    monkeypatch.setenv("COLUMNS", "200")
    name = plc.model_summary.__name__

    def run(way: Way) -> Seen:
        caplog.clear()
        capsys.readouterr()
        with caplog.at_level(logging.INFO, name):
            seen = way.fit(Summarized, callbacks=[kind(max_depth=-1)], enable_model_summary=True)
        said = [record.getMessage() for record in caplog.records if record.name == name]
        return {**seen, "table": capsys.readouterr().out if kind is plc.RichModelSummary else said}

    table = str(compare(run, tmp_path)["table"])
    assert "blocks.1.inner" in table
    assert "[4, 32]" in table


@feature("Callbacks", "`DeviceStatsMonitor`")
def test_device_stats(tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        seen = way.fit(callbacks=[plc.DeviceStatsMonitor(cpu_stats=True)])
        lines = seen["logged"][0][0]
        timeless = [(step, {k: v for k, v in line.items() if "cpu" not in k} or list(line)) for step, line in lines]
        return {**seen, "logged": timeless}

    lines = compare(run, tmp_path)["logged"]
    assert any("cpu_percent" in str(line) for _, line in lines)
    assert any("train_loss_step" in line for _, line in lines)


@feature("Callbacks", "`LambdaCallback`")
def test_lambda_callback(tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        values: list[Any] = []

        def note(trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
            values.append((trainer.global_step, middle(pl_module)))

        names = ["setup", "on_fit_start", "on_train_batch_start", "on_train_batch_end", "on_validation_end"]
        seen = way.fit(callbacks=[plc.LambdaCallback(**dict.fromkeys([*names, "on_train_end"], note))])
        assert_changing([value for _, value in values])
        return {**seen, "values": values}

    compare(run, tmp_path)


def assert_changing(values: Sequence[Tensor]) -> None:
    """A sequence that stays as it is would be equal for the wrong reason."""
    assert len(values) > 2
    assert len({bytes(value.flatten().view(torch.uint8).tolist()) for value in values}) > 2


@feature("Callbacks", "`Timer`")
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_timer(interval: str, tmp_path: Path) -> None:
    """By a clock that goes on with each look at it, so that both runs stop at the same batch."""

    def run(way: Way) -> Seen:
        timer = plc.Timer(datetime.timedelta(seconds=10), interval, verbose=False)
        with clock(plc.timer, "monotonic"):
            seen = way.fit(callbacks=[timer], max_epochs=20)
            return {**seen, "elapsed": timer.state_dict(), "start": timer.start_time("train")}

    seen = compare(run, tmp_path)
    assert 2 < seen["progress"][0] < 100


class Writes(plc.BasePredictionWriter):
    def __init__(self, interval: str) -> None:
        super().__init__(interval)
        self.written: list[Any] = []

    def write_on_batch_end(self, *args: Any) -> None:
        self.written.append(["batch", *copy.deepcopy(args[2:])])

    def write_on_epoch_end(self, *args: Any) -> None:
        self.written.append(["epoch", *copy.deepcopy(args[2:])])


@feature("Callbacks", "`BasePredictionWriter`", "`predict(return_predictions=False)`")
@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
def test_prediction_writer(interval: str, tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        writer = Writes(interval)
        trainer = way.trainer(callbacks=[writer])
        wants = interval != "batch"
        found = trainer.predict(Net(), loader(vectors(4)), return_predictions=wants)
        assert (found is None) == (not wants)
        return {"written": writer.written, "predictions": found, "random": torch.get_rng_state()}

    written = compare(run, tmp_path, ["off"])["written"]
    assert len(written) == {"batch": 4, "epoch": 1, "batch_and_epoch": 5}[interval]


@feature("Callbacks", "`ThroughputMonitor`")
def test_throughput(tmp_path: Path) -> None:
    class Measured(Net):
        flops_per_batch = 1000

    def run(way: Way) -> Seen:
        monitor = plc.ThroughputMonitor(len, lambda batch: batch.shape[1], window_size=3)
        with clock(plc.throughput_monitor, "perf_counter"):
            return way.fit(Measured, callbacks=[monitor], accumulate_grad_batches=2, val_check_interval=3)

    lines = compare(run, tmp_path)["logged"][0][0]
    assert any("train/device/samples_per_sec" in name for _, line in lines for name in line)


@feature("Callbacks", "`SpikeDetection`")
@pytest.mark.parametrize("spike", [False, True])
def test_spike_detection(spike: bool, tmp_path: Path) -> None:
    batches = list(vectors(6))
    batches[4] = batches[4] * (1000 if spike else 1)

    def run(way: Way) -> Seen:
        detection = plc.SpikeDetection(exclude_batches_path=way.folder / "bad.json", atol=1.0)
        trainer = way.trainer(callbacks=[detection])
        module = Net()
        try:
            trainer.fit(module, loader(batches), loader(vectors(1)))
            error = ""
        except RuntimeError as found:
            error = str(found)
        return {
            "error": error, "state": dict(module.state_dict()), "detection": detection.state_dict(),
            "bad": [json.loads(path.read_text()) for path in way.folder.glob("*.json")], "step": trainer.global_step,
        }  # fmt: skip

    seen = compare(run, tmp_path)
    assert bool(seen["error"]) == bool(seen["bad"]) == spike


def shown_by(kind: Any, shown: list[Any]) -> Any:
    """A progress bar that notes the metrics that it shows."""

    class Noting(kind):
        def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
            found = super().get_metrics(trainer, pl_module)
            shown.append(dict(found))
            return found

    return Noting(refresh_rate=1)


@feature("Callbacks", "`TQDMProgressBar`", "`RichProgressBar`")
@pytest.mark.parametrize("kind", [plc.TQDMProgressBar, plc.RichProgressBar])
def test_progress_bars(kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(way: Way) -> Seen:
        shown: list[Any] = []
        bar = shown_by(kind, shown)
        seen = way.fit(callbacks=[bar], enable_progress_bar=True, num_sanity_val_steps=1)
        return {**seen, "shown": shown}

    shown = compare(run, tmp_path, ["forward"])["shown"]
    assert len({each.get("train_loss_step") for each in shown}) > 3
    assert "val_loss" in shown[-1]


# ---------------------------------------------------------------------- loggers and profilers


@feature(LOGGING, "`CSVLogger`")
def test_csv_logger(tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        logger = CSVLogger(way.folder, "csv", 0, flush_logs_every_n_steps=1)
        seen = way.fit(partial(WithExtras, 4), logger=logger, max_epochs=2)
        with (way.folder / "csv/version_0/metrics.csv").open() as lines:
            rows = [sorted((name, value) for name, value in row.items() if value) for row in csv.DictReader(lines)]
        hparams = dict(load_hparams_from_yaml(way.folder / "csv/version_0/hparams.yaml"))
        return {**seen, "rows": rows, "hparams": hparams}

    seen = compare(run, tmp_path)
    assert len(seen["rows"]) > 10
    assert seen["hparams"] == {"depth": 4, "rate": 1e-2}


class Drawn(Summarized):
    """Logs more than numbers."""

    def on_train_epoch_end(self) -> None:
        self.logger.experiment.add_histogram("weights", middle(self), self.current_epoch)


def board(way: Way, *, graph: bool) -> Seen:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(way.folder, "board", 0, log_graph=graph)
    seen = way.fit(Drawn, logger=logger, max_epochs=2)
    logger.experiment.flush()
    events = reader.EventAccumulator(logger.log_dir, {"scalars": 0, "histograms": 0, "graph": 1}).Reload()
    scalars = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in sorted(events.Tags()["scalars"])
    }
    histograms = [(each.step, list(each.histogram_value.bucket)) for each in events.Histograms("weights")]
    nodes = sorted((node.name, node.op, tuple(node.input)) for node in events.Graph().node) if graph else []
    return {**seen, "scalars": scalars, "graph": nodes, "histograms": histograms}


@feature(LOGGING, "`TensorBoardLogger`")
def test_tensorboard_logger(tmp_path: Path) -> None:
    seen = compare(partial(board, graph=False), tmp_path)
    assert len(seen["scalars"]["train_loss_step"]) == 12
    assert seen["histograms"][0] != seen["histograms"][1]


@feature(LOGGING, "`TensorBoardLogger(log_graph=True)`")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace.*` is deprecated")
@pytest.mark.xfail(
    strict=True,
    raises=RuntimeError,
    reason="refused by name: a trace would hold memory through which other layers pass",
)
def test_tensorboard_graph(tmp_path: Path) -> None:
    assert len(compare(partial(board, graph=True), tmp_path, ["off"])["graph"]) > 20


PROFILERS: dict[str, Callable[[Path], Any]] = {
    "simple": lambda folder: SimpleProfiler(folder, "profile", extended=True),
    "advanced": lambda folder: AdvancedProfiler(folder, "profile"),
    "pytorch": lambda folder: PyTorchProfiler(
        folder, "profile", export_to_chrome=False, schedule=torch.profiler.schedule(wait=0, warmup=1, active=2),
        with_stack=False,
    ),
}  # fmt: skip


@feature(LOGGING, *(f"profiler: {name}" for name in PROFILERS))
@pytest.mark.filterwarnings("ignore:Profiler.*:UserWarning", "ignore:.*profiler.*:UserWarning")
@pytest.mark.parametrize("name", PROFILERS)
def test_profilers(name: str, tmp_path: Path) -> None:
    """What is timed is the same, but for the strategy's name and our callback."""

    def run(way: Way) -> Seen:
        profiler = PROFILERS[name](way.folder)
        seen = way.fit(profiler=profiler)
        tables = way.folder.glob("fit-*.txt") if name != "pytorch" else ()  # whose table has the longest only
        profile = "".join(path.read_text() for path in tables)
        timed = sorted(set(re.findall(r"\[[A-Z][A-Za-z]+\][A-Za-z]+(?:\{[^}]*\})?\.\w+", profile)))
        timed = [each.replace("SuperpipelineStrategy", "SingleDeviceStrategy") for each in timed]
        written = [path.name for path in way.folder.iterdir() if path.stat().st_size]
        return {**seen, "timed": [each for each in timed if "SuperpipelineCallback" not in each], "files": written}

    seen = compare(run, tmp_path, LATE)
    assert seen["files"]
    assert name == "pytorch" or "[Strategy]SingleDeviceStrategy.training_step" in seen["timed"]


# ---------------------------------------------------------------------- loops and flags

FLAGS: dict[str, dict[str, Any]] = {
    "limit_train_batches, limit_val_batches": {"limit_train_batches": 4, "limit_val_batches": 0.5},
    "overfit_batches": {"overfit_batches": 2},
    "fast_dev_run": {"fast_dev_run": 3},
    "val_check_interval": {"val_check_interval": 2},
    "val_check_interval, fraction": {"val_check_interval": 0.5, "accumulate_grad_batches": 2},
    "check_val_every_n_epoch": {"check_val_every_n_epoch": 2, "max_epochs": 4},
    "check_val_every_n_epoch=None": {"check_val_every_n_epoch": None, "val_check_interval": 4, "max_epochs": 3},
    "max_steps": {"max_steps": 8, "max_epochs": -1},
    "min_epochs": {"min_epochs": 3, "max_epochs": 5, "callbacks": ["stops"]},
    "min_steps": {"min_steps": 9, "max_epochs": 5, "callbacks": ["stops"]},
    "num_sanity_val_steps": {"num_sanity_val_steps": 2},
    "num_sanity_val_steps=-1": {"num_sanity_val_steps": -1},
    "detect_anomaly": {"detect_anomaly": True},
    "barebones": {"barebones": True, "logger": None, "log_every_n_steps": None},
    "deterministic": {"deterministic": True},
    "benchmark": {"benchmark": True},
    "sync_batchnorm": {"sync_batchnorm": True},
    "use_distributed_sampler": {"use_distributed_sampler": False},
    "accumulate_grad_batches": {"accumulate_grad_batches": 4},
    "log_every_n_steps": {"log_every_n_steps": 4},
    "inference_mode=False": {"inference_mode": False},
    "enable_autolog_hparams=False": {"enable_autolog_hparams": False},
}


@pytest.fixture
def _as_before() -> Iterator[None]:
    """Some flags are switches of torch's."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False
    torch.autograd.set_detect_anomaly(False)


class StopsAt(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.should_stop = True


@feature("Loops and flags", *(f"`{name}`" for name in FLAGS), "`trainer.should_stop`")
@pytest.mark.usefixtures("_as_before")
@pytest.mark.filterwarnings("ignore:.*Anomaly Detection has been enabled.*:UserWarning")
@pytest.mark.parametrize("name", FLAGS)
def test_flags(name: str, tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        options: dict[str, Any] = {"max_epochs": 2, **FLAGS[name]}
        steps: list[Tensor] = []
        if name != "barebones":
            callbacks = [StopsAt()] if "callbacks" in options else []
            watch = Does(on_validation_batch_end=lambda trainer, module, *_: steps.append(middle(module)))
            options["callbacks"] = [*callbacks, watch]
        seen = way.fit(Quiet if name == "barebones" else Net, val=4, **options)
        return {**seen, "steps": steps}

    seen = compare(run, tmp_path)
    assert seen["progress"][0] > 1
    assert seen["steps"] or name == "barebones"


@feature("Loops and flags", "`max_time`")
def test_max_time(tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        with clock(plc.timer, "monotonic"):
            return way.fit(max_time={"seconds": 10}, max_epochs=20)

    assert 2 < compare(run, tmp_path)["progress"][0] < 100


class Reloads(Net):
    """Has other data in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[int] = []

    def train_dataloader(self) -> Any:
        self.loaded.append(self.trainer.current_epoch)
        return loader([x + self.trainer.current_epoch for x in vectors(3)])

    def val_dataloader(self) -> Any:
        return loader(vectors(2))


@feature("Loops and flags", "`reload_dataloaders_every_n_epochs`")
def test_reloaded_data(tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        trainer = way.trainer(max_epochs=4, reload_dataloaders_every_n_epochs=2)
        module = Reloads()
        trainer.fit(module)
        return {**left(trainer), "loaded": module.loaded}

    assert compare(run, tmp_path)["loaded"] == [0, 2]


class Several(Net):
    """Batches of several loaders."""

    def loss(self, batch: Any) -> Tensor:
        parts = [each for each in (batch.values() if isinstance(batch, dict) else [batch]) if each is not None]
        return torch.stack([super(Several, self).loss(each) for each in parts]).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), batch_size=4)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.loss(batch) * (dataloader_idx + 1)


def several() -> dict[str, Any]:
    first, second = vectors(5), [x * 2 for x in vectors(3)]
    return {"first": loader(first), "second": loader(second)}


COMBINED = ("min_size", "max_size", "max_size_cycle", "sequential")


@feature("Loops and flags", *(f"`CombinedLoader`: {mode}" for mode in COMBINED))
@pytest.mark.parametrize("mode", COMBINED)
def test_combined_loaders(mode: Any, tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        trainer = way.trainer()
        module = Several()
        training: Any = loader(vectors(3)) if mode == "sequential" else CombinedLoader(several(), mode)
        trainer.fit(module, training, CombinedLoader(several(), mode))
        tested = trainer.test(module, CombinedLoader(several(), mode), verbose=False)
        predicted = trainer.predict(module, CombinedLoader(several(), "sequential"))  # which alone it takes
        return {"tested": tested, "predicted": predicted, **left(trainer)}

    seen = compare(run, tmp_path)
    assert seen["tested"][0]
    assert seen["predicted"]
    steps = {"min_size": 3, "max_size": 5, "max_size_cycle": 5, "sequential": 3}
    assert seen["progress"][0] == steps[mode]


@feature("Loops and flags", "several validation, test and predict loaders")
def test_several_loaders(tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        trainer = way.trainer(max_epochs=2)
        module = Several()
        loaders = list(several().values())
        trainer.fit(module, loader(vectors(3)), loaders)
        validated = trainer.validate(module, loaders, verbose=False)
        tested = trainer.test(module, loaders, verbose=False)
        return {"values": [validated, tested, trainer.predict(module, loaders)], **left(trainer)}

    seen = compare(run, tmp_path)
    assert len(seen["values"][0]) == 2
    assert len(seen["values"][2]) == 2


@feature("Loops and flags", "`limit_test_batches`, `limit_predict_batches`")
def test_limits_of_other_loops(tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        trainer = way.trainer(limit_test_batches=2, limit_predict_batches=0.5)
        module = Net()
        tested = trainer.test(module, loader(vectors(6)), verbose=False)
        return {"tested": tested, "predicted": trainer.predict(module, loader(vectors(6)))}

    assert len(compare(run, tmp_path, ["off"])["predicted"]) == 3


class Streamed(IterableDataset):
    """Has no length."""

    def __iter__(self) -> Iterator[Any]:
        for x in vectors(5):
            yield x + torch.rand(())


@feature("Loops and flags", "`IterableDataset`")
@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}, {"limit_train_batches": 3}], ids=str)
def test_iterable_data(options: dict[str, Any], tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        trainer = way.trainer(max_epochs=2, **options)
        trainer.fit(Net(), DataLoader(Streamed(), batch_size=None), DataLoader(Streamed(), batch_size=None))
        return left(trainer)

    assert compare(run, tmp_path)["progress"][0] == (6 if "limit_train_batches" in options else 10)


class Skips(Net):
    """Leaves out batches and losses."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.how == "epoch" and batch_idx == 2 else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.how == "loss" and batch_idx in (1, 2) else loss


@feature("Loops and flags", "`on_train_batch_start` returns -1", "`training_step` returns None")
@pytest.mark.filterwarnings("ignore:.*returned `None`:UserWarning")
@pytest.mark.parametrize("how", ["epoch", "loss"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_skipped(how: str, accumulate: int, tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        return way.fit(partial(Skips, how), max_epochs=2, accumulate_grad_batches=accumulate)

    seen = compare(run, tmp_path)
    assert (
        seen["progress"][0] == {("epoch", 1): 4, ("epoch", 2): 2, ("loss", 1): 8 + 4, ("loss", 2): 6}[how, accumulate]
    )


@feature("Loops and flags", "fit → validate → test → predict", "`inference_mode` on and off")
@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("name", ["stack", "gpt2-tied", "resnet50"])
def test_all_loops(name: str, inference_mode: bool, tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        trainer = way.trainer(inference_mode=inference_mode)
        case = CASES[name]
        module = fused(case.make)()
        inference: list[bool] = []
        handle = module.net.register_forward_hook(lambda *_: inference.append(torch.is_inference_mode_enabled()))
        trainer.fit(module, loader(case.batches()), loader(case.batches()[:1]))
        validated = trainer.validate(module, loader(case.batches()), verbose=False)
        tested = trainer.test(module, loader(case.batches()[1:]), verbose=False)
        predicted = trainer.predict(module, loader(case.batches()))
        handle.remove()
        outside = module.predict_step(case.batches()[0], 0).detach()
        values = [validated, tested, predicted, outside]
        return {"values": values, "inference": inference, **left(trainer)}

    seen = compare(run, tmp_path, LATE)
    assert any(seen["inference"]) == inference_mode
    assert all(len(each) for each in seen["values"])


# ---------------------------------------------------------------------- optimization


@feature("Optimization", "`gradient_clip_val`, both algorithms")
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(algorithm: str, tmp_path: Path) -> None:
    limit = {"norm": 0.01, "value": 1e-4}[algorithm]

    def run(way: Way) -> Seen:
        return way.fit(gradient_clip_val=limit, gradient_clip_algorithm=algorithm)

    clipped = compare(run, tmp_path, LATE)
    with pytest.raises(AssertionError, match="differ"):
        assert_equal(clipped["state"], Way(tmp_path / "unclipped", None).fit()["state"], "state")


class Clips(Net):
    """Clips in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.trainer.global_step % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="norm")
        else:
            self.norms.append(nn.utils.clip_grad_norm_(self.net.blocks.parameters(), 0.01))
            nn.utils.clip_grad_value_(self.net.head.parameters(), 1e-4)


@feature("Optimization", "`configure_gradient_clipping` override")
def test_clipping_of_ones_own(tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        trainer = way.trainer()
        module = Clips()
        trainer.fit(module, loader(vectors(6)))
        return {**left(trainer), "norms": module.norms}

    norms = compare(run, tmp_path, LATE)["norms"]
    assert len(norms) == 3
    assert all(norm > 0.01 for norm in norms)


KINDS = ("epoch", "step", "plateau", "plateau, step", "one cycle", "sequential")


@feature("Optimization", *(f"learning-rate schedulers: {kind}" for kind in KINDS))
@pytest.mark.parametrize("kind", KINDS)
def test_schedulers(kind: str, tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        rates: list[float] = []
        watch = Does(on_train_batch_end=lambda trainer, *_: rates.append(trainer.optimizers[0].param_groups[0]["lr"]))
        seen = way.fit(partial(Scheduled, kind), callbacks=[watch], max_epochs=3)
        return {**seen, "rates": rates}

    assert len(set(compare(run, tmp_path)["rates"])) > 1


class StepsItself(Net):
    """Manual optimization: accumulation, clipping and schedulers by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, schedulers = self.optimizers(), self.lr_schedulers()
        every_step, plateau = schedulers  # type: ignore[misc]
        loss = self.loss(batch)
        self.log("train_loss", loss)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.02, "norm")
            optimizer.step()
            optimizer.zero_grad()
            every_step.step()
        if self.trainer.is_last_batch:
            plateau.step(loss.detach())

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedulers = torch.optim.lr_scheduler
        return [optimizer], [
            schedulers.ExponentialLR(optimizer, 0.9),
            schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9),
        ]


@feature("Optimization", "manual optimization, schedulers stepped by hand")
def test_manual_optimization(tmp_path: Path) -> None:
    seen = compare(lambda way: way.fit(StepsItself, max_epochs=3), tmp_path, LATE)
    assert seen["optimizers"][0]["param_groups"][0]["lr"] < 1e-2
    assert seen["progress"][0] == 9


class Frequencies(Gan):
    """The critic learns in each batch, the generator in every third, in both of the ways that there are to toggle."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        seen = self.__dict__.setdefault("toggled", [])
        with second.toggle_model(sync_grad=True):
            seen.append([p.requires_grad for p in self.parameters()])
            loss = self.discriminator(batch).mean() - self.discriminator(self.generator(batch).detach()).mean()
            self.log("critic", loss)
            second.zero_grad()
            self.manual_backward(loss)
            second.step()
        if batch_idx % 3 == 0:
            self.toggle_optimizer(first)
            seen.append([p.requires_grad for p in self.parameters()])
            loss = -self.discriminator(self.generator(batch)).mean()
            self.log("generator", loss)
            first.zero_grad()
            self.manual_backward(loss)
            first.step()
            self.untoggle_optimizer(first)
        seen.append([p.requires_grad for p in self.parameters()])

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-3, fused=True),
            torch.optim.SGD(self.discriminator.parameters(), lr=1e-2, momentum=0.9, fused=True),
        ]


@feature("Optimization", "several optimizers: `toggle_optimizer`, `toggle_model`, frequencies by hand")
@pytest.mark.parametrize("make", [Gan, Frequencies])
def test_several_optimizers(make: Any, tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        trainer = way.trainer(max_epochs=2)
        module = make()
        trainer.fit(module, loader(vectors(6)), loader(vectors(1)))
        return {**left(trainer), "toggled": vars(module).get("toggled", [])}

    seen = compare(run, tmp_path, ["off"] if make is Gan else LATE)
    assert len(seen["optimizers"]) == 2
    if make is Frequencies:
        assert len({tuple(each) for each in seen["toggled"]}) == 3


@feature("Optimization", "closures that are called many times (LBFGS)")
def test_lbfgs(tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        calls: list[int] = []

        class Counted(Lbfgs):
            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                calls.append(batch_idx)
                return super().training_step(batch, batch_idx)

        return {**way.fit(lambda: Counted(Stack(3)), batches=3), "calls": calls}

    assert len(compare(run, tmp_path, ["off"])["calls"]) > 6


class StepsInItsOwnWay(Net):
    """Overrides whatever is around a step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.losses: list[Any] = []

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.how == "backward":
            (loss * 2).backward(retain_graph=True)
            loss.backward()
        else:
            super().backward(loss, *args, **kwargs)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.how == "warm-up":
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (1 + self.trainer.global_step)
        if self.how == "skipped" and batch_idx % 2:
            self.losses.append(optimizer_closure())
        elif self.how == "closure first":
            loss = optimizer_closure()
            self.losses.append(loss.detach().clone())
            optimizer.step()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if self.how == "zeros":
            optimizer.zero_grad(set_to_none=False)
        elif self.how != "kept" or batch_idx % 2 == 0:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)


OVERRIDES = {
    "backward": "`backward` override",
    "warm-up": "`optimizer_step` override",
    "skipped": "`optimizer_step` that skips steps",
    "closure first": "`optimizer_step` that calls the closure itself",
    "zeros": "`optimizer_zero_grad(set_to_none=False)`",
    "kept": "`optimizer_zero_grad` that keeps gradients",
}


@feature("Optimization", *OVERRIDES.values())
@pytest.mark.parametrize("how", OVERRIDES)
def test_overrides(how: str, tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        trainer = way.trainer()
        module = StepsInItsOwnWay(how)
        trainer.fit(module, loader(vectors(6)))
        gradients = {name: p.grad for name, p in module.named_parameters()}
        return {**left(trainer), "losses": module.losses, "gradients": gradients}

    seen = compare(run, tmp_path, LATE)
    assert all(gradient is not None for gradient in seen["gradients"].values())
    if how not in ("closure first", "zeros"):  # other ways to the same end
        with pytest.raises(AssertionError):
            assert_equal(seen["state"], Way(tmp_path / "without", None).fit(val=1)["state"], "state")


class Metrics(Classifier, Net):
    """Module attributes and a collection, logged as metrics and by their values."""

    def __init__(self) -> None:
        Net.__init__(self, CASES["vit"].make().net)
        kinds = torchmetrics.classification
        self.accuracy = kinds.MulticlassAccuracy(5)
        self.mean = torchmetrics.MeanMetric()
        self.collection = torchmetrics.MetricCollection(
            [kinds.MulticlassPrecision(5), kinds.MulticlassRecall(5), kinds.MulticlassF1Score(5)], prefix="val_"
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.net(batch[0])
        loss = F.cross_entropy(outputs, batch[1])
        self.accuracy(outputs, batch[1])
        self.mean(loss)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.collection.update(self.net(batch[0]), batch[1])
        self.log_dict(self.collection, batch_size=4)

    def on_validation_epoch_end(self) -> None:
        self.log_dict({f"{name}_sum": value for name, value in self.collection.compute().items()})


@feature(LOGGING, "torchmetrics: attributes, `MetricCollection`")
def test_metrics(tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        trainer = way.trainer(max_epochs=3)
        module = Metrics()
        trainer.fit(module, loader(images(16, 4)), loader(images(16, 3)))
        states = [{key: getattr(each, key) for key in each._defaults} for each in (module.accuracy, module.mean)]
        return {**left(trainer), "states": states}

    logged = compare(run, tmp_path)["logged"][0][0]
    assert len({line["accuracy_step"] for _, line in logged if "accuracy_step" in line}) > 1
    assert any("val_MulticlassF1Score" in line for _, line in logged)


# ---------------------------------------------------------------------- hooks

LOOKS = (
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end",
    "on_validation_batch_start", "on_validation_batch_end", "on_train_end",
)  # fmt: skip


class Looks(Callback):
    """Notes all weights and gradients in every hook, and what kind of tensors they are."""

    def __init__(self, hooks: Sequence[str], gradients: bool) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.gradients = gradients
        for hook in hooks:
            setattr(self, hook, partial(self._look, hook))

    def _look(self, hook: str, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen.append((hook, {name: self._noted(p) for name, p in pl_module.named_parameters()}))

    def _noted(self, p: Tensor) -> list[Any]:
        kind = [
            isinstance(p, nn.Parameter),
            p.is_leaf,
            p.requires_grad,
            str(p.device),
            str(p.dtype),
            p.shape,
            p.stride(),
        ]
        gradient = p.grad if self.gradients else None
        noted = None if gradient is None else [gradient.clone(), str(gradient.device), str(gradient.dtype)]
        return [p.detach().clone(), kind, noted]


@feature("Hooks", "weights and gradients, read in every hook of a step")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["stack", "llama-dropout"])
def test_what_hooks_see(name: str, accumulate: int, tmp_path: Path) -> None:
    case = CASES[name]

    def run(way: Way) -> Seen:
        looks = Looks(LOOKS, gradients=True)
        options = {"callbacks": [looks], "accumulate_grad_batches": accumulate, "max_epochs": 2}
        seen = way.fit(fused(case.make), case.batches(), case.batches()[:1], **options)
        return {**seen, "looks": looks.seen}

    looks = compare(run, tmp_path, LATE)["looks"]
    assert {hook for hook, _ in looks} == set(LOOKS)
    first = next(iter(looks[0][1]))
    for hook in ("on_train_batch_start", "on_before_optimizer_step"):
        assert_changing([values[first][0] for each, values in looks if each == hook])
    gradients = [values[first][2] for hook, values in looks if hook == "on_after_backward"]
    assert_changing([gradient[0] for gradient in gradients])


@feature("Hooks", "weights, read between batches that are updated under backward")
def test_what_hooks_see_of_early_updates(tmp_path: Path) -> None:
    hooks = [hook for hook in LOOKS if "zero_grad" not in hook and "backward" not in hook and "optimizer" not in hook]

    def run(way: Way) -> Seen:
        looks = Looks(hooks, gradients=False)
        seen = way.fit(callbacks=[looks], max_epochs=2)
        return {**seen, "looks": looks.seen}

    looks = compare(run, tmp_path)["looks"]
    assert_changing([values["net.blocks.1.inner.weight"][0] for hook, values in looks if hook == "on_train_batch_end"])


class Changes(Callback):
    """Writes weights, gradients, buffers and the optimizer's state in a hook."""

    def __init__(self, hook: str, what: str) -> None:
        self.what = what
        setattr(self, hook, self._change)

    @torch.no_grad()
    def _change(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for index, p in enumerate(pl_module.parameters()):
            if self.what == "weights":
                p.mul_(0.99)
            elif self.what == "data":
                p.data.add_(1e-3 * index)
            elif self.what == "gradients" and p.grad is not None:
                p.grad.add_(torch.rand_like(p.grad), alpha=1e-2)
            elif self.what == "optimizer":
                for state in trainer.optimizers[0].state.values():
                    state["exp_avg"].mul_(0.9)


CHANGES = [
    *((hook, what) for hook in LOOKS if hook != "on_train_end" for what in ("weights", "data")
      if what == "data" or hook not in ("on_before_backward", "on_before_zero_grad")),  # autograd refuses those
    ("on_after_backward", "gradients"), ("on_before_optimizer_step", "gradients"),
    ("on_train_batch_start", "optimizer"), ("on_train_batch_end", "optimizer"), ("on_train_epoch_end", "optimizer"),
]  # fmt: skip


@feature("Hooks", "weights, gradients and optimizer state, written in hooks")
@pytest.mark.parametrize(("hook", "what"), CHANGES)
def test_what_hooks_write(hook: str, what: str, tmp_path: Path) -> None:
    overlaps = LATE if "zero_grad" in hook or "backward" in hook or "optimizer" in hook else EVERY
    seen = compare(
        lambda way: way.fit(callbacks=[Changes(hook, what)], max_epochs=2, batches=3, val=1), tmp_path, overlaps
    )
    if hook != "on_train_start":
        untouched = Way(tmp_path / "untouched", None).fit(max_epochs=2, batches=3, val=1)
        with pytest.raises(AssertionError, match="differ"):
            assert_equal(seen["state"], untouched["state"], "state")


def noting(owner: type, names: Sequence[str], label: str, noted: list[Any]) -> Any:
    """A subclass in which every hook notes its name and, in a module, a weight."""

    def wrap(name: str) -> Any:
        inherited = getattr(owner, name)

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            noted.append((f"{label}.{name}", middle(self) if isinstance(self, nn.Module) else None))
            return inherited(self, *args, **kwargs)

        hook.__signature__ = inspect.signature(inherited)  # type: ignore[attr-defined]
        return hook

    return type(f"Noting{owner.__name__}", (owner,), {name: wrap(name) for name in names})


def hooks_of(*owners: type) -> list[str]:
    return sorted(
        {
            name
            for owner in owners
            for name, value in vars(owner).items()
            if inspect.isfunction(value) and name[0] != "_"
        }
        - {"configure_sharded_model", "state_key"}
    )


OF_MODULES = [
    *hooks_of(ModelHooks, DataHooks, CheckpointHooks), "training_step", "validation_step", "test_step", "predict_step",
    "configure_optimizers", "configure_callbacks", "backward", "optimizer_step", "optimizer_zero_grad",
    "lr_scheduler_step", "configure_gradient_clipping",
]  # fmt: skip


class WithData(Scheduled):
    def __init__(self) -> None:
        super().__init__("epoch")

    def train_dataloader(self) -> Any:
        return loader(vectors(3))

    def val_dataloader(self) -> Any:
        return loader(vectors(2))

    test_dataloader = predict_dataloader = val_dataloader


@feature("Hooks", "all hooks of modules and callbacks: order, and weights at each")
def test_order_of_hooks(tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        noted: list[Any] = []
        callback = noting(Callback, hooks_of(Callback), "callback", noted)()
        saver = ModelCheckpoint(way.folder, "one", every_n_train_steps=2)
        options = {"max_epochs": 2, "accumulate_grad_batches": 2, "num_sanity_val_steps": 1}
        trainer = way.trainer(callbacks=[callback, saver], enable_checkpointing=True, **options)
        module = noting(WithData, OF_MODULES, "module", noted)()
        trainer.fit(module)
        trainer.validate(module, verbose=False)
        trainer.test(module, verbose=False)
        predicted = trainer.predict(module)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, ckpt_path=way.folder / "one.ckpt")
        return {**left(trainer), "hooks": noted, "predicted": predicted}

    hooks = compare(run, tmp_path, LATE)["hooks"]
    names = {name for name, _ in hooks}
    assert {f"module.{name}" for name in OF_MODULES} - names <= {"module.on_exception"}
    assert len(names) > 90
    assert_changing([weight for _, weight in hooks if weight is not None])


class Data(pl.LightningDataModule):
    """All hooks that there are, each seen, and a state."""

    def __init__(self, noted: list[Any]) -> None:
        super().__init__()
        self.save_hyperparameters({"size": 4})
        self.noted = noted
        self.given = 0

    def _note(self, name: str, *more: Any) -> None:
        self.noted.append((name, *more))

    def prepare_data(self) -> None:
        self._note("prepare_data")

    def setup(self, stage: str) -> None:
        self._note("setup", str(stage))
        self.batches = vectors(5)

    def teardown(self, stage: str) -> None:
        self._note("teardown", str(stage))

    def train_dataloader(self) -> Any:
        self._note("train_dataloader")
        return DataLoader(TensorDataset(torch.cat(list(self.batches))), batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        self._note("val_dataloader")
        return DataLoader(TensorDataset(torch.cat(list(self.batches[:2]))), batch_size=4)

    test_dataloader = predict_dataloader = val_dataloader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.given += 1
        self._note("before", batch[0].clone())
        return batch[0] + 1

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self._note("transfer", str(device))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self._note("after", batch.clone())
        return batch + torch.rand(())

    def on_exception(self, exception: BaseException) -> None:
        self._note("exception", str(exception))

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._note("load_state_dict", state_dict)
        self.given = state_dict["given"]


@feature("Hooks", "`LightningDataModule`, all hooks")
def test_data_module(tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        noted: list[Any] = []
        saver = ModelCheckpoint(way.folder, "one", every_n_train_steps=3)
        trainer = way.trainer(callbacks=[saver], enable_checkpointing=True, max_epochs=2)
        module, data = Net(), Data(noted)
        trainer.fit(module, datamodule=data)
        values = [trainer.validate(module, data, verbose=False), trainer.test(module, data, verbose=False)]
        values.append(trainer.predict(module, data))
        resumed = way.trainer(max_epochs=3, callbacks=[Fails("after")])
        with fails("after"):
            resumed.fit(Net(), datamodule=Data(noted), ckpt_path=way.folder / "one.ckpt")
        return {**left(trainer), "noted": noted, "values": values, "resumed": left(resumed)}

    noted = compare(run, tmp_path)["noted"]
    assert {"exception", "load_state_dict", "teardown"} <= {each[0] for each in noted}


# ---------------------------------------------------------------------- precision


def in_precision(precision: str, make: Callable[[], pl.LightningModule]) -> Callable[[], pl.LightningModule]:
    """Made in it; AdamW's ``eps`` is none in float16."""
    kind = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}.get(precision)
    if kind is None:
        return make

    def made() -> pl.LightningModule:
        module = make().to(kind)
        configure: Any = module.configure_optimizers

        def configured() -> Any:
            optimizer = configure()
            optimizer.param_groups[0]["eps"] = 1e-3
            return optimizer

        module.configure_optimizers = configured  # type: ignore[method-assign]
        return module

    return made


PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")


@feature("Precision", *(f"`{precision}`" for precision in PRECISIONS))
@pytest.mark.parametrize("name", ["stack", "llama-dropout"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision(precision: str, name: str, tmp_path: Path) -> None:
    case = CASES[name]

    def run(way: Way) -> Seen:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
        options: dict[str, Any] = (
            {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}
            if precision == "16-mixed"
            else {"precision": precision}
        )
        saver = ModelCheckpoint(way.folder, "one", every_n_train_steps=4)
        dtypes: list[str] = []
        options |= {"callbacks": [saver], "enable_checkpointing": True, "max_epochs": 2}
        trainer = way.trainer(**options)
        with trainer.init_module():
            module = in_precision(precision, fused(case.make))()
        module.net.register_forward_hook(
            lambda _, args, kwargs, output: dtypes.append(str(getattr(output, "logits", output).dtype)),
            with_kwargs=True,
        )
        trainer.fit(module, loader(case.batches()), loader(case.batches()[:1]))
        predicted = trainer.predict(module, loader(case.batches()[:1]))
        return {**left(trainer), "dtypes": dtypes, "predicted": predicted, "files": files(way.folder)}

    overlaps = LATE if precision == "16-mixed" else EVERY
    seen = compare(run, tmp_path, overlaps)
    wanted = {"32": "torch.float32", "bf16": "torch.bfloat16", "16": "torch.float16", "64": "torch.float64"}
    assert set(seen["dtypes"]) == {wanted[precision.split("-")[0]]}
    assert all(value.isfinite().all() for value in seen["state"].values())
    assert seen["files"]


# ---------------------------------------------------------------------- set-up and data


@feature("Set-up and data", "`Trainer.init_module`", "`init_module(empty_init=True)`")
@pytest.mark.parametrize("empty", [False, True])
def test_init_module(empty: bool, tmp_path: Path) -> None:
    """Random numbers are drawn as ever; without them weights come from a checkpoint."""
    pl.seed_everything(3, verbose=False)
    weights = Net().state_dict()

    def run(way: Way) -> Seen:
        trainer = way.trainer()
        with trainer.init_module(empty_init=empty):
            module = Net()
        drawn = torch.get_rng_state()
        devices = {str(p.device) for p in module.parameters()}
        if empty:
            module.load_state_dict(weights)
        trainer.fit(module, loader(vectors(6)))
        return {**left(trainer), "drawn": drawn, "devices": sorted(devices)}

    seen = compare(run, tmp_path)
    assert torch.equal(seen["drawn"], torch.Generator().manual_seed(7).get_state()) == empty


class Configured(Net):
    """Makes its layers when it is asked to, once."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.example_input_array = torch.ones(4, 16)

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            self.net = Stack(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@feature("Set-up and data", "`configure_model`")
def test_configure_model(tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        trainer = way.trainer(max_epochs=2)
        module = Configured()
        trainer.fit(module, loader(vectors(6)), loader(vectors(1)))
        trainer.save_checkpoint(way.folder / "one.ckpt")
        loaded = Configured.load_from_checkpoint(way.folder / "one.ckpt", weights_only=False)
        fresh = way.trainer()
        tested = fresh.test(Configured(), loader(vectors(2)), ckpt_path=way.folder / "one.ckpt", verbose=False)
        assert loaded.state_dict()
        return {**left(trainer), "loaded": dict(loaded.state_dict()), "tested": tested}

    assert compare(run, tmp_path)["tested"][0]["test_loss"]


@feature("Set-up and data", "`Trainer.fit` twice on one trainer")
@pytest.mark.parametrize("other", [False, True], ids=["same module", "another module"])
def test_fit_twice(other: bool, tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        trainer = way.trainer(max_epochs=1)
        first = Net()
        trainer.fit(first, loader(vectors(4)), loader(vectors(1)))
        between = left(trainer)
        second = Net(Stack(6)) if other else first
        trainer.fit_loop.max_epochs = 3
        trainer.fit(second, loader(vectors(4)), loader(vectors(1)))
        return {"between": between, **left(trainer, first)}

    seen = compare(run, tmp_path)
    assert seen["progress"][:2] == [12, 3]
    assert len(seen["state"]) > len(seen["more"][0]) or not other


@feature("Set-up and data", "one module on two trainers: plain after ours, ours after plain, ours after ours")
@pytest.mark.parametrize("fits", ["ours, plain", "plain, ours", "ours, ours"])
def test_one_module_on_two_trainers(fits: str, tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        pl.seed_everything(3, verbose=False)
        module = Net()
        states = []
        for index, each in enumerate(fits.split(", ")):
            pl.seed_everything(index, verbose=False)
            strategy = way.strategy() if each == "ours" else "auto"
            trainer = trainer_for(strategy, logger=Notes(), max_epochs=2)
            trainer.fit(module, loader(vectors(4)), loader(vectors(1)))
            states.append(left(trainer))
        outside = module.net(vectors(1)[0]).sum()
        outside.backward()
        return {"states": states, "outside": outside.detach(), "devices": [str(p.device) for p in module.parameters()]}

    compare(run, tmp_path)


@feature("Set-up and data", "`torch.compile`d modules")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at inputs
@pytest.mark.parametrize("whole", [True, False], ids=["LightningModule", "layers"])
def test_compiled(whole: bool, tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        torch.compiler.reset()
        trainer = way.trainer()
        module: Any = Net(Stack(2))
        if whole:
            module = torch.compile(module, backend="eager")
        else:
            for block in module.net.blocks:
                block.compile(backend="eager")
        trainer.fit(module, loader(vectors(3)), loader(vectors(1)))
        return left(trainer)

    compare(run, tmp_path, ["off"])


class Draws(torch.utils.data.Dataset):
    """Random in each worker, by all the generators."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(4, 16) + random.random() + np.random.rand()


@feature("Set-up and data", "`seed_everything(workers=True)`, workers")
def test_seeded_workers(tmp_path: Path) -> None:
    def run(way: Way) -> Seen:
        batches: list[Tensor] = []
        watch = Does(on_train_batch_start=lambda trainer, module, batch, *_: batches.append(batch.clone()))
        trainer = way.trainer(callbacks=[watch], max_epochs=2)
        pl.seed_everything(5, workers=True, verbose=False)
        module = Net()
        trainer.fit(module, DataLoader(Draws(), batch_size=1, collate_fn=collate, num_workers=1))
        return {**left(trainer), "batches": batches}

    with mock.patch.dict("os.environ"):
        assert_changing(compare(run, tmp_path, LATE)["batches"])


@feature("Set-up and data", "transformers: GPT-2 with accumulation, clipping, scheduler, checkpoint and resume")
def test_a_language_model(tmp_path: Path) -> None:
    class Language(Net):
        def __init__(self) -> None:
            super().__init__(CASES["gpt2-tied"].make().net)

        def loss(self, batch: Any) -> Tensor:
            return self.net(**batch).loss

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8), "interval": "step"}]

    def run(way: Way) -> Seen:
        saver = ModelCheckpoint(way.folder, "{step}", every_n_train_steps=2, save_top_k=-1)
        options: dict[str, Any] = {
            "make": Language, "batches": tokens(6), "val": tokens(1), "gradient_clip_val": 0.1, "max_epochs": 2,
            "accumulate_grad_batches": 2, "val_check_interval": 3, "precision": "bf16-true",
        }  # fmt: skip
        seen = way.fit(**options, callbacks=[saver], enable_checkpointing=True)
        found = files(way.folder)
        return {"seen": seen, "files": found, "resumed": way.fit(**options, ckpt_path=way.folder / "step=2.ckpt")}

    assert len(compare(run, tmp_path, LATE)["files"]) == 3


# ---------------------------------------------------------------------- command line

CONFIG = """
seed_everything: 7
model: {depth: 4, rate: 0.02}
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 2
  enable_progress_bar: false
  enable_model_summary: false
  logger: false
  num_sanity_val_steps: 0
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {every_n_train_steps: 3, save_top_k: -1, dirpath: DIR}
"""


class Given(WithExtras):
    """What a config names."""

    def __init__(self, depth: int = 3, rate: float = 1e-3) -> None:
        super().__init__(depth, rate)

    def train_dataloader(self) -> Any:
        return loader(vectors(6))

    def val_dataloader(self) -> Any:
        return loader(vectors(2))

    test_dataloader = predict_dataloader = val_dataloader


CHOICES = {
    "--trainer.strategy": ["--trainer.strategy=superpipeline"],
    "class_path": [
        '--trainer.strategy={"class_path": "sp_lightning.SuperpipelineStrategy", "init_args": {"k": 2, "k_prime": 1, '
        '"optimizer_overlap": "backward"}}'
    ],
}


@feature("Command line", *(f"`LightningCLI`, `fit --config`: {name}" for name in CHOICES), "`LightningCLI`, `test`")
@pytest.mark.parametrize("name", CHOICES)
def test_cli(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "JSONARGPARSE_DEPRECATION_WARNINGS", "off"
    )  # Lightning 2.6 calls what jsonargparse 4.53 deprecates

    def run(way: Way) -> Seen:
        config = way.folder / "fit.yaml"
        config.write_text(CONFIG.replace("DIR", str(way.folder / "files")))
        chosen = CHOICES[name] if way.overlap else []
        trainers = []
        for command in (["fit"], ["test", f"--ckpt_path={next(iter(sorted(way.folder.rglob('*.ckpt'))), '')}"]):
            if command[0] == "test":
                command[1] = f"--ckpt_path={min((way.folder / 'files').glob('*.ckpt'))}"
            arguments = [command[0], f"--config={config}", *command[1:], *chosen]
            with mock.patch.object(sys, "argv", ["main"]):
                cli = LightningCLI(Given, args=arguments, save_config_kwargs={"overwrite": True})
            trainers.append(left(cli.trainer))
            if way.overlap:
                way.strategies.append(cli.trainer.strategy)
        return {"runs": trainers, "files": files(way.folder)}

    seen = compare(run, tmp_path / "runs", ["off"])
    assert seen["files"]
    assert seen["runs"][0]["progress"][0] == 12
    assert seen["runs"][1]["metrics"][0]["test_loss"] > 0


# ---------------------------------------------------------------------- the table


def verdict(test: Callable[..., None]) -> str:
    """What a mark says; without one the test says that it works."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "xfail"]
    return f"no: {marks[0].kwargs['reason']}" if marks else "yes"


def table() -> str:
    lines = [
        "# Conformance",
        'Lightning\'s features under this strategy. Each test runs the same thing under `strategy="auto"` and under '
        "superpipeline, on the CPU, with updates in and outside the background where that is possible, and compares "
        "everything that is left or can be seen, bitwise: weights, buffers, optimizer and scheduler state, what was logged, "
        "checkpoints, loops' progress, random state. `python -m tests.conformance.test_conformance` "
        "runs the tests and writes this.",
    ]
    for group in GROUPS:
        rows = sorted((name, verdict(test), test.__name__) for each, name, test in FEATURES if each == group)
        assert rows
        head = "| feature | works | test |\n|---|---|---|"
        body = "\n".join(f"| {name} | {works} | `{test}` |" for name, works, test in rows)
        lines += [f"## {group}", f"{head}\n{body}"]
    return "\n\n".join(lines) + "\n"


def test_the_table_is_of_these_tests() -> None:
    assert TABLE.read_text() == table()


def test_every_test_has_a_row() -> None:
    tested = {test.__name__ for _, _, test in FEATURES}
    tests = {name for name in globals() if name.startswith("test_")}
    assert tests - tested == {
        "test_the_comparison_can_fail", "test_the_table_is_of_these_tests", "test_every_test_has_a_row",
    }  # fmt: skip
    assert len({(group, name) for group, name, _ in FEATURES}) == len(FEATURES)


if __name__ == "__main__":
    importlib.import_module("tensorboard")  # a skipped test says nothing
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", __file__, "-k", "not the_table"]
    if not (failed := subprocess.run(command).returncode):
        TABLE.write_text(table())
    sys.exit(failed)
