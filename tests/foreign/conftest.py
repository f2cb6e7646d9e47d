"""Tests of this folder need the plugin, and the plugin needs the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.foreign.plugin import MISSING


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.has_plugin("tests.foreign.plugin"):
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip(f"runs with -p tests.foreign.plugin ({MISSING})"))
