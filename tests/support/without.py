"""A pytest plugin that runs the tests of an installation that lacks one capability.

``python -m pytest -p tests.support.without --without capabilities.disk`` leaves out

- the test files of the capability, and files that import it when they are loaded, directly or through ``tests.support``;
- each test that fails with the error that the capability is missing.

All other tests have to pass. The number of tests that were left out is printed at the end, by file: otherwise nobody would notice
if all were left out. ``python -m tests.repository.deletion`` removes the folder from a copy of the project and uses this plugin.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from sp_lightning.registry import CAPABILITIES
from tests.support.repository import folder as folder_of

ROOT = Path(__file__).parents[2]
LEFT_OUT = pytest.StashKey[Counter[str]]()
"""The number of tests that were left out, by file."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without", action="append", default=[], help="a capability that is not installed")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = Counter()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the files that cannot be loaded without the capability."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    for folder in config.getoption("--without"):
        if collection_path.is_relative_to(ROOT / "tests" / folder.rpartition(".")[2]) or folder in capabilities_of(
            collection_path
        ):
            config.stash[LEFT_OUT][f"{collection_path.relative_to(ROOT)} (needs {folder} to be loaded)"] += 1
            return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    return (yield from _skipped_if_missing(pyfuncitem.config, pyfuncitem.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(request: pytest.FixtureRequest) -> Iterator[None]:
    return (yield from _skipped_if_missing(request.config, request.node.nodeid))


def _skipped_if_missing(config: pytest.Config, test: str) -> Iterator[None]:
    try:
        return (yield)
    except BaseException as error:
        if config.getoption("--without") and _is_missing_error(error, config.getoption("--without")):
            config.stash[LEFT_OUT][test.partition("::")[0]] += 1
            pytest.skip(f"needs a capability that is not installed: {error}")
        raise


def _is_missing_error(error: BaseException | None, folders: list[str]) -> bool:
    """Returns True if an error, or one that it was raised from, is raised because one of the folders is missing."""
    while error is not None:
        for folder in folders:
            if f"sp_lightning/{folder.replace('.', '/')}, which" in str(
                error
            ):  # MissingCapabilityError, also if it is wrapped
                return True
            if isinstance(error, ModuleNotFoundError) and f"{error.name}.".startswith(f"sp_lightning.{folder}."):
                return True
        error = error.__cause__ or error.__context__
    return False


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = config.stash[LEFT_OUT]
    for file, count in sorted(left_out.items()):
        terminalreporter.write_line(f"left out: {count} × {file}")


@cache
def capabilities_of(file: Path) -> frozenset[str]:
    """Returns the folders of the package that a test file imports while it is loaded.

    Imports are followed through files of ``tests``, and through capabilities: the planner, for example, imports others.
    """
    found: set[str] = set()
    seen = {file}
    waiting = [file]
    while waiting:
        for module in _imported_while_loading(waiting.pop().read_text()):
            parts = module.split(".")
            if parts[0] == "sp_lightning" and len(parts) > 1:
                found.add(here := folder_of(".".join(parts[1:])))
            is_capability = parts[0] == "sp_lightning" and len(parts) > 1 and here in CAPABILITIES
            if parts[0] == "tests" or is_capability:
                for end in range(2, len(parts) + 1):  # the last part may be a name in a file
                    path = ROOT.joinpath(*parts[:end]).with_suffix(".py")
                    if path.exists() and path not in seen:
                        seen.add(path)
                        waiting.append(path)
    return frozenset(found)


def _imported_while_loading(source: str) -> Iterator[str]:
    """Iterates over the dotted names that a source imports while it is loaded: not in functions, nor for annotations."""
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)
