"""A clock for the recipe that has so many hours, so that no test depends on how fast the machine is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import timer

from examples.demos import hours


class Killed(Exception):
    pass


class Ticks:
    """A clock that goes on by so much whenever it is read, and fails at a time."""

    def __init__(self, tick: float = 0.5, until: float = 1e9) -> None:
        self.tick, self.until, self.time = tick, until, 1000.0

    def __call__(self) -> float:
        self.time += self.tick
        if self.time > 1000 + self.until:
            raise Killed
        return self.time

    def tick_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Has the recipe and Lightning's timer read this clock."""
        monkeypatch.setattr(hours, "now", self)
        monkeypatch.setattr(timer, "time", SimpleNamespace(monotonic=lambda: self.time))
