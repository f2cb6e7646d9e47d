"""The shape of the package: wings whose imports go down, small files, one file that touches the accelerator."""

from __future__ import annotations

import ast
import graphlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

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
