"""Those who import ``pytorch_lightning`` get the same.

``python -m tests.conformance.test_pytorch_lightning`` installs the project and ``pytorch_lightning`` into a venv of their
own, and runs the tests there that use Lightning most, with its imports rewritten. It prints a row of
``examples/results/README.md``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.fabric.plugins as fabric_plugins
import lightning.pytorch as pl
import lightning_fabric.plugins as their_fabric_plugins
import pytest
import pytorch_lightning as ptl
import torch
from pytorch_lightning.callbacks import EarlyStopping, LambdaCallback, StochasticWeightAveraging, WeightAveraging
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.demos.boring_classes import BoringDataModule, BoringModel
from pytorch_lightning.plugins.precision import BitsandbytesPrecision, MixedPrecision
from torch import Tensor, nn

import sp_lightning
from sp_lightning.core.plan.update_policy import UpdateFacts, decide
from sp_lightning.pytorch_lightning import SuperpipelineCallback, SuperpipelineStrategy
from sp_lightning.trainer.callback import SuperpipelineCallback as LightningsCallback
from sp_lightning.trainer.compat import base_of, is_a, path
from sp_lightning.trainer.scaler import HostGradScaler
from sp_lightning.trainer.update_facts import batch_facts
from sp_lightning.trainer.user_hooks import hooks_of_users
from tests.support.repository import result_row
from tests.support.runs import assert_equal

ROOT = Path(__file__).parents[2]
MOST = ("conformance", "trainer/test_callback.py", "trainer/test_checkpoints.py", "trainer/test_checkpoint_files.py",
        "equality/test_equality.py")  # fmt: skip


class Deep(BoringModel):
    """A few layers, dropout between them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.layer = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(layer(x).relu(), 0.1, self.training)
        return self.layer(x)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


def trainer_for(strategy: Any, **options: Any) -> ptl.Trainer:
    """A quiet trainer of the other package, on the CPU."""
    settings: dict[str, Any] = {
        "accelerator": "cpu", "max_epochs": 2, "limit_train_batches": 4, "limit_val_batches": 2, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return ptl.Trainer(strategy=strategy, **{**settings, **options})


def test_its_trainer_knows_the_strategy_by_name() -> None:
    trainer = trainer_for("superpipeline")
    assert isinstance(trainer.strategy, SuperpipelineStrategy)
    assert isinstance(trainer.strategy, ptl.strategies.SingleDeviceStrategy)
    assert not isinstance(trainer.strategy, pl.strategies.Strategy)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_training_and_resuming_are_bitwise_its_own(tmp_path: Path, precision: Any) -> None:
    ends = []
    for name, strategy in (("plain", "auto"), ("ours", SuperpipelineStrategy(k=1, optimizer_overlap="forward"))):
        ptl.seed_everything(3, verbose=False)
        options = {"default_root_dir": tmp_path / name, "precision": precision, "accumulate_grad_batches": 2}
        first = trainer_for(strategy, max_epochs=1, callbacks=[WeightAveraging(device="cpu")], **options)
        first.fit(Deep())
        file = first.checkpoint_callback.best_model_path  # type: ignore[union-attr]
        again = SuperpipelineStrategy(k=2, k_prime=2) if name == "ours" else strategy
        trainer = trainer_for(again, callbacks=[WeightAveraging(device="cpu")], **options)
        module = Deep()
        trainer.fit(module, ckpt_path=file)
        evaluated = [trainer.validate(module, verbose=False), trainer.predict(module, module.train_dataloader())]
        ends.append((module.state_dict(), trainer.optimizers[0].state_dict(), evaluated, torch.get_rng_state()))
        if name == "ours":
            assert trainer.strategy.stats().fetched_layers > 0
    assert_equal(ends[1], ends[0], "what training leaves")


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("own", [SuperpipelineCallback, LightningsCallback])
def test_the_callback_is_attached_once_and_is_its_own(tmp_path: Path, own: type) -> None:
    trainer, seen = trainer_for("superpipeline", fast_dev_run=True), list[Any]()
    look = LambdaCallback(on_train_start=lambda trainer, _: seen.extend(trainer.callbacks))
    trainer.callbacks.append(look)  # type: ignore[attr-defined]
    trainer.fit(Deep())
    (attached,) = (each for each in seen if isinstance(each, LightningsCallback))
    assert isinstance(attached, ptl.Callback)
    assert attached not in trainer.callbacks  # type: ignore[attr-defined]
    given = own(plot=tmp_path / "run.png", every_n_steps=1)
    trainer = trainer_for("superpipeline", callbacks=[given], enable_checkpointing=False)
    trainer.fit(Deep())
    assert [each for each in trainer.callbacks if isinstance(each, LightningsCallback)] == [given]
    assert (tmp_path / "run.png").stat().st_size


class Reads(BoringModel):
    """Has a hook of its own."""

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def test_hooks_are_seen_where_they_are() -> None:
    """What is not overridden is quiet; were classes mixed up, all hooks would be users', or none."""
    known = [EarlyStopping("x"), SuperpipelineCallback(), LambdaCallback(on_train_start=print)]
    trainer = SimpleNamespace(
        lightning_module=Deep(), datamodule=BoringDataModule(), callbacks=known, reload_dataloaders_every_n_epochs=0,
        strategy=SimpleNamespace(lr_scheduler_configs=[]),
    )  # fmt: skip
    assert hooks_of_users(trainer, "train") == []
    assert hooks_of_users(trainer, "optimizer") == []
    trainer.callbacks = [LambdaCallback(on_train_batch_end=lambda *_: None), WeightAveraging()]
    trainer.lightning_module = Reads()
    assert hooks_of_users(trainer, "train")[:2] == ["Reads.on_train_batch_end", "LambdaCallback.on_train_batch_end"]
    assert "WeightAveraging.on_train_batch_end" in hooks_of_users(trainer, "train")


def test_what_cannot_be_is_refused_as_with_lightning() -> None:
    with pytest.raises(ValueError, match="cannot work with BitsandbytesPrecision"):
        SuperpipelineStrategy(precision_plugin=BitsandbytesPrecision.__new__(BitsandbytesPrecision))  # type: ignore[arg-type]
    module = Deep()
    trainer = trainer_for("superpipeline", callbacks=[StochasticWeightAveraging(1e-2)])
    trainer.strategy.connect(module)
    with pytest.raises(ValueError, match="StochasticWeightAveraging steps without a backward"):
        decide(UpdateFacts(overlap="backward", batch=batch_facts(trainer)))


def test_the_scaler_works_on_the_host() -> None:
    plugin = MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cuda", enabled=False))
    SuperpipelineStrategy(precision_plugin=plugin)  # type: ignore[arg-type]
    assert type(plugin.scaler) is HostGradScaler


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.filterwarnings("ignore:No seed found:UserWarning")
def test_its_command_line_takes_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    found = LightningCLI(
        Deep,
        BoringDataModule,
        args=[
            "--trainer.strategy=sp_lightning.pytorch_lightning.SuperpipelineStrategy", "--trainer.strategy.k=3",
            "--trainer.logger=false", "--trainer.fast_dev_run=true", "--trainer.accelerator=cpu",
        ],
        run=False,
        save_config_callback=None,
    )  # fmt: skip
    assert isinstance(found.trainer.strategy, SuperpipelineStrategy)
    found.trainer.fit(found.model, found.datamodule)
    assert found.trainer.strategy.plan.k == 3


def test_namesakes() -> None:
    assert path(ptl.LightningModule) == path(pl.LightningModule) == "lightning.pytorch.core.module.LightningModule"
    assert path(their_fabric_plugins.TorchCheckpointIO) == path(fabric_plugins.TorchCheckpointIO)
    assert is_a(Deep(), pl.LightningModule)
    assert not is_a(Deep(), pl.LightningDataModule)
    assert not is_a(nn.Linear(1, 1), pl.LightningModule)
    assert base_of(Deep(), pl.LightningModule) is ptl.LightningModule
    assert (
        base_of(nn.Linear(1, 1), pl.LightningModule) is pl.LightningModule
    )  # there is none: it is as it was asked for
    assert path(type("Own", (), {"__module__": "own"})) == "own.Own"


def test_the_strategy_of_the_other_package_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"pytorch_lightning\.strategies\.Strategy"):
        ptl.Trainer(strategy=sp_lightning.SuperpipelineStrategy(), accelerator="cpu", logger=False)  # type: ignore[arg-type]


def rewritten(folder: Path) -> None:
    """The tests, as they would be had they been written for ``pytorch_lightning``."""
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    names = {
        r"\blightning\.pytorch\b": "pytorch_lightning",
        r"\blightning\.fabric\b": "lightning_fabric",
        r"\bfrom sp_lightning import (Superpipeline)": r"from sp_lightning.pytorch_lightning import \1",
        r"\bsp_lightning\.SuperpipelineStrategy\b": "sp_lightning.pytorch_lightning.SuperpipelineStrategy",
    }
    for file in (folder / "pyproject.toml", *(folder / "tests").rglob("*.py")):
        text = file.read_text()
        for old, new in names.items():
            text = re.sub(old, new, text)
        file.write_text(text)


@pytest.mark.hours("a virtual environment of its own")
@pytest.mark.timeout(1800)
def test_in_a_venv_of_its_own() -> None:
    """The tests that use Lightning most."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rewritten(folder)
        python = folder / "venv/bin/python"
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        install = [python, "-m", "pip", "install", "-q", f"{ROOT}[test]", f"pytorch-lightning=={ptl.__version__}"]
        subprocess.run(install, check=True)
        files = [f"tests/{each}" for each in MOST]
        # That one replaces what Lightning's own file reading is called by, in lightning's package.
        run = [python, "-m", "pytest", "-q", "-m", "not long", "-p", "no:cacheprovider", *files,
               "--ignore", "tests/conformance/test_pytorch_lightning.py", "--deselect",
               "tests/trainer/test_checkpoint_files.py::test_files_elsewhere_go_lightnings_way"]  # fmt: skip
        found = subprocess.run(run, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    last = found.stdout.strip().splitlines()[-1].strip("= ")
    print(found.stdout[-3000:])
    claim = f"With pytorch_lightning {ptl.__version__} in a venv of its own"
    print(result_row(claim, last, "python -m tests.conformance.test_pytorch_lightning"))
    assert found.returncode == 0


if __name__ == "__main__":
    test_in_a_venv_of_its_own()
