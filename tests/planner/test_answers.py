"""The tables of ``answers.py``: what ``plan`` says of models with options, and of bad input."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import pytest

from sp_lightning.tools.planner.arguments import REMOVED
from tests.planner.answers import ANSWERS, REFUSALS, Row, differs, read, run
from tests.planner.models import write_configs

WRITE = "python -m tests.planner.answers --write"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_configs(tmp_path_factory.mktemp("configs"))


@pytest.fixture(autouse=True)
def _in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def rows(table: Path) -> list[Any]:
    """The first tier has the answers of the two smallest models without an option."""

    def marks(row: Row) -> tuple[pytest.MarkDecorator, ...]:
        if row.slow:
            return (pytest.mark.long(row.slow),)
        quick = table == REFUSALS or row.command.endswith(("models:Known --k 1", "models:Wide --k 1 --k-prime 1"))
        return () if quick else (pytest.mark.rest("a batch without values"),)

    return [pytest.param(row, id=row.command, marks=marks(row)) for row in read(table)]


def compare(table: Path, row: Row) -> None:
    said = run(row.command)
    difference = "\n".join(difflib.unified_diff(row.said, said, "the table", "now", lineterm="", n=0))
    assert not differs(row, said, table.read_text().splitlines()[0]), (
        f"$ {row.command}\n{difference}\nIf this is meant: {WRITE}"
    )


@pytest.mark.parametrize("row", rows(ANSWERS))
def test_answers(row: Row) -> None:
    compare(ANSWERS, row)


@pytest.mark.parametrize("row", rows(REFUSALS))
def test_refusals(row: Row) -> None:
    compare(REFUSALS, row)
    assert row.said[-1] == "exit status 2"
    assert len(row.said) == 2, "one line"


def test_each_removed_option_is_refused() -> None:
    refused = [row.command for row in read(REFUSALS)]
    assert [option for option in REMOVED if not any(f" {option}" in command for command in refused)] == []
