"""What is in the repository: what a source imports, the blocks of a page, a row of results."""

from __future__ import annotations

import ast
import os
import platform
import re
import subprocess
from datetime import date
from functools import cache
from pathlib import Path

import lightning
import torch

ROOT = Path(__file__).parents[2]
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


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


HEAD = "| claim | figure | machine, date | command | commit | page |"


def result_row(claim: str, figure: str, command: str) -> str:
    """Returns the row of a run on the CPU that ends now. The new row has no old page."""
    git = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, lightning {lightning.__version__}"
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {versions}, {date.today()}"
    return f"| {claim} | {figure} | {machine} | `{command}` | {git.stdout.strip()} | – |"
