"""The shape of the package: imports go down, one file touches the accelerator, options are decisions."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import sp_lightning
from sp_lightning import SuperpipelineStrategy

PACKAGE = Path(sp_lightning.__file__).parent
# One layer's way, downwards: a file may import from those before it only.
ORDER = (
    "_version", "memory", "wrapped", "frozen", "layers", "modes", "options", "plan", "ledger", "trace", "timeline",
    "device", "edition", "host", "tables", "casts", "parameters", "places", "gates", "slots", "changes", "recompute",
    "offload", "activations", "packing", "prefetch", "prediction", "balance", "estimate", "spec", "window",
    "capacity", "gradients", "updates", "residents", "watch", "averages", "pruned", "stats", "streamer", "tuning", "step",
    "layered", "repeat", "twins", "quiet", "overlap", "picture", "callback", "checkpoints", "advice", "strategy",
    "pytorch_lightning", "__init__", "__main__",
)  # fmt: skip
MAY_IMPORT_LIGHTNING = {
    "__main__", "repeat", "quiet", "overlap", "callback", "checkpoints", "strategy", "pytorch_lightning", "__init__",
}  # fmt: skip


def imports(source: str) -> list[str]:
    """All modules that a source imports at module level or below, dotted."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
    return found


def offences(name: str, source: str) -> list[str]:
    """What a file imports that it may not."""
    wrong = []
    for module in imports(source):
        top, _, rest = module.partition(".")
        if top == "sp_lightning" and (not rest or ORDER.index(rest) >= ORDER.index(name)):
            wrong.append(module)
        if top in ("lightning", "pytorch_lightning") and name not in MAY_IMPORT_LIGHTNING:
            wrong.append(module)
    return wrong


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_imports_go_down(path: Path) -> None:
    assert path.stem in ORDER, "a new file needs its place in the order"
    assert offences(path.stem, path.read_text()) == []


def test_the_import_check_can_fail() -> None:
    assert offences("plan", "from sp_lightning.streamer import Streamer") == ["sp_lightning.streamer"]
    assert offences("slots", "import lightning.pytorch as pl") == ["lightning.pytorch"]
    assert offences("slots", "from sp_lightning.host import HostBlock") == []


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_one_file_touches_the_accelerator(path: Path) -> None:
    tree = ast.parse(path.read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
    }
    assert path.stem == "device" or not used & {"cuda", "accelerator", "Stream", "Event", "xpu", "mps"}


def test_the_options_are_frozen() -> None:
    """Each new option is a decision, and is written down here."""
    parameters = inspect.signature(SuperpipelineStrategy).parameters
    assert {name: each.default for name, each in parameters.items()} == {
        "k": "auto",
        "k_prime": "auto",
        "memory_budget": None,
        "activations": "keep",
        "layers": None,
        "resident": (),
        "pin_memory": True,
        "fused_optimizer": "auto",
        "optimizer_overlap": "auto",
        "save_frozen": True,
        "check_writes": False,
        "callback": True,
        "device": None,
        "accelerator": None,
        "checkpoint_io": None,
        "precision_plugin": None,
    }
    assert {each.kind for each in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
