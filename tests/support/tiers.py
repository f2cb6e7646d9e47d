"""What of a test's parameters runs in which tier: a few in the first one, more in the second, all with the third."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
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
