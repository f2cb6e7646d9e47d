"""The guides stay short, and each says when to read it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDES = [
    page for page in sorted((Path(__file__).parents[2] / "examples" / "guide").glob("*.md")) if page.name != "README.md"
]
MOST_WORDS = 7400


def words(text: str) -> list[str]:
    """The words of a page: what has a letter or a digit outside of blocks of code and of what they print."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [word for word in prose.split() if re.search(r"\w", word)]


def test_words_are_counted() -> None:
    assert words("# A page\n\n```python\nx = 1\n```\n\n| `k` | 2 |\n|---|---|\n- three …") == [
        "A",
        "page",
        "`k`",
        "2",
        "three",
    ]


def test_the_guides_together_are_read_in_half_an_hour() -> None:
    """They had 8,000 words, which few would read; what a guide gains, another one loses. "A day on one card" has 370."""
    assert len(GUIDES) > 1
    assert sum(len(words(page.read_text())) for page in GUIDES) <= MOST_WORDS


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_each_begins_with_the_case_in_which_one_reads_it(page: Path) -> None:
    title, _, first = page.read_text().splitlines()[:3]
    assert title.startswith("# ")
    assert re.match(r"Read this (when|if|before|to) ", first), first
