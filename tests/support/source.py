"""What a source file imports, and how long it and what it contains are."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache


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


NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Lines of a source that have code: docstrings, comments and blank lines do not count."""
    strings = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    documented = {line for node in strings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for each in tokens if each.type not in NO_CODE for line in range(each.start[0], each.end[0] + 1)}
    return len(lines - documented)
