"""The pages that users read, and what is shown there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """Markdown without its fenced blocks."""
    return _FENCE.sub("", text)


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs, list items and table cells, each in one line. Headings and pictures are left out."""
    words: list[str] = []
    for line in [*map(str.strip, prose(text).splitlines()), ""]:
        if not line or line.startswith(("#", "|", "![")) or _ITEM.match(line):
            yield " ".join(words)
            words = []
        if line.startswith("|"):
            yield from line.strip("|").split(" | ")
        elif line and not line.startswith(("#", "![")):
            words.append(_ITEM.sub("", line, count=1))


def sentences(text: str) -> list[str]:
    """Sentences of a Markdown page, with link texts in place of links."""
    found: list[str] = []
    for paragraph in _paragraphs(text):
        read = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
        found += filter(None, re.split(r"(?<=[.?!])[)*]*\s+", read.strip()))
    return found
