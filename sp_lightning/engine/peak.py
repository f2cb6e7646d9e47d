"""The most device memory that weights and gradients have taken."""

from __future__ import annotations

from collections.abc import Callable


class Peak:
    """Keeps the largest sum of some counters.

    Attributes:
        most: bytes.
    """

    def __init__(self) -> None:
        self.most = 0
        self._now: Callable[[], int] = int

    def of(self, now: Callable[[], int]) -> None:
        """From here on ``now`` gives the bytes."""
        self._now = now

    def note(self) -> None:
        """More memory may be in use than ever."""
        now = self._now()
        if now > self.most:
            self.most = now
