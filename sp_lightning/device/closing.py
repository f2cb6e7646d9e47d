"""Closes things that consist of several, whatever one of them raises."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack


def close_all(*parts: Callable[[], object]) -> None:
    """Calls functions in their order, each of which may be called twice: the second time it does what is left to do.

    If one raises, all are called again, and none is left out. An interrupt may have come in the middle of any of them.

    Raises:
        BaseException: what a part has raised.
    """
    try:
        for part in parts:
            part()
    except BaseException:
        with ExitStack() as again:
            for part in reversed(parts):
                again.callback(part)
        raise
