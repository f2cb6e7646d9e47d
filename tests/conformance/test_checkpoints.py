"""Checkpoints: when Lightning's own callbacks save, what is in the files, and how a run goes on from them."""

from __future__ import annotations

import datetime
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import callbacks as plc
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO

from tests.conformance.features import feature
from tests.support.models import vectors
from tests.support.nets import Does, Fails, Net, WithExtras, clock, fails
from tests.support.runs import loader
from tests.support.tiers import first
from tests.support.ways import RunVariant, Seen, compare, files, left

pytestmark = [
    # Lightning's advice to who resumes without the callbacks that saved.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create:UserWarning"),
]

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


@pytest.mark.long("takes a second or more")
@feature("Checkpoints", *(f"`ModelCheckpoint`: {name}" for name in SAVERS))
@pytest.mark.parametrize(
    "name", first(SAVERS, "monitor, min", "save_last=link", "save_weights_only", why="other options of Lightning's")
)
def test_model_checkpoint(name: str, tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        saver = ModelCheckpoint(way.folder, "{epoch}-{step}-{train_loss_step:.9f}", **SAVERS[name])
        with clock(plc.model_checkpoint, "monotonic"):
            seen = way.fit(callbacks=[saver], enable_checkpointing=True, max_epochs=2)
        return {**seen, "saver": saver.state_dict(), "last": saver.last_model_path, "files": files(way.folder)}

    found = compare(run, tmp_path)["files"]
    assert found
    assert all(isinstance(each, str) or each["state_dict"] for each in found.values())


@pytest.mark.rest("takes tenths of a second")
@feature("Checkpoints", "`ModelCheckpoint`: save_on_exception", "`OnExceptionCheckpoint`")
@pytest.mark.filterwarnings("ignore:.*.fit.ckpt_path=.*(without a model|no last checkpoint).*:UserWarning")
@pytest.mark.parametrize("where", ["before", "forward", "after", "validation", "interrupt"])
def test_saved_on_exception(where: str, tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
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


@pytest.mark.long("takes a second or more")
@feature("Checkpoints", "resume in mid-epoch", "resume in mid-accumulation", "resume across strategies")
@pytest.mark.parametrize(
    "batch", first([3, 4], 4, why="the same at another batch"), ids=["mid-epoch", "mid-accumulation"]
)
def test_resumes_in_the_middle(batch: int, tmp_path: Path) -> None:
    """Both ways to write a file, with all ways to read it."""
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 3, "batches": 7}

    def write(way: RunVariant) -> Seen:
        seen = way.fit(callbacks=[SavesAt(way.folder / "mid.ckpt", batch)], **options)
        return {**seen, "files": files(way.folder)}

    def read(way: RunVariant, path: Path) -> Seen:
        return {**way.fit(ckpt_path=path, **options), "path": ""}

    assert compare(write, tmp_path)["files"]
    for writer in ("plain", "off", "forward"):
        seen = compare(partial(read, path=tmp_path / writer / "mid.ckpt"), tmp_path / f"from {writer}")
        assert seen["progress"][0] == 12
        assert seen["logged"][0][0][0][0] >= 6, "it began at the beginning"


@pytest.mark.long("takes a second or more")
@feature("Checkpoints", '`ckpt_path="best"` and `"last"`', "`Trainer.save_checkpoint(weights_only=True)`")
def test_best_and_last(tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
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


@pytest.mark.long("takes a second or more")
@feature(
    "Checkpoints", "`on_save_checkpoint` and `on_load_checkpoint` of module and callback", "`Callback.state_dict`",
    "`save_hyperparameters`, `load_from_checkpoint`",
)  # fmt: skip
def test_states_of_ones_own(tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
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


@pytest.mark.long("takes a second or more")
@feature("Checkpoints", "`strict_loading=False`, `state_dict` override")
def test_strict_loading(tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
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


@pytest.mark.rest("takes a second")
@feature("Checkpoints", "`AsyncCheckpointIO`")
def test_async_checkpoints(tmp_path: Path) -> None:
    """A file is of the moment when it was asked for, though training goes on before it is written."""

    def run(way: RunVariant) -> Seen:
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
