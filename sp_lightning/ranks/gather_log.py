"""The log of gathers: the ranks of a node agree on the order of their gathers by words in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

from sp_lightning.ranks.shared_memory import SharedMemory

_ROUND, _CLOSED, _RANKS = range(3)
_KEPT, AHEAD = 256, 200
"""So many announcements are in the log. A rank has at most so many that others have not made: fewer than are kept."""

PATIENCE = 0.2
"""Seconds that a rank waits for another's announcement before it closes the round."""


def gather_log_bytes(size: int) -> int:
    """Returns how much memory the log takes of so many ranks."""
    return 8 * (_RANKS + 2 * size + _KEPT)


Until = Callable[[Callable[[], bool], str], None]


class GatherLog:
    """The gathers of one round, in the order in which all ranks announce them. A round is a step of the model.

    A gather takes place once all ranks have announced it. A rank that announces another one, has waited too long, or announces
    no more *closes* the round: nothing more is announced in it. So what takes place is the same on all ranks, whenever they look.

    Args:
        memory: of :func:`gather_log_bytes`, which all ranks of the node have, full of zeros.
        rank: this process's number on its node.
        size: how many ranks the node has.
        until: waits for something that other ranks bring about, as :meth:`sp_lightning.ranks.ranks.Ranks.until`.
        until_free: waits for the lock of the log, which may not issue gathers meanwhile: that asks the log.

    Attributes:
        parted: whether ranks have not agreed in this round, as far as this rank has seen.
    """

    def __init__(self, memory: SharedMemory, rank: int, size: int, until: Until, until_free: Until) -> None:
        self._locked = partial(memory.locked, until_free)
        self._words: Any = memory.words("q")
        self._active = _RANKS + rank  # whether the rank has gathers of the round that it may not have resolved
        self._count = _RANKS + size + rank  # how many it has announced
        self._all_active = slice(_RANKS, _RANKS + size)
        self._counts = slice(_RANKS + size, _RANKS + 2 * size)
        self._log = _RANKS + 2 * size
        self._until = until
        self._number = 0
        self.parted = False

    def begin(self, number: int, *, patient: bool = True) -> None:
        """Begins a round, or closes it if some rank has not resolved all gathers of one before.

        Args:
            number: a larger one than those before. All ranks number their rounds alike, or make no gathers in them.
            patient: whether to wait some time for those ranks. Otherwise the round is closed at once.
        """
        self._number, self.parted = number, False
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
            what: a number under which no rank announces anything else.

        Returns:
            Its number in this round; None if it does not take place.
        """
        words = self._words
        with self._locked():
            number, others = words[self._count], max(words[self._counts])
            place = self._log + number % _KEPT
            if words[_CLOSED] < self._number:
                if number == others:  # the first rank that comes to this gather
                    words[place] = what
                if words[place] == what:
                    words[self._count] = number + 1
                    return int(number)
                words[_CLOSED] = self._number
        self.parted = True
        return None

    def verdict(self, number: int) -> bool | None:
        """Returns whether a gather that this rank has announced in this round takes place; None if it cannot be told yet."""
        with self._locked():
            if number < min(self._words[self._counts]):
                return True
            return False if self._words[_CLOSED] >= self._number else None

    def wait(self, number: int) -> bool:
        """Waits for the :meth:`verdict`, for some time, and returns it."""
        late = monotonic() + PATIENCE
        there = "a layer that all devices fetch together"
        self._until(lambda: self.verdict(number) is not None or monotonic() > late, there)
        if self.verdict(number) is None:
            self.close_round()
        return bool(self.verdict(number))

    def close_round(self) -> None:
        """Has no rank announce more in this round, because they do not agree."""
        self.parted = True
        self._close(self._number)

    def end(self) -> None:
        """Ends the round, all of whose gathers are resolved here."""
        self._close(self._number)
        self._words[self._active] = 0

    def close(self) -> None:
        """Has no rank announce more in any round."""
        self._close((1 << 63) - 1)

    def _close(self, number: int) -> None:
        with self._locked():
            self._words[_CLOSED] = max(self._words[_CLOSED], number)
