"""What an import does to others: no package comes along unasked, and messages stay with the Lightning that is in use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sp_lightning

ROOT = Path(__file__).parents[2]

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
print(*(name in sys.modules for name in ("pytorch_lightning", "lightning.pytorch", "sp_lightning.any_loop")))
"""


def said_by(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[:-1]


@pytest.mark.long("a subprocess that imports torch")
@pytest.mark.parametrize(
    ("trainers", "told"),
    [
        pytest.param(
            "lightning.pytorch",
            ["sp_lightning.trainer.strategy", "True True", "False True False"],
            marks=pytest.mark.long("the other package's names are added to these"),
        ),
        ("pytorch_lightning", ["sp_lightning.pytorch_lightning", "True True", "True True False"]),
    ],
)
def test_a_trainer_finds_the_name_and_its_logger_all_messages(trainers: str, told: list[str]) -> None:
    """``import pytorch_lightning`` renames the logger of Lightning's own messages, which ``lightning`` has no handler of."""
    assert said_by(FITS.format(trainers=trainers))[-3:] == told


@pytest.mark.long("a subprocess that imports torch")
def test_pytorch_lightning_may_be_imported_later() -> None:
    """isort puts ``import sp_lightning`` before ``from pytorch_lightning import Trainer``: the name was unknown there."""
    code = """
import importlib.util, sys
import sp_lightning
assert "pytorch_lightning" not in sys.modules
importlib.util.find_spec("pytorch_lightning")  # as libraries do that ask whether it is installed
finders = len(sys.meta_path)
from pytorch_lightning import Trainer
import pytorch_lightning
trainer = Trainer(strategy="superpipeline", accelerator="cpu", logger=False, enable_checkpointing=False)
print(type(trainer.strategy).__module__, finders - len(sys.meta_path))
print(vars(pytorch_lightning.__loader__).keys() & {"exec_module"}, pytorch_lightning.__spec__.loader.get_source is not None)
"""
    assert said_by(code)[-2:] == ["sp_lightning.pytorch_lightning 1", "set() True"]


WITHOUT_LINUX = """
import importlib, pkgutil, sys
import lightning.pytorch, torch, matplotlib.pyplot
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
import sp_lightning
for found in pkgutil.walk_packages(sp_lightning.__path__, "sp_lightning."):
    if not found.name.endswith("__main__") and found.name != "sp_lightning.pytorch_lightning":
        importlib.import_module(found.name)

from pathlib import Path
from sp_lightning.trainer.host_memory import available_bytes
from sp_lightning.trainer.checkpoint_io import AtomicCheckpointIO

files = AtomicCheckpointIO()
for number in (1, 2):
    files.save_checkpoint({"number": torch.tensor(number)}, "some.ckpt")
print(files.load_checkpoint("some.ckpt")["number"].item(), [path.name for path in Path().iterdir()])
print(available_bytes(Path("nowhere")))
"""


@pytest.mark.long("a process that imports everything")
def test_a_system_that_is_not_linux_is_not_refused_at_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as that can be seen here: without the modules that Windows lacks, and without ``/proc``."""
    monkeypatch.chdir(tmp_path)
    if Path(sp_lightning.__file__).parents[1] == ROOT:  # otherwise it is installed
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert said_by(WITHOUT_LINUX)[-2:] == ["2 ['some.ckpt']", "None"]
