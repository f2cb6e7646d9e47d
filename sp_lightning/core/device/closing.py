"""Closes several parts, even if closing one of them raises an error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack


def close_all(*parts: Callable[[], object]) -> None:
    """Calls each function once, in order. If one raises, calls all of them again in this order, so that each part is closed.

    Each function must be safe to call twice: an interrupt (Ctrl-C) may have stopped the first call half-way.

    Raises:
        BaseException: the error of a part.
    """
    try:
        for part in parts:
            part()
    except BaseException:
        with ExitStack() as again:  # calls its functions in reverse order, and the others as well if one raises
            for part in reversed(parts):
                again.callback(part)
        raise
