"""The page of results: whole tables, whose rows the programs print, and every dated page that it names was one."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from tests.support.results import HEAD, result_row

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "examples" / "results" / "README.md").read_text()


def cells(line: str) -> int:
    return len(re.split(r"(?<!\\)\|", line)) - 2


def test_each_row_of_a_table_has_the_cells_of_its_head() -> None:
    rows = [pair for pair in pairwise(PAGE.splitlines()) if all(line.startswith("|") for line in pair)]
    assert len(rows) > 50
    assert [row for above, row in rows if cells(above) != cells(row)] == []


def test_programs_print_a_row_of_the_page() -> None:
    assert HEAD in PAGE
    row = result_row("Fifty kills", "48 resumed", "python -m tests.endurance.test_kills")
    assert cells(row) == cells(HEAD)


def test_python_code_names_no_page_that_is_gone() -> None:
    """Comments quoted dated pages, which left."""
    files = [path for folder in ("sp_lightning", "tests", "examples") for path in (ROOT / folder).rglob("*.py")]
    dated = re.compile(r"results/\d{4}-\d\d-\d\d[\w-]*\.\w+")
    named = [each for path in files for each in dated.findall(path.read_text())]
    assert [each for each in named if not (ROOT / "examples" / each).exists()] == []
    headings = set(re.findall(r"^## (.+)$", PAGE, re.MULTILINE))
    quoted = [
        each for path in files for each in re.findall(r"results/README\.md(?:``)?, ([A-Z][\w ]+)", path.read_text())
    ]
    assert len(quoted) >= 5
    assert set(quoted) <= headings


NUMBER = r"(?<![\w.-])(\d[\d,]*\.\d+|\d[\d,]*(?= ?(?:%|s\b|ms|ns|µs|times|[GMK]i?B\b)))"


def figures(text: str) -> set[str]:
    """The figures of a text, without those in code, links and other pages' records."""
    prose = re.sub(r"`[^`]*`", "", re.sub(r"\]\((?!\S*results/README)[^)]*\)", "]", text))
    return {each.replace(",", "") for each in re.findall(NUMBER, prose)}


def quoting(page: Path) -> list[str]:
    """The sentences and rows of a page that link to the results."""
    parts = re.split(r"(?<=\.)\s+(?=[A-Z*`\[])|\n", page.read_text())
    return [part for part in parts if "results/README.md" in part]


def test_figures_beside_a_link_to_the_page_are_in_it() -> None:
    pages = [ROOT / "README.md", *(ROOT / "examples" / "guide").glob("*.md")]
    quoted = {figure for page in pages for part in quoting(page) for figure in figures(part)}
    assert len(quoted) > 10
    known = set(re.findall(r"\d+(?:\.\d+)?", PAGE.replace(",", "")))
    assert {each for each in quoted if each not in known and not any(is_rounded(each, more) for more in known)} == set()


def is_rounded(figure: str, more: str) -> bool:
    return "." in figure and more.startswith(figure)
