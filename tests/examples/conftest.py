"""Data of all recipes for training, which are written once for a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.examples import small_recipes

    folder = tmp_path_factory.mktemp("recipes")
    small_recipes.write_all(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from tests.examples import small_recipes

    return small_recipes.small_tokenizer()


@pytest.fixture
def folder(small_data: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which has the data of all recipes. Small sizes of what the recipes do besides."""
    from tests.examples import small_recipes

    for each in small_data.iterdir():
        (tmp_path / each.name).symlink_to(each)
    monkeypatch.chdir(tmp_path)
    small_recipes.make_small(monkeypatch, tokenizer)
    return tmp_path
