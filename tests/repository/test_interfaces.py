"""Methods by which capabilities enter at the core: each is called, so none overrides a name that the core no longer has."""

from __future__ import annotations

import ast
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import sp_lightning
from sp_lightning.core.engine.activations import Activations
from sp_lightning.registry import CAPABILITIES
from tests.support.source import folder

PACKAGE = Path(sp_lightning.__file__).parent

FOR_CAPABILITIES = {
    "HostBlock.show": "capabilities.gpu_steps",
    "LayerStepper.reserve": "capabilities.tuning",
    "RowFinder.routed_share": "tools.planner",
    "BackgroundUpdates.land_layers_of": "capabilities.gpu_steps",
}
"""Methods of the core that only a capability calls, and the capability."""


@dataclass(frozen=True)
class Use:
    """A place where an attribute of this name is read or called, not as ``super().name``."""

    folder: str
    classes: tuple[str, ...]


@cache
def uses() -> dict[str, list[Use]]:
    """All uses of attributes in the package, by the attribute's name."""
    found: dict[str, list[Use]] = {}

    def visit(node: ast.AST, place: str, classes: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Attribute) and not ast.unparse(child.value).startswith("super("):
                found.setdefault(child.attr, []).append(Use(place, classes))
            visit(child, place, (*classes, child.name) if isinstance(child, ast.ClassDef) else classes)

    for file in PACKAGE.rglob("*.py"):
        visit(ast.parse(file.read_text()), folder(".".join(file.relative_to(PACKAGE).with_suffix("").parts)), ())
    return found


@cache
def classes() -> list[type]:
    """All classes that the files of the package define at module level."""
    found = list[type]()
    for module in pkgutil.walk_packages(sp_lightning.__path__, "sp_lightning."):
        if not module.name.endswith(("__main__", "pytorch_lightning")):
            for value in vars(import_module(module.name)).values():
                if inspect.isclass(value) and value.__module__ == module.name:
                    found.append(value)
    return found


def folder_of(kind: type) -> str:
    return folder(kind.__module__.partition(".")[2])


@cache
def interfaces() -> list[type]:
    """The classes of the core from which a class of a capability derives, and protocols that capabilities implement.

    ``Device`` is not among them: it is a part that the planner simulates.
    """
    derived = [each for each in classes() if folder_of(each) in CAPABILITIES]
    core = [each for each in classes() if folder_of(each) not in (*CAPABILITIES, "core.device")]
    # Protocols with properties do not support issubclass.
    return [Activations, *(each for each in core if any(each in one.__mro__ for one in derived))]


def public(kind: type) -> Iterator[str]:
    """The public methods and properties that a class defines itself."""
    for name, value in vars(kind).items():
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            yield name


@pytest.mark.long("takes a second or more")
def test_the_core_calls_each_method_of_its_interfaces() -> None:
    uncalled = {
        f"{kind.__name__}.{name}"
        for kind in interfaces()
        for name in public(kind)
        if not any(use.folder not in CAPABILITIES and kind.__name__ not in use.classes for use in uses().get(name, []))
    }
    assert uncalled == set(FOR_CAPABILITIES)
    for name, capability in FOR_CAPABILITIES.items():
        assert any(use.folder == capability for use in uses()[name.partition(".")[2]]), name


@pytest.mark.long("takes a second or more")
def test_each_further_method_is_called_by_its_capability() -> None:
    """If the core renames a method, the capability's former override is never called."""
    uncalled = [
        f"{kind.__module__}.{kind.__name__}.{name}"
        for kind in classes()
        if folder_of(kind) in CAPABILITIES and any(base in interfaces() for base in kind.__mro__)
        for name in public(kind)
        if not any(hasattr(base, name) or name in inspect.get_annotations(base) for base in kind.__mro__[1:])
        and not any(use.folder == folder_of(kind) for use in uses().get(name, []))
    ]
    assert not uncalled


def test_interfaces_are_found() -> None:
    names = {each.__name__ for each in interfaces()}
    assert names >= {
        "StateStore",
        "Placement",
        "RowFinder",
        "LayerStepper",
        "Group",
        "RunScope",
        "BaseTuner",
    }
