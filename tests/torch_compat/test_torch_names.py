"""Each private name of torch is there; if one is not, the feature that depends on it is named.

The files that use them are read, not imported: with one name missing, the import of ``private`` fails as a whole.
``python -m tests.torch_compat.test_torch_names`` prints the same for the torch that is installed.
"""

from __future__ import annotations
import __future__

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.torch_compat.features import FEATURES

_PACKAGE = Path(__file__).parents[2] / "sp_lightning"
FILES = {"private": (_PACKAGE / "core" / "torch_compat" / "private.py").read_text()}
if (_PACKAGE / "tools" / "planner").exists():
    FILES["fake"] = (_PACKAGE / "tools" / "planner" / "fake.py").read_text()


def missing(source: str) -> dict[str, str]:
    """Each public name of a file that the installed torch cannot give, with the reason."""
    found: dict[str, str] = {}
    namespace: dict[str, Any] = {}
    lost: dict[str, str] = {}  # imports that have failed, and what is made of them
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            lost |= _import(node, namespace)
            continue
        reasons = [*_run(node, namespace), *_resolve(node, namespace)]
        reasons += [lost[each.id] for each in ast.walk(node) if isinstance(each, ast.Name) and each.id in lost]
        if reasons:
            name = _defined(node)
            lost[name] = found[name] = reasons[0]
    return {name: why for name, why in found.items() if not name.startswith("_")}


def _defined(node: ast.stmt) -> str:
    """The name that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    target: Any = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) else ""


def public(source: str) -> set[str]:
    """Returns the public names that a file defines, except ``Kind``, a type that uses nothing of torch."""
    names = {_defined(node) for node in ast.parse(source).body}
    return {name for name in names if name and not name.startswith("_")} - {"Kind"}


def _import(node: ast.Import | ast.ImportFrom, namespace: dict[str, Any]) -> dict[str, str]:
    lost = {}
    for alias in node.names:
        name = alias.asname or alias.name
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sp_lightning"):
            namespace[name] = mock.MagicMock()  # it is looked at in its own file
            continue
        one: Any = ast.Import([alias]) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, [alias], 0)
        for why in _run(one, namespace):
            lost[name] = why
    return lost


def _run(node: ast.stmt, namespace: dict[str, Any]) -> Iterator[str]:
    module = ast.fix_missing_locations(ast.Module([node], []))
    try:
        exec(compile(module, "<private>", "exec", __future__.annotations.compiler_flag), namespace)
    except Exception as error:
        yield f"{type(error).__name__}: {error}"


def _resolve(node: ast.stmt, namespace: dict[str, Any]) -> Iterator[str]:
    """Names of torch that functions look up when they run, and places given as an object and a name."""
    for each in ast.walk(node):
        if isinstance(each, ast.ImportFrom):
            yield from _import(each, namespace).values()
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Load):
            path = ast.unparse(each).split(".")
            if path[0] in namespace and all(part.isidentifier() for part in path):
                yield from _lacks(namespace[path[0]], path)
    value = getattr(node, "value", None)
    if (
        isinstance(value, ast.Tuple)
        and isinstance(value.elts[0], ast.Name)
        and isinstance(value.elts[-1], ast.Constant)
    ):
        yield from _lacks(namespace.get(value.elts[0].id), [value.elts[0].id, str(value.elts[-1].value)])
    if isinstance(value, ast.Tuple) and isinstance(value.elts[0], ast.Attribute):
        holder = ast.unparse(value.elts[0])
        if isinstance(value.elts[-1], ast.Constant):
            yield from _lacks(namespace.get(holder.split(".")[0]), [*holder.split("."), str(value.elts[-1].value)])


def _lacks(value: Any, path: list[str]) -> Iterator[str]:
    if not isinstance(value, ModuleType | type):
        return
    for at, part in enumerate(path[1:], 1):
        if not hasattr(value, part):
            yield f"{'.'.join(path[:at])} has no {part}"
            return
        value = getattr(value, part)
        if not isinstance(value, ModuleType | type):
            return


NAMES = [(file, name) for file in FILES for name in FEATURES[file]]


@pytest.fixture(scope="module")
def lacking() -> dict[str, dict[str, str]]:
    return {file: missing(source) for file, source in FILES.items()}


@pytest.mark.parametrize(("file", "name"), NAMES, ids=[name for _, name in NAMES])
def test_torch_has_the_name(file: str, name: str, lacking: dict[str, dict[str, str]]) -> None:
    why = lacking[file].get(name)
    assert why is None, _line(file, name, why)


def _line(file: str, name: str, why: str | None) -> str:
    return f"torch {torch.__version__}: {name} of {file}.py fails ({why}). It is for: {FEATURES[file][name]}."


@pytest.mark.parametrize("file", FILES)
def test_each_name_has_its_feature(file: str) -> None:
    assert FEATURES[file].keys() == public(FILES[file])


@pytest.mark.parametrize(
    ("holder", "attribute", "names"),
    [
        (torch._C, "_current_graph_task_id", {"current_graph_task"}),
        (torch.autograd.forward_ad, "_current_level", {"forward_mode_level"}),
        (torch.jit._recursive, "create_script_module", {"SCRIPTING"}),  # type: ignore[attr-defined]
    ],
    ids=["a function", "inside of one", "a place"],
)
def test_a_name_that_torch_lacks_is_found(
    holder: Any, attribute: str, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(holder, attribute)
    assert missing(FILES["private"]).keys() == names


def test_a_module_that_torch_lacks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only names that are made of it fail; the others are still told apart."""
    monkeypatch.setitem(sys.modules, "torch._functorch", SimpleNamespace(pyfunctorch=None))
    monkeypatch.delattr(sys.modules["torch._functorch"], "pyfunctorch")
    assert missing(FILES["private"]).keys() == {"clear_transforms"}


if __name__ == "__main__":
    found = [_line(file, name, why) for file, source in FILES.items() for name, why in missing(source).items()]
    print("\n".join(found) or f"torch {torch.__version__} has all {len(NAMES)} names.")
