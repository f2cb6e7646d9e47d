"""Each guide says when to read it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDES = [
    page for page in sorted((Path(__file__).parents[2] / "examples" / "guide").glob("*.md")) if page.name != "README.md"
]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_each_begins_with_the_case_in_which_one_reads_it(page: Path) -> None:
    title, _, first = page.read_text().splitlines()[:3]
    assert title.startswith("# ")
    assert re.match(r"Read this (when|if|before|to) ", first), first
