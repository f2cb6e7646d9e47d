"""Chooses k by its stalls: a larger window is tried as long as uploads stall the batches."""

from __future__ import annotations

import math

from sp_lightning.core.plan.window import Window

ENOUGH = 0.01
"""Upload stalls up to this share of the time are not worth a larger window."""
SAME = 1.01
"""Batches whose times differ by at most this factor count as equally fast."""


class Doublings:
    """Doubles k while uploads stall the batches and a larger k fits. Then takes back the doublings that made no batch faster.

    It does not stop at the first doubling that saves little: each slot saves one or two of the 2 n uploads of n layers, so the
    first doublings save next to nothing, and the last one saves as much as all before it. In training, too large a window can be
    slower: without uploads in backward, the forward waits for all of them. So three quarters of the last k are tried, too.

    Args:
        window: the user's k, and the plans that fit.

    Attributes:
        k: the number of layers of the next batch.
        over: True if ``k`` is chosen, or given by the user.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._seconds: dict[int, float] = {}  # by k
        self.k = 1
        self.over = window.k != "auto"

    def measured(self, seconds: float, stalled: float) -> None:
        """Chooses the next k.

        Args:
            seconds: the time of batches with the present k.
            stalled: the seconds of it during which compute waited for uploads.
        """
        climbed = self.k < max(self._seconds, default=0)
        self._seconds[self.k] = seconds
        following = self.k if climbed or stalled <= ENOUGH * seconds else self._following()
        self.over = following == self.k
        if self.over:
            enough = SAME * min(self._seconds.values())
            following = min(k for k, its in self._seconds.items() if its <= enough)
        self.k = following

    def stop(self, k: int) -> None:
        """Chooses ``k``, because the device has no memory for a larger one."""
        self.k, self.over = k, True

    def _following(self) -> int:
        """Returns twice k, or the largest number below that fits. If that is hardly more than k, returns three quarters of k."""
        larger = min(2 * self.k, self._window.count)
        while larger > self.k and not self._window.fits(self._window.plan(larger)):
            larger -= 1
        return larger if larger >= 1.25 * self.k else math.ceil(0.75 * self.k)
