"""What of a test's parameters runs in which tier: all of them in the second one, a few in the first one as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def first(values: Iterable[Any], *named: Any, if_: Callable[[Any], bool] | None = None, why: str) -> list[Any]:
    """Parameters of which those that are named (or told by ``if_``) are in the first tier, the others in the second."""
    values = list(values)
    quick = [value for value in values if (value in named if if_ is None else if_(value))]
    assert quick
    assert if_ is not None or len(quick) == len(named), f"{named} are not all of {values}"
    rest = pytest.mark.rest(why)
    return [
        value if value in quick else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=rest)
        for value in values
    ]
