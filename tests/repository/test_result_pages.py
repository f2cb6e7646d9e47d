"""Commands in dated pages have the options of their day. Those that were renamed since stand in one table, which a page names."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from tests.support.pages import ROOT

NOTE = ROOT / "examples" / "results" / "README.md"
PAGES = sorted({*(ROOT / "examples").rglob("results/**/*.md"), *(ROOT / "tests").rglob("results/**/*.md")} - {NOTE})
OLD = "python -m sp_lightning plan a.json --batch 4 --tokens 8 \\\n  --dram 5GB/s | tail --lines 3"


def options_of_plan(text: str) -> set[str]:
    """The options in commands of ``plan``, in whole or in part."""
    found: set[str] = set()
    for command in re.findall(r"sp_lightning plan ((?:[^`\n\\]|\\.|\\\n)*)", text):
        found.update(re.findall(r"(?<![\w-])--[a-z][a-z-]*", command.split("|")[0]))
    return found


def known() -> set[str]:
    """The options of ``plan`` today."""
    from sp_lightning.planner.arguments import make_parser

    (commands,) = (each for each in make_parser()._actions if isinstance(each, argparse._SubParsersAction))
    return {name for action in commands.choices["plan"]._actions for name in action.option_strings}


def renamed() -> set[str]:
    """The options in the table "Names that changed" that are no longer there."""
    table = (ROOT / "CONTRIBUTING.md").read_text().split("## Names that changed")[1].split("\n## ")[0]
    (row,) = re.findall(r"^\| `plan (--.+?) \| ", table, re.MULTILINE)
    return set(re.findall(r"--[a-z-]+", row))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_options_that_plan_no_longer_has_are_in_the_table(page: Path) -> None:
    assert options_of_plan(page.read_text()) - known() <= renamed()


def test_readers_of_old_pages_find_the_table() -> None:
    assert "CONTRIBUTING.md#names-that-changed" in NOTE.read_text()
    assert "results/README.md" in (ROOT / "examples" / "guide" / "README.md").read_text()


def test_old_options_are_found() -> None:
    assert options_of_plan(OLD) - known() == {"--batch", "--dram"}
    assert not renamed() & known()
