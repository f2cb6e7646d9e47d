"""What a source file imports."""

from __future__ import annotations

import ast
from functools import cache

GROUPS = ("core", "capabilities", "experimental", "tools")
"""The folders of the package that hold other folders."""


def folder(module: str) -> str:
    """Returns the folder of a file, both without the package's name: ``core.engine`` for ``core.engine.step``."""
    first, *rest = module.split(".")
    return f"{first}.{rest[0]}" if first in GROUPS and rest else first


@cache
def imports(source: str, *, for_types: bool = True) -> list[str]:
    """All modules that a source imports at module level or below, dotted; those for annotations alone if asked for."""
    found = []
    tree = ast.parse(source)
    if not for_types:
        tree.body = [
            node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names] if node.module else []
    return found
