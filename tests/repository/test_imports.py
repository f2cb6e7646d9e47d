"""What an import does to others: no package comes along unasked, and messages stay with the Lightning that is in use."""

from __future__ import annotations

import subprocess
import sys

import pytest

FITS = """
import io, logging, sys
import {trainers} as trainers
import sp_lightning
from {trainers}.demos.boring_classes import BoringModel

heard = io.StringIO()
logger = logging.getLogger("{trainers}")
logger.addHandler(logging.StreamHandler(heard))
logger.setLevel(logging.DEBUG)
options = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, fast_dev_run=True)
trainer = trainers.Trainer(strategy="superpipeline", **options)
trainer.fit(BoringModel())
print(type(trainer.strategy).__module__)
print("Superpipeline" in heard.getvalue(), "`Trainer.fit` stopped" in heard.getvalue())
print("pytorch_lightning" in sys.modules, "lightning.pytorch" in sys.modules)
"""


def said_by(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[:-1]


@pytest.mark.parametrize(
    ("trainers", "told"),
    [
        ("lightning.pytorch", ["sp_lightning.trainer.strategy", "True True", "False True"]),
        ("pytorch_lightning", ["sp_lightning.pytorch_lightning", "True True", "True True"]),
    ],
)
def test_a_trainer_finds_the_name_and_its_logger_all_messages(trainers: str, told: list[str]) -> None:
    """``import pytorch_lightning`` renames the logger of Lightning's own messages, which ``lightning`` has no handler of."""
    assert said_by(FITS.format(trainers=trainers))[-3:] == told


def test_who_imports_pytorch_lightning_later_registers_by_hand() -> None:
    names = "; print(StrategyRegistry.available_strategies().count('superpipeline'))"
    code = "import sp_lightning; from pytorch_lightning.strategies import StrategyRegistry" + names
    assert said_by(code + "; import sp_lightning.pytorch_lightning" + names) == ["0", "1"]
