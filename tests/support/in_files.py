"""Runs whose weights stay in their files, although host memory has room for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sp_lightning.store.file_block import FileBlock
from sp_lightning.trainer import disk_tier


def stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever can stay in its file does."""
    monkeypatch.setattr(disk_tier, "choose_in_files", lambda sizes, *_: list(sizes))


def brought_to_memory(monkeypatch: pytest.MonkeyPatch, name_of: Callable[[FileBlock, int], str]) -> list[str]:
    """The weights that come to memory from now on, each under the name that it is given, each name once."""
    names: list[str] = []
    bring = FileBlock.bring

    def noted(self: FileBlock, index: int) -> None:
        if index in self.in_file and name_of(self, index) not in names:
            names.append(name_of(self, index))
        bring(self, index)

    monkeypatch.setattr(FileBlock, "bring", noted)
    return names
