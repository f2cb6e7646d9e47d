"""Defaults and choices in the guide to the options are those of the strategy's signature."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from inspect import Parameter, signature
from typing import Any, get_args, get_type_hints

from sp_lightning import SuperpipelineStrategy
from tests.support.repository import ROOT

PAGE = ROOT / "examples" / "guide" / "options.md"


def _options() -> dict[str, tuple[str, str]]:
    """By name, the default and the text that options.md has for it."""
    items = re.findall(
        r"^- ((?:`\w+`, )*`\w+`) \(`(.+?)`\): (.+?)(?=\n\n|\n- |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    return {name: (default, text) for names, default, text in items for name in re.findall(r"\w+", names)}


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
    assert {parameter.kind for parameter in parameters.values()} == {Parameter.KEYWORD_ONLY}


def test_choices_of_options_are_those_of_the_signature() -> None:
    hints = get_type_hints(SuperpipelineStrategy.__init__)
    choices = {name: set(_choices(hints[name])) for name in _options()}
    assert choices["optimizer_on"] == {"cpu", "gpu"}
    for name, (default, text) in _options().items():
        missing = [each for each in choices[name] if f'`"{each}"`' not in f"`{default}` {text}"]
        assert missing == [], name
