"""The log of gathers: the ranks of a node agree on the order of their gathers by words in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

from sp_lightning.ranks.shared_memory import SharedMemory

_ROUND, _CLOSED, _RANKS = range(3)
_KEPT, AHEAD = 256, 200
"""Announcements that the log keeps, and the maximum that a rank may be ahead of others. It must be smaller."""

PATIENCE = 0.2
"""Seconds that a rank waits for another rank's announcement before it closes the round."""


def gather_log_bytes(size: int) -> int:
    """Returns the bytes of the log of ``size`` ranks."""
    return 8 * (_RANKS + 2 * size + _KEPT)


Until = Callable[[Callable[[], bool], str], None]


class GatherLog:
    """The gathers of one round, in the order of announcements. A round is usually a step of the model; see ``Uploads.end_round``.

    A gather takes place once all ranks have announced it. A rank *closes* the round if it announces another gather, has waited
    too long, or announces no more. Nothing can be announced in a closed round. So the same gathers take place on all ranks.

    Args:
        memory: shared memory of :func:`gather_log_bytes` bytes, filled with zeros.
        rank: this process's number on its node.
        size: the number of ranks of the node.
        until: waits for other ranks, as :meth:`sp_lightning.ranks.ranks.Ranks.until`.
        until_free: waits for the lock of the log. It must not issue gathers meanwhile, because they use the log.

    Attributes:
        disagreed: whether this rank has seen that ranks do not agree in this round.
    """

    def __init__(self, memory: SharedMemory, rank: int, size: int, until: Until, until_free: Until) -> None:
        self._locked = partial(memory.locked, until_free)
        self._words: Any = memory.words("q")
        self._active = _RANKS + rank  # whether this rank may have unresolved gathers in the round
        self._count = _RANKS + size + rank  # the number of its announcements
        self._all_active = slice(_RANKS, _RANKS + size)
        self._counts = slice(_RANKS + size, _RANKS + 2 * size)
        self._log = _RANKS + 2 * size
        self._until = until
        self._number = 0
        self.disagreed = False

    def begin(self, number: int, *, patient: bool = True) -> None:
        """Begins a round, or closes it if a rank has unresolved gathers in an earlier round.

        Args:
            number: the number of the round, larger than earlier ones. If ranks use different numbers, no gather takes place.
            patient: wait :data:`PATIENCE` seconds for such ranks. Otherwise the round is closed at once.
        """
        self._number = number
        self.disagreed = False
        if patient:
            late = monotonic() + PATIENCE
            self._until(lambda: self._join() or monotonic() > late, "the end of the others' last round of gathers")
        if not self._words[self._active]:
            self.close_round()

    def _join(self) -> bool:
        words = self._words
        with self._locked():
            if words[_CLOSED] >= self._number:
                return True
            if words[_ROUND] < self._number and not any(words[self._all_active]):
                words[_ROUND] = self._number
                for count in range(self._counts.start, self._counts.stop):
                    words[count] = 0
            words[self._active] = words[_ROUND] == self._number
            return bool(words[self._active])

    def announce(self, what: int) -> int | None:
        """Announces this rank's next gather.

        Args:
            what: a number that identifies the gather on all ranks.

        Returns:
            The number of the gather in this round; None if it does not take place.
        """
        words = self._words
        with self._locked():
            number, others = words[self._count], max(words[self._counts])
            place = self._log + number % _KEPT
            if words[_CLOSED] < self._number:
                if number == others:  # the first rank to announce this gather
                    words[place] = what
                if words[place] == what:
                    words[self._count] = number + 1
                    return int(number)
                words[_CLOSED] = self._number
        self.disagreed = True
        return None

    def verdict(self, number: int) -> bool | None:
        """Returns whether a gather that this rank has announced takes place; None if that is not decided yet."""
        with self._locked():
            if number < min(self._words[self._counts]):
                return True
            return False if self._words[_CLOSED] >= self._number else None

    def wait(self, number: int) -> bool:
        """Waits up to :data:`PATIENCE` seconds for the :meth:`verdict`, closes the round if there is none, and returns it."""
        late = monotonic() + PATIENCE
        there = "a layer that all devices fetch together"
        self._until(lambda: self.verdict(number) is not None or monotonic() > late, there)
        if self.verdict(number) is None:
            self.close_round()
        return bool(self.verdict(number))

    def close_round(self) -> None:
        """Closes the round, because ranks do not agree."""
        self.disagreed = True
        self._close(self._number)

    def end(self) -> None:
        """Ends the round. All its gathers are resolved on this rank."""
        self._close(self._number)
        self._words[self._active] = 0

    def close(self) -> None:
        """Closes all rounds."""
        self._close((1 << 63) - 1)

    def _close(self, number: int) -> None:
        with self._locked():
            self._words[_CLOSED] = max(self._words[_CLOSED], number)
