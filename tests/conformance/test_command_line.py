"""Lightning's command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.conformance.features import feature
from tests.support.models import vectors
from tests.support.nets import WithExtras
from tests.support.runs import loader
from tests.support.tiers import first
from tests.support.ways import RunVariant, Seen, compare, files, left

pytestmark = [
    # Lightning's advice to who resumes without the callbacks that saved.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create:UserWarning"),
]

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


@pytest.mark.long("takes a second or more")
@feature("Command line", *(f"`LightningCLI`, `fit --config`: {name}" for name in CHOICES), "`LightningCLI`, `test`")
@pytest.mark.parametrize("name", first(CHOICES, "class_path", why="the same by its name"))
def test_cli(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "JSONARGPARSE_DEPRECATION_WARNINGS", "off"
    )  # Lightning 2.6 calls what jsonargparse 4.53 deprecates

    def run(way: RunVariant) -> Seen:
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
