"""How guides and README are written: each guide says when to read it, in plain words, and names the options' defaults."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from sp_lightning import SuperpipelineStrategy
from tests.support.pages import ROOT, prose, sentences

FOLDER = ROOT / "examples" / "guide"
PAGES = sorted(FOLDER.glob("*.md"))
GUIDES = [page for page in PAGES if page.name != "README.md"]
README = ROOT / "README.md"

AVOIDED = re.compile(r"\b(?:is no|none of|so many|on paper|but for|of yours)\b", re.IGNORECASE)
EMPTY_LINK = re.compile(r"\[(?:here|there|this|yours)\]\(", re.IGNORECASE)
MOST_WORDS = 30


def stem(page: Path) -> str:
    return page.stem


@pytest.mark.parametrize("page", GUIDES, ids=stem)
def test_each_begins_with_the_case_in_which_one_reads_it(page: Path) -> None:
    title, _, first = page.read_text().splitlines()[:3]
    assert title.startswith("# ")
    assert re.match(r"Read this (when|if|before|to) ", first), first


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_phrases_that_readers_stop_at_are_avoided(page: Path) -> None:
    text = " ".join(prose(page.read_text()).split())
    assert AVOIDED.findall(text) == []


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_text_of_a_link_names_its_target(page: Path) -> None:
    assert EMPTY_LINK.findall(page.read_text()) == []


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_sentences_are_short(page: Path) -> None:
    assert [each for each in sentences(page.read_text()) if len(each.split()) > MOST_WORDS] == []


def test_the_rules_find_what_they_forbid() -> None:
    assert AVOIDED.findall("There is no doubt. A hook of yours; of yourself, this none.") == ["is no", "of yours"]
    assert EMPTY_LINK.search("as said [There](memory.md)")
    assert not EMPTY_LINK.search("[this class](memory.md)")
    page = "# A. B\n\nOne [two](x.y). Three?\nfour\n- Five.\n\n```python\nsix.\n```\n| seven | eight. nine |\n"
    assert sentences(page) == ["One two.", "Three?", "four", "Five.", "seven", "eight.", "nine"]


# ------------------------------------------------------------------ options.md and the signature


def _options() -> dict[str, tuple[str, str]]:
    """By name, the default and the text that options.md has for it."""
    items = re.findall(
        r"^- ((?:`\w+`, )*`\w+`) \(`(.+?)`\): (.+?)(?=\n\n|\n- |\Z)", _read_options(), re.MULTILINE | re.DOTALL
    )
    return {name: (default, text) for names, default, text in items for name in re.findall(r"\w+", names)}


def _read_options() -> str:
    return (FOLDER / "options.md").read_text()


def _choices(hint: Any) -> Iterator[str]:
    """The strings of the Literals in an annotation, except in what a mapping holds."""
    for part in get_args(hint):
        if isinstance(part, str):
            yield part
        elif "Mapping" not in str(part):
            yield from _choices(part)


def test_defaults_of_options_are_those_of_the_signature() -> None:
    parameters = signature(SuperpipelineStrategy).parameters
    shown = {name: ast.literal_eval(default) for name, (default, _) in _options().items()}
    assert shown == {name: parameter.default for name, parameter in parameters.items()}


def test_choices_of_options_are_those_of_the_signature() -> None:
    hints = get_type_hints(SuperpipelineStrategy.__init__)
    choices = {name: set(_choices(hints[name])) for name in _options()}
    assert choices["optimizer_on"] == {"cpu", "gpu", "auto"}
    for name, (default, text) in _options().items():
        missing = [each for each in choices[name] if f'`"{each}"`' not in f"`{default}` {text}"]
        assert missing == [], name
