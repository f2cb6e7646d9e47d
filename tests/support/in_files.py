"""Runs whose weights stay in their files, although host memory has room for them."""

from __future__ import annotations

import pytest
from torch import nn


def stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever can stay in its file does."""
    from sp_lightning.capabilities.disk import tier as disk_tier

    monkeypatch.setattr(disk_tier, "choose_in_files", lambda sizes, *_: list(sizes))


def in_file(parameter: nn.Parameter) -> bool:
    """Whether a parameter has no values but those of its file."""
    from sp_lightning.capabilities.disk.weights_in_files import place_of

    return place_of(parameter) is not None


def in_memory(module: nn.Module) -> list[str]:
    """The names of the parameters that have values of their own."""
    return [name for name, parameter in module.named_parameters() if not in_file(parameter)]
