"""What was used after what: a guess of what is used next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Succession(Generic[T]):
    """Guesses what comes next: what came the last time after the same one, or the same few. A wrong guess costs a read.

    Args:
        depth: how many of the last ones decide. With two, layers that come forwards and then backwards are told apart.
    """

    def __init__(self, depth: int) -> None:
        self._last: deque[T] = deque(maxlen=depth)
        self._next: dict[tuple[T, ...], T] = {}

    def note(self, used: T) -> None:
        """Something is used now."""
        self._next[tuple(self._last)] = used
        self._last.append(used)

    def coming(self, *, itself: bool = False) -> Iterator[T]:
        """What is used next, in that order, until it comes round to what is used now.

        Args:
            itself: whether what is used now is the last of them, for who needs it anew each time.
        """
        last = self._last.copy()
        while (following := self._next.get(tuple(last))) is not None:
            last.append(following)
            round_again = last == self._last
            if not round_again or itself:
                yield following
            if round_again:
                return
