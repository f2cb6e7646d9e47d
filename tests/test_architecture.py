"""The shape of the package: wings whose imports go down, small files, one file that touches the accelerator."""

from __future__ import annotations

import ast
import graphlib
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy

import sp_lightning
from sp_lightning import SuperpipelineStrategy

PACKAGE = Path(sp_lightning.__file__).parent
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
}
# From the ground up: a wing may import from those before it only.
WINGS = (
    "_version", "device", "model", "plan", "observe", "store", "activations", "weights", "optim", "engine", "tune", "trainer",
    "pytorch_lightning", "__init__", "cli", "__main__",
)  # fmt: skip
MAY_IMPORT_LIGHTNING = {"trainer", "pytorch_lightning", "__init__", "cli", "__main__"}
MOST_LINES = {"file": 400, "class": 300, "function": 40}
EXCEPTIONS: dict[str, str] = dict.fromkeys(
    [
        "activations.forward_state",
        "activations.offload",
        "device.device",
        "engine.streamer",
        "engine.streamer.Streamer",
        "engine.streamer.__init__",
        "model.find",
        "model.find.find_layers",
        "trainer.strategy",
        "trainer.strategy.StreamingStrategy",
        "trainer.strategy.__init__",
        "trainer.strategy._build",
        "tune.simulator",
        "weights.device_parameter",
        "weights.device_parameter.__init__",
        "weights.gradients.drain",
    ],
    "not cut yet",
)
"""What is longer than that, by name, with the reason why it is not cut."""

UPWARDS = {"optim.layerwise", "weights.residents"}
"""Not turned round yet."""


def wing(file: str) -> str:
    return file.split(".")[0]


@cache
def imports(source: str) -> list[str]:
    """All modules that a source imports at module level or below, dotted."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names] if node.module else []
    return found


def offences(file: str, source: str) -> list[str]:
    """What a file imports that it may not."""
    wrong: list[str] = []
    if file in UPWARDS:
        return wrong
    for module in imports(source):
        top, _, rest = module.partition(".")
        if top == "sp_lightning" and wing(rest) in WINGS:
            upwards = WINGS.index(wing(rest)) > WINGS.index(wing(file))
            if upwards or (rest.startswith("__") and wing(file) != "__main__"):
                wrong.append(module)
        if top in ("lightning", "pytorch_lightning") and wing(file) not in MAY_IMPORT_LIGHTNING:
            wrong.append(module)
    return wrong


@pytest.mark.parametrize("file", FILES)
def test_imports_go_down(file: str) -> None:
    assert wing(file) in WINGS, "a new wing needs its place in the order"
    assert offences(file, FILES[file]) == []


@pytest.mark.parametrize("name", sorted({wing(file) for file in FILES}))
def test_no_file_of_a_wing_imports_itself_by_way_of_others(name: str) -> None:
    within = {
        file: {
            other
            for other in FILES
            if any(f"{module}.".startswith(f"sp_lightning.{other}.") for module in imports(source))
        }
        - {file}
        for file, source in FILES.items()
        if wing(file) == name
    }
    list(graphlib.TopologicalSorter(within).static_order())  # raises CycleError


def test_the_import_check_can_fail() -> None:
    assert offences("plan.plan", "from sp_lightning.engine.streamer import Streamer") == [
        "sp_lightning.engine.streamer.Streamer"
    ]
    assert offences("weights.slots", "import lightning.pytorch as pl") == ["lightning.pytorch"]
    assert offences("weights.slots", "from sp_lightning.store.block import HostBlock") == []


LIGHTNINGS = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")
COMPAT = "trainer.compat"
OF_TORCH = {("optim.fused", "_device")}
"""Private names of torch that Lightning has, too: here that of ``torch.amp.GradScaler``."""
INHERITED = frozenset(
    name
    for base in (SingleDeviceStrategy(), Callback(), TorchCheckpointIO())
    for name in dir(base)
    if name.startswith("_") and not name.startswith("__")
)
"""The private attributes of the classes of Lightning that classes of this package derive from."""


def private_attributes(source: str) -> Iterator[tuple[str, bool]]:
    """All private attributes that a source uses, by name, and whether it uses them on ``self``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            yield node.attr, isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


COVERED = frozenset(name for name, _ in private_attributes(FILES[COMPAT]))
"""The private attributes of Lightning that ``compat`` uses for everybody."""


def privates_of_lightning(file: str, source: str) -> list[str]:
    """What a file uses of Lightning that is private."""
    imported = [
        module
        for module in imports(source)
        if module.split(".")[0] in LIGHTNINGS and any(part.startswith("_") for part in module.split("."))
    ]
    return imported + [
        name
        for name, on_self in private_attributes(source)
        if name in (INHERITED if on_self else COVERED) and (file, name) not in OF_TORCH
    ]


@pytest.mark.parametrize("file", [file for file in FILES if file != COMPAT])
def test_one_file_knows_what_is_private_in_lightning(file: str) -> None:
    assert privates_of_lightning(file, FILES[file]) == []


def test_the_check_of_private_names_can_fail() -> None:
    assert "_skip_backward" in COVERED
    assert "_root_device" in INHERITED
    source = """
from lightning.fabric.utilities.init import _EmptyInit
from lightning.pytorch.strategies import Strategy
import pytorch_lightning._graveyard

class Mine(Strategy):
    def run(self):
        self._window = self._root_device
        return self.trainer.fit_loop._skip_backward
"""
    assert sorted(privates_of_lightning("trainer.strategy", source)) == [
        "_root_device",
        "_skip_backward",
        "lightning.fabric.utilities.init._EmptyInit",
        "pytorch_lightning._graveyard",
    ]


def lengths(file: str, source: str) -> Iterator[tuple[str, str, int]]:
    """Kind, name and lines of a file and of everything in it; docstrings of classes and functions do not count."""
    yield "file", file, len(source.splitlines())
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            text = ast.get_docstring(node, clean=False)
            documented = 0 if text is None else (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            yield kind, f"{file}.{node.name}", lines - documented


@pytest.mark.parametrize("file", FILES)
def test_nothing_is_longer_than_a_reader_can_hold(file: str) -> None:
    long = {name: lines for kind, name, lines in lengths(file, FILES[file]) if lines > MOST_LINES[kind]}
    assert {name: lines for name, lines in long.items() if name not in EXCEPTIONS} == {}


def test_every_exception_is_still_needed() -> None:
    long = {
        name
        for file, source in FILES.items()
        for kind, name, lines in lengths(file, source)
        if lines > MOST_LINES[kind]
    }
    assert set(EXCEPTIONS) - long == set()
    assert all(EXCEPTIONS.values())


def test_the_length_check_can_fail() -> None:
    body = "".join(f"    x = {i}\n" for i in range(50))
    found = {name: (kind, lines) for kind, name, lines in lengths("a", f'def f():\n    """Doc."""\n{body}')}
    assert found == {"a": ("file", 52), "a.f": ("function", 51)}


@pytest.mark.parametrize("file", FILES)
def test_one_file_touches_the_accelerator(file: str) -> None:
    used = {
        node.attr
        for node in ast.walk(ast.parse(FILES[file]))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
    }
    assert file == "device.device" or not used & {"cuda", "accelerator", "Stream", "Event", "xpu", "mps"}


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
