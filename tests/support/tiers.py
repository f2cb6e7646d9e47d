"""Which tests run: what of a test's parameters is in which tier, parts of the third tier, and what a capability is needed for."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from typing import Any

import pytest


def first(
    values: Iterable[Any],
    *named: Any,
    if_: Callable[[Any], bool] | None = None,
    second: Collection[Any] | None = None,
    why: str,
) -> list[Any]:
    """Parameters of which those that are named (or told by ``if_``) are in the first tier.

    The others are in the second one, or, where ``second`` says which of them, in the third.
    """
    values = list(values)
    quick = [value for value in values if (value in named if if_ is None else if_(value))]
    assert quick
    assert if_ is not None or len(quick) == len(named), f"{named} are not all of {values}"
    assert second is None or all(value in values for value in second), f"{second} are not all of {values}"
    marks = {True: pytest.mark.rest(why), False: pytest.mark.long(why)}
    return [value if value in quick else _marked(value, marks[second is None or value in second]) for value in values]


def some(values: Iterable[Any], *named: Any, why: str) -> list[Any]:
    """Parameters of a test of the second tier, of which those that are not named are in the third."""
    values = list(values)
    assert named
    assert all(value in values for value in named), f"{named} are not all of {values}"
    return [value if value in named else _marked(value, pytest.mark.long(why)) for value in values]


def _marked(value: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)


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


def needs(folder: str) -> None:
    """Raises ModuleNotFoundError if the folder is missing. ``tests/support/without.py`` then leaves out the test."""
    import_module(f"sp_lightning.{folder}")
