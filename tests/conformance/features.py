"""The list of Lightning's features that are compared, which each test adds its own to."""

from __future__ import annotations

from collections.abc import Callable

LOGGING = "Logging and profiling"
GROUPS = (
    "Checkpoints", "Callbacks", LOGGING, "Loops and flags", "Optimization", "Hooks", "Precision",
    "Set-up and data", "Command line",
)  # fmt: skip
FEATURES: list[tuple[str, str, Callable[..., None]]] = []


def feature(group: str, *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Names what a test is about."""
    assert group in GROUPS

    def note(test: Callable[..., None]) -> Callable[..., None]:
        FEATURES.extend((group, name, test) for name in names)
        return test

    return note
