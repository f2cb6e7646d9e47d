"""The third tier in parts: each run of the gate takes one, and forty runs take all (``.ci/part``)."""

from __future__ import annotations

import zlib

import pytest

PARTS = 40


def part_of(nodeid: str) -> int:
    """The part of a test, from 0 to 39. It depends on the test's name alone, so that other tests may come and go."""
    return zlib.crc32(nodeid.encode()) % PARTS


def number(text: str) -> int:
    """The part that ``--part`` names.

    Raises:
        pytest.UsageError: if there is no such part.
    """
    if not text.isdecimal() or int(text) >= PARTS:
        raise pytest.UsageError(f"--part: got {text!r}. Expected a number from 0 to {PARTS - 1}")
    return int(text)


def keep_one_part(config: pytest.Config, items: list[pytest.Item], part: int) -> None:
    """Deselects the tests of the third tier that belong to other parts."""
    left_out = [item for item in items if item.get_closest_marker("long") and part_of(item.nodeid) != part]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
