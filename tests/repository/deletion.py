"""Removes a capability from a copy of the project, and tests what is left: ``python -m tests.repository.deletion
capabilities.disk``.

In the copy

1. ``import sp_lightning`` works;
2. the option of the capability raises the one error that names it, or, if its absence is a fallback, works without it;
3. seven small trainings equal plain Lightning, and their weights those of the whole package (``tests/repository/core_runs.py``);
4. with ``--all``, every test passes that does not need the capability (``tests/support/without.py``); any further arguments are
   passed to pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from sp_lightning.registry import CAPABILITIES

ROOT = Path(__file__).parents[2]

FIT = """
import logging, warnings
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from sp_lightning import SuperpipelineStrategy
pl.Trainer(strategy=SuperpipelineStrategy({options}), accelerator="cpu", devices={devices}, logger=False, barebones=True,
           max_steps=2).fit(BoringModel())
print("works")
"""

MISSING = "needs {folder}, which is not installed"

RAISE = """
from sp_lightning import SuperpipelineStrategy
from sp_lightning.registry import MissingCapabilityError
for ask in {calls!r}:
    try:
        eval(ask)
    except MissingCapabilityError:
        continue
    raise SystemExit(ask + " has raised no error")
"""
HOST_MEMORY = RAISE.format(calls=['SuperpipelineStrategy(host_memory="1GiB")'])

ASKED_FOR: dict[str, tuple[str, str]] = {
    "capabilities.activations": (FIT.format(options='activations="recompute"', devices=1), MISSING),
    "any_loop": ("import sp_lightning; sp_lightning.stream", MISSING),
    "tools.comparison": ("import sp_lightning; sp_lightning.check", MISSING),
    "capabilities.disk": (HOST_MEMORY + FIT.format(options='disk="."', devices=1), MISSING),
    "capabilities.experts": (FIT.format(options="k=1", devices=1), "works"),
    "capabilities.gpu_steps": (FIT.format(options='optimizer_on="gpu"', devices=1), MISSING),
    "tools.planner": ("from sp_lightning.__main__ import main; main(['plan', 'os:getcwd'])", MISSING),
    "experimental.ranks": (FIT.format(options="", devices=2), MISSING),
    "capabilities.tuning": (FIT.format(options='k="auto"', devices=1), "works"),
}
"""For each capability, a program that asks for it, and a text that the program prints or raises."""


NO_EDITABLE_INSTALL = """
import sys
sys.meta_path = [each for each in sys.meta_path if "__editable__" not in getattr(each, "__module__", "")]
"""
"""Without it, an editable installation of the package (pip install -e) would provide the folder that a copy lacks."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", choices=[*CAPABILITIES, "each"])
    parser.add_argument("--all", action="store_true", help="run the tests of the core as well")
    given, more = parser.parse_known_args(arguments)
    for folder in CAPABILITIES if given.folder == "each" else [given.folder]:
        with TemporaryDirectory() as place:
            copy = without(folder, Path(place))
            for name, check in (("import", imports), ("option", option), ("trainings", trainings)):
                check(copy, folder)
                print(f"{folder}: {name} ok", flush=True)
            if given.all:
                run(copy, "-m", "pytest", "-q", "-p", "tests.support.without", "--without", folder, *more, shown=True)


def without(folder: str, place: Path) -> Path:
    """Copies the project, removes a capability and its tests, and returns the copy."""
    copy = place / "project"
    copy.mkdir()
    for name in ("sp_lightning", "tests", "examples", "pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    shutil.rmtree(copy / path_of(folder))
    tests = folder.rpartition(".")[2]
    shutil.rmtree(copy / "tests" / tests, ignore_errors=True)
    (copy / "sitecustomize.py").write_text(NO_EDITABLE_INSTALL)
    return copy


def path_of(capability: str) -> Path:
    """The folder of a capability, relative to the project."""
    return Path("sp_lightning", *capability.split("."))


def imports(copy: Path, folder: str) -> None:
    assert run(copy, "-c", "import sp_lightning; print(sp_lightning.__file__)").startswith(str(copy))


def option(copy: Path, folder: str) -> None:
    program, expected = ASKED_FOR[folder]
    found = run(copy, "-c", program, fails=expected == MISSING)
    assert expected.format(folder=path_of(folder)) in found, f"expected {expected!r}, got:\n{found[-3000:]}"


def trainings(copy: Path, folder: str) -> None:
    found = json.loads(run(copy, "-m", "tests.repository.core_runs").splitlines()[-1])
    assert found == whole(), f"without {folder} the weights are {found}, with it {whole()}"


@cache
def whole() -> dict[str, str]:
    """The digests of the trainings of the whole package."""
    digests: dict[str, str] = json.loads(run(ROOT, "-m", "tests.repository.core_runs").splitlines()[-1])
    return digests


def run(copy: Path, *arguments: str, fails: bool = False, shown: bool = False) -> str:
    """Runs Python in a copy, and returns what it prints. With ``fails`` it has to fail, else it must not."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", *arguments]
    if shown:
        subprocess.run(command, cwd=copy, env=environment, check=True)
        return ""
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert (done.returncode != 0) == fails, f"{arguments}: status {done.returncode}\n{done.stdout}{done.stderr[-3000:]}"
    return done.stdout + (done.stderr if fails else "")


if __name__ == "__main__":
    main()
