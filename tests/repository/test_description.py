"""README's links on a package index: ``setup.py`` makes them absolute, once ``pyproject.toml`` has the repository's address."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGE = "![a table](examples/a.png) in [the guide](examples/guide/a.md#here), [below](#exact), [paper](https://arxiv.org/abs/1)"


@pytest.fixture
def description() -> Callable[[str, str | None, str], str]:
    found: Callable[[str, str | None, str], str] = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")[
        "description"
    ]
    return found


def test_links_lead_to_the_tag_of_the_version(description: Callable[[str, str | None, str], str]) -> None:
    assert description(PAGE, "https://host/us/it", "0.1.0") == (
        "![a table](https://host/us/it/raw/v0.1.0/examples/a.png) in "
        "[the guide](https://host/us/it/blob/v0.1.0/examples/guide/a.md#here), "
        "[below](https://host/us/it/blob/v0.1.0/README.md#exact), [paper](https://arxiv.org/abs/1)"
    )


def test_no_link_of_readme_stays_relative(description: Callable[[str, str | None, str], str]) -> None:
    assert re.findall(r"\]\((?!https://)", description(README, "https://host/us/it", "0.1.0")) == []


def test_without_an_address_links_stay_relative(description: Callable[[str, str | None, str], str]) -> None:
    """They work in the source distribution: ``.ci/wheel`` follows them there."""
    assert description(README, None, "0.1.0") == README
