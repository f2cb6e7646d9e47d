"""Figures in the guides beside a link to the page of results are in that page."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "examples" / "results" / "README.md").read_text()


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
