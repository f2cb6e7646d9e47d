"""The shape of the test-suite: a folder for each folder of the package, and helpers in ``tests/support``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sp_lightning
from tests.support.source import GROUPS, imports

TESTS = Path(__file__).parents[1]
FILES = {path.relative_to(TESTS).as_posix(): path.read_text() for path in sorted(TESTS.rglob("*.py"))}
BESIDE_THE_PACKAGE = {
    "conformance",
    "endurance",
    "equality",
    "examples",
    "gpu",
    "packages",
    "repository",
    "support",
}


def imported_test_files(source: str) -> list[str]:
    """What a source imports from files of tests; helpers live in ``tests/support``."""
    return [
        module
        for module in imports(source)
        if module.startswith("tests.") and any(part.startswith("test_") for part in module.split(".")[:-1])
    ]


@pytest.mark.long("takes a second or more")
def test_no_helper_is_imported_from_a_test_file() -> None:
    assert {file: wrong for file, source in FILES.items() if (wrong := imported_test_files(source))} == {}


def test_the_import_check_can_fail() -> None:
    assert imported_test_files("from tests.experts.test_tables import Text") == ["tests.experts.test_tables.Text"]
    assert imported_test_files("from tests.support.models import test_case") == []


def test_the_folders_are_those_of_the_package() -> None:
    package = Path(sp_lightning.__file__).parent
    folders_of_package = {path.parent.name for path in package.rglob("*/__init__.py")}
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - BESIDE_THE_PACKAGE <= folders_of_package
    assert [path.name for path in TESTS.glob("test_*.py")] == []


def test_contributing_names_the_tests_of_each_folder() -> None:
    rows = re.findall(
        r"^\| ([^|]+) \| `(tests/[^|]+)` \|$", (TESTS.parent / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    named = {name for folders, _ in rows for name in re.findall(r"`(\w+)`", folders)}
    folders = {path.parent.name for path in Path(sp_lightning.__file__).parent.rglob("*/__init__.py")}
    assert named == folders - set(GROUPS)
    assert [path for _, paths in rows for path in paths.split() if not (TESTS.parent / path).exists()] == []
