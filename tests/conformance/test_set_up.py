"""How modules come to a trainer, and data with them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.conformance.features import feature
from tests.support.models import CASES, Stack, tokens, vectors
from tests.support.nets import Does, Net, assert_changing
from tests.support.runs import collate, loader, trainer_for
from tests.support.tiers import first
from tests.support.ways import LATE, Notes, RunVariant, Seen, compare, files, left

pytestmark = [
    # Lightning's advice to who resumes without the callbacks that saved.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create:UserWarning"),
]


@pytest.mark.long("takes a second or more")
@feature("Set-up and data", "`Trainer.init_module`", "`init_module(empty_init=True)`")
@pytest.mark.parametrize("empty", [False, True])
def test_init_module(empty: bool, tmp_path: Path) -> None:
    """Random numbers are drawn as ever; without them weights come from a checkpoint."""
    pl.seed_everything(3, verbose=False)
    weights = Net().state_dict()

    def run(way: RunVariant) -> Seen:
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


@pytest.mark.long("takes a second or more")
@feature("Set-up and data", "`configure_model`")
def test_configure_model(tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
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


@pytest.mark.long("takes a second or more")
@feature("Set-up and data", "`Trainer.fit` twice on one trainer")
@pytest.mark.parametrize("other", [False, True], ids=["same module", "another module"])
def test_fit_twice(other: bool, tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
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


@pytest.mark.long("the first tier has two fits of one trainer")
@feature("Set-up and data", "one module on two trainers: plain after ours, ours after plain, ours after ours")
@pytest.mark.parametrize("fits", ["ours, plain", "plain, ours", "ours, ours"])
def test_one_module_on_two_trainers(fits: str, tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
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


@pytest.mark.long("takes a second or more")
@feature("Set-up and data", "`torch.compile`d modules")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at inputs
@pytest.mark.parametrize(
    "whole", first([True, False], False, why="seconds of compilation"), ids=["LightningModule", "layers"]
)
@pytest.mark.filterwarnings("ignore:Code that torch.compile compiles calls layers")
def test_compiled(whole: bool, tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
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


@pytest.mark.long("two more processes in each run")
@feature("Set-up and data", "`seed_everything(workers=True)`, workers")
def test_seeded_workers(tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        batches: list[Tensor] = []
        watch = Does(on_train_batch_start=lambda trainer, module, batch, *_: batches.append(batch.clone()))
        trainer = way.trainer(callbacks=[watch], max_epochs=2)
        pl.seed_everything(5, workers=True, verbose=False)
        module = Net()
        trainer.fit(module, DataLoader(Draws(), batch_size=1, collate_fn=collate, num_workers=1))
        return {**left(trainer), "batches": batches}

    with mock.patch.dict("os.environ"):
        assert_changing(compare(run, tmp_path, LATE)["batches"])


@pytest.mark.long("a model of transformers; the matrix has some in the first tier")
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

    def run(way: RunVariant) -> Seen:
        saver = ModelCheckpoint(way.folder, "{step}", every_n_train_steps=2, save_top_k=-1)
        options: dict[str, Any] = {
            "make": Language, "batches": tokens(6), "val": tokens(1), "gradient_clip_val": 0.1, "max_epochs": 2,
            "accumulate_grad_batches": 2, "val_check_interval": 3, "precision": "bf16-true",
        }  # fmt: skip
        seen = way.fit(**options, callbacks=[saver], enable_checkpointing=True)
        found = files(way.folder)
        return {"seen": seen, "files": found, "resumed": way.fit(**options, ckpt_path=way.folder / "step=2.ckpt")}

    assert len(compare(run, tmp_path, LATE)["files"]) == 3
