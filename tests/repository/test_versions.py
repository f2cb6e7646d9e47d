"""What is too old is refused at the import, with the command that helps."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from sp_lightning.trainer.run import untested_versions
from tests.support.tiers import some

PROJECT = Path(__file__).parents[2]


def imported(preparation: str) -> subprocess.CompletedProcess[str]:
    script = f"import importlib.metadata as m; original = m.version\n{preparation}\nimport sp_lightning"
    return subprocess.run([sys.executable, "-c", script], cwd=PROJECT, capture_output=True, text=True, check=False)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("package", "found", "needed"),
    [("torch", "2.9.1+cu128", "2.10"), ("lightning", "2.5.6", "2.6"), ("lightning", "2.6.0rc1", "2.6")],
)
def test_older_versions_are_refused(package: str, found: str, needed: str) -> None:
    ran = imported(f"m.version = lambda name: {found!r} if name == {package!r} else original(name)")
    assert ran.returncode == 1
    assert ran.stderr.rstrip().splitlines()[-1] == (
        f"ImportError: sp_lightning needs {package} {needed} or newer, and {found} is installed. "
        f'Install it: pip install -U "{package}>={needed}"'
    )


@pytest.mark.long("a subprocess that imports torch")
@pytest.mark.parametrize("found", some(["2.10.0+cpu", "2.11.0a0+git1234567"], "2.11.0a0+git1234567", why="the same"))
def test_newer_ones_are_not(found: str) -> None:
    ran = imported(f"m.version = lambda name: {found!r} if name == 'torch' else original(name)")
    assert ran.returncode == 0, ran.stderr


def test_the_metadata_ask_for_the_same() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["torch>=2.10", "lightning>=2.6,!=2.6.2,!=2.6.3"]


@pytest.mark.rest("takes tenths of a second")
def test_the_extra_of_the_examples_has_all_that_recipes_import() -> None:
    """Without diffusers, a recipe ended with a traceback. ``datasets`` is an extra of its own, which a message names."""
    extra = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["examples"]
    files = list((PROJECT / "examples").glob("*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    names = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    by_others = {"torch", "lightning", "numpy", "sp_lightning", "datasets", "PIL", "tokenizers", "huggingface_hub"}
    own = {file.stem for file in files} | {"examples", "__future__"}
    needed = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - by_others - own
    given = {re.split(r"[>\[]", each)[0].replace("scikit-learn", "sklearn") for each in extra}
    assert needed <= given


@pytest.mark.parametrize(("version", "said"), [("2.10.0", 0), ("2.15.1+cu130", 0), ("2.16.0a0+git1", 1), ("3.0", 1)])
def test_a_torch_that_no_test_has_seen_is_named_once(version: str, said: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    sentences = untested_versions()
    assert len(sentences) == said
    assert all(version in sentence and "2.10 to 2.15" in sentence for sentence in sentences)
