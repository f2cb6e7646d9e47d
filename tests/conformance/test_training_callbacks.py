"""Lightning's callbacks and tuners that change how a module is trained, or its weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torchvision
from lightning.pytorch import callbacks as plc
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.conformance.features import feature
from tests.support.models import Classifier, images, vectors
from tests.support.nets import Net
from tests.support.runs import loader
from tests.support.simdevice import simulated
from tests.support.tiers import first, some
from tests.support.ways import LATE, RunVariant, Seen, compare, files, left


class Images(Classifier, Net):
    """A model of torchvision's, with BatchNorm."""

    def __init__(self) -> None:
        Net.__init__(self, torchvision.models.ShuffleNetV2([1, 2, 1], [8, 16, 32, 48, 64], 5))


pytestmark = [
    # Lightning's advice to who resumes without the callbacks that saved.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create:UserWarning"),
]


@pytest.mark.long("a hundred steps of both")
@feature("Callbacks", "`Tuner.lr_find`", "`LearningRateFinder`")
@pytest.mark.parametrize("callback", some([False, True], True, why="the same by the tuner"), ids=["tuner", "callback"])
def test_learning_rate_finder(callback: bool, tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
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


@pytest.mark.long("takes a second or more")
@feature("Callbacks", "`Tuner.scale_batch_size`: power", "`Tuner.scale_batch_size`: binsearch", "`BatchSizeFinder`")
@pytest.mark.parametrize(
    "limit",
    [
        pytest.param(11, id="out of memory"),
        pytest.param(100, id="enough memory", marks=pytest.mark.rest("fewer trials")),
    ],
)
@pytest.mark.parametrize(
    "way_to_find", first(["power", "binsearch", "callback"], "binsearch", why="other ways to search")
)
def test_batch_size_scaler(way_to_find: str, limit: int, tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
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


@pytest.mark.long("takes a second or more")
@feature("Callbacks", "`StochasticWeightAveraging`, with BatchNorm")
@pytest.mark.parametrize("device", first([None, "cpu"], None, second=[], why="the same on the CPU"))
def test_stochastic_weight_averaging(device: str | None, tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
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


@pytest.mark.long("three runs with averages")
@feature("Callbacks", "`WeightAveraging`, on the device and on the CPU", "`EMAWeightAveraging`")
@pytest.mark.parametrize("device", first([None, "cpu"], None, second=[], why="the same on the CPU"))
@pytest.mark.parametrize(
    "kind",
    first(
        [plc.WeightAveraging, plc.EMAWeightAveraging, Averages],
        plc.EMAWeightAveraging,
        second=[plc.WeightAveraging],
        why="its other kinds",
    ),
)
def test_weight_averaging(kind: Any, device: str | None, tmp_path: Path) -> None:
    """Validation sees the averages; a file has both, and a run resumes with both."""

    def run(way: RunVariant) -> Seen:
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


@pytest.mark.long("takes a second or more")
@feature("Callbacks", "`GradientAccumulationScheduler`")
def test_accumulation_scheduler(tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        return way.fit(callbacks=[plc.GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})], max_epochs=4)

    assert compare(run, tmp_path)["progress"][0] == 6 + 3 + 2 + 2


class Thaws(plc.BaseFinetuning):
    """Freezes the front, unfreezes a block in each epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.net.stem, *pl_module.net.blocks])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if 0 < epoch < 4:
            self.unfreeze_and_add_param_group(pl_module.net.blocks[4 - epoch], optimizer, lr=5e-3)


@pytest.mark.long("takes a second or more")
@feature("Callbacks", "`BaseFinetuning`")
def test_finetuning(tmp_path: Path) -> None:
    """Blocks are unfrozen in the middle of a fit; a run that resumes has their groups."""

    def run(way: RunVariant) -> Seen:
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


@pytest.mark.long("takes a second or more")
@feature("Callbacks", "`BackboneFinetuning`")
@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist:UserWarning")  # BatchNorm's
@pytest.mark.parametrize("train_bn", first([True, False], True, why="the same without"))
def test_backbone_finetuning(train_bn: bool, tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
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


def prune(way: RunVariant, method: str, lottery: bool) -> Seen:
    callback = plc.ModelPruning(
        method, amount=0.3, use_lottery_ticket_hypothesis=lottery, parameter_names=["weight"], **METHODS[method]
    )
    saver = ModelCheckpoint(way.folder, "{epoch}", save_top_k=-1)
    seen = way.fit(callbacks=[callback, saver], enable_checkpointing=True, max_epochs=3, batches=3)
    return {**seen, "files": files(way.folder)}


@pytest.mark.long("takes a second or more")
@feature("Callbacks", *(f"`ModelPruning`: {method}" for method in METHODS))
@pytest.mark.parametrize("method", first(METHODS, "ln_structured", why="other methods"))
def test_pruning(method: str, tmp_path: Path) -> None:
    """Weights are exchanged for masked ones in the middle of a fit."""
    seen = compare(partial(prune, method=method, lottery=False), tmp_path)
    assert (seen["state"]["net.blocks.1.inner.weight"] == 0).float().mean() > 0.2
    assert seen["files"]


def copy_to_another_device(new: nn.Module, old: nn.Module, name: str) -> None:
    """As Lightning's, whose ``.to(device)`` copies where the module is not on the CPU."""
    target = getattr(new, f"{name}_orig", getattr(new, name))
    target.data = getattr(old, name).data.clone()


@pytest.mark.long("takes a second or more")
@feature("Callbacks", "`ModelPruning`: lottery tickets")
def test_lottery_tickets(tmp_path: Path) -> None:
    """Weights go back to what they were when training began, as they do under plain Lightning on a GPU."""
    with mock.patch.object(plc.ModelPruning, "_copy_param", staticmethod(copy_to_another_device)):
        seen = compare(partial(prune, method="l1_unstructured", lottery=True), tmp_path)
    assert (seen["state"]["net.blocks.1.inner.weight"] == 0).float().mean() > 0.2


@pytest.mark.long("takes a second or more")
@feature("Callbacks", "`ModelPruning`: lottery tickets, as plain Lightning draws them on the CPU")
@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="there weights share memory with Lightning's copy of the original ones and training overwrites it; here "
    "`p.data = x` copies",
)
def test_lottery_tickets_that_share_memory(tmp_path: Path) -> None:
    compare(partial(prune, method="l1_unstructured", lottery=True), tmp_path, ["off"])


@pytest.mark.long("takes a second or more")
@feature("Callbacks", "`ModelPruning` on an accelerator (a simulated one)")
@pytest.mark.parametrize("method", first(METHODS, "l1_unstructured", why="other methods"))
def test_pruning_on_a_device_of_its_own(method: str, tmp_path: Path) -> None:
    """The second pruning draws masks from what the last forward has left, and multiplies them with weights."""
    with simulated():
        seen = compare(partial(prune, method=method, lottery=False), tmp_path, ["off"])
    assert (seen["state"]["net.blocks.1.inner.weight"] == 0).float().mean() > 0.2
