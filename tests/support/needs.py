"""Tests that need a capability which has no error of its own when its folder is missing."""

from __future__ import annotations

from importlib import import_module


def needs(folder: str) -> None:
    """Raises ModuleNotFoundError if the folder is missing. ``tests/support/without.py`` then leaves out the test."""
    import_module(f"sp_lightning.{folder}")
