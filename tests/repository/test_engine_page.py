"""The numbers in the engine's docstring stand beside the lines that do what it says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import sp_lightning
from sp_lightning.core import engine

PACKAGE = Path(sp_lightning.__file__).parent / "core"
NUMBER = re.compile(r"# \((\d)\)$")


def methods(tree: ast.AST) -> Iterator[tuple[str, range]]:
    """The methods in a file, each with its lines."""
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for method in (node for node in kind.body if isinstance(node, ast.FunctionDef)):
            assert method.end_lineno is not None
            yield f"{kind.name}.{method.name}", range(method.lineno, method.end_lineno + 1)


def numbered_lines() -> dict[int, str]:
    """The methods that the numbers in comments are in."""
    found = {}
    for file in (*(PACKAGE / "engine").glob("*.py"), *(PACKAGE / "layers").glob("*.py")):
        text = file.read_text()
        of_file = list(methods(ast.parse(text)))
        for at, line in enumerate(text.splitlines(), 1):
            if match := NUMBER.search(line):
                assert int(match[1]) not in found, f"({match[1]}) stands twice"
                found[int(match[1])] = next(name for name, lines in of_file if at in lines)
    return found


@pytest.mark.rest("takes tenths of a second")
def test_numbers_of_the_page_are_those_beside_the_code() -> None:
    rows = re.findall(r"^(\d) +(\w+\.\w+) ", engine.__doc__ or "", re.MULTILINE)
    assert {int(number): name for number, name in rows} == numbered_lines()
    assert len(rows) == 9
