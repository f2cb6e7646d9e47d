"""The board of gathers: on it the ranks of a node agree, one gather after the other, whether all of them take part.

A collective in which one rank does not take part hangs, and one that another rank meets with another layer mixes them silently.
Ranks fetch layers by themselves, in an order that depends on the batch's path and on timing. So each *announces* a gather before
it takes part, and a gather takes place once all ranks have announced the same as their next one. Otherwise each brings that
layer by itself, and all others of the round. A round is a step of the model.

Every word has one writer, and only ever grows. Whether a gather takes place (:meth:`GatherBoard.verdict`) depends on words that
do not change any more once it can be told, so all ranks come to the same answer, whenever they look:

- all have announced the same: it takes place;
- two have announced different things: it does not;
- a rank has *closed* the round without this announcement, after which it makes none: it does not.

A rank that waits long for another's announcement asks for it. The other one, a thread of which looks now and then, closes the
round unless its announcement has just come. So nobody waits for a rank that is elsewhere: in user code, or waiting for this one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from sp_lightning.device.shared_memory import SharedMemory, fence

_ANNOUNCED, _CLOSED, _RESOLVED, _ASKED, _FIRST = 0, 1, 2, 3, 8
_KEPT = 504  # announcements of each rank that are on the board
_WORDS = _FIRST + _KEPT
_BITS = 20
AHEAD = 200
"""A rank has at most so many announcements that are not resolved: with as many of another's, fewer than are kept."""

MOST = 1 << _BITS
"""A round has fewer gathers than this, and what is announced is a smaller number."""

LAST = (1 << 62 - _BITS) - 1
"""The largest number of a round."""

PATIENCE = 0.2
"""Seconds that a rank waits for another's announcement before it asks for it."""


def gather_board_bytes(size: int) -> int:
    """Returns how much memory the board takes of so many ranks."""
    return size * _WORDS * 8


class GatherBoard:
    """What one rank announces to the others, and sees of them.

    Args:
        memory: of :func:`gather_board_bytes`, which all ranks of the node have, full of zeros.
        rank: this process's number on its node.
        size: how many ranks the node has.
        until: waits for something that other ranks bring about, as :meth:`sp_lightning.device.board.Board.until`.
    """

    def __init__(
        self, memory: SharedMemory, rank: int, size: int, until: Callable[[Callable[[], bool], str], None]
    ) -> None:
        self._words: Any = memory.words("q")
        self._own = rank * _WORDS
        self._others = [each * _WORDS for each in range(size) if each != rank]
        self._until = until
        self._round = 0
        self._count = 0  # of announcements in this round
        self._closed = 0
        # Guards what is announced and closed against another thread's answers.
        self._lock = threading.Lock()
        self._answered = dict.fromkeys(self._others, 0)

    # ------------------------------------------------------------------ a round

    def begin(self, number: int, *, patient: bool = True) -> None:
        """Begins a round, or closes it if some rank has not resolved all gathers of one before.

        Args:
            number: a larger one than those before. All ranks number their rounds alike, or make no gathers in them.
            patient: whether to wait some time for those ranks. Otherwise the round is closed at once.
        """
        assert number > self._round
        late = monotonic() + PATIENCE if patient and self._closed < number else 0.0
        said = "the end of the others' last round of gathers"
        self._until(lambda: self._all_ready(number) or monotonic() > late, said)
        with self._lock:
            self._round = number
            if patient and self._closed < number and self._all_ready(number):
                self._count = 0
                self._write(_ANNOUNCED, number << _BITS)
            else:  # what this rank has announced stays on the board for those who still look at it
                self._close(number)

    def _all_ready(self, number: int) -> bool:
        return all(self._is_ready(other, number) for other in self._others)

    def _is_ready(self, other: int, number: int) -> bool:
        """Whether a rank is in this round, or has resolved all gathers that it has announced."""
        announced = self._words[other + _ANNOUNCED] >> _BITS
        return announced == number or self._words[other + _RESOLVED] >= announced

    def end(self) -> None:
        """Ends the round, all of whose gathers are resolved."""
        with self._lock:
            self._close(self._round)
            self._write(_RESOLVED, self._round)

    @property
    def closed(self) -> bool:
        """Whether this rank announces no more in this round."""
        return self._closed >= self._round

    def close_round(self) -> None:
        """Announces no more in this round."""
        with self._lock:
            self._close(self._round)

    def _close(self, number: int) -> None:
        if self._closed < number:
            self._closed = number
            self._write(_CLOSED, number)

    # ------------------------------------------------------------------ one gather

    def announce(self, what: int) -> int | None:
        """Announces this rank's next gather.

        Args:
            what: a number under which no rank announces anything else.

        Returns:
            Its number in this round; None if this rank announces no more in it.
        """
        assert 0 <= what < MOST
        with self._lock:
            if self._closed >= self._round or self._count >= MOST - 1:
                return None
            number, self._count = self._count, self._count + 1
            self._words[self._entry(self._own, number)] = self._round << _BITS | what
            self._write(_ANNOUNCED, self._round << _BITS | self._count)
            return number

    def verdict(self, number: int) -> bool | None:
        """Returns whether a gather that this rank has announced in this round takes place; None if it cannot be told yet.

        What came before it in the round does.
        """
        mine, place = self._words[self._entry(self._own, number)], self._round << _BITS | number
        certain = True
        for other in self._others:
            # In this order: a rank that has closed the round announces nothing afterwards.
            closed = self._words[other + _CLOSED] >= self._round
            fence()
            announced = self._words[other + _ANNOUNCED]
            if announced > place:
                fence()
                if announced >> _BITS != self._round or self._words[self._entry(other, number)] != mine:
                    return False
            elif closed:
                return False
            else:
                certain = False
        return True if certain else None

    def wait(self, number: int) -> bool:
        """Waits for the :meth:`verdict`, and returns it."""
        place = self._round << _BITS | number
        late = monotonic() + PATIENCE

        def told() -> bool:
            if self.verdict(number) is not None:
                return True
            if monotonic() > late and self._words[self._own + _ASKED] <= place:
                with self._lock:
                    self._write(_ASKED, place + 1)
            return False

        self._until(told, "a layer that all devices fetch together")
        verdict = self.verdict(number)
        assert verdict is not None
        return verdict

    @staticmethod
    def _entry(of: int, number: int) -> int:
        return of + _FIRST + number % _KEPT

    def answer(self) -> None:
        """Closes rounds in which others wait for an announcement that this rank has not made. Any thread may call it."""
        for other in self._others:
            asked = self._words[other + _ASKED]
            if asked > self._answered[other]:
                self._answered[other] = asked
                with self._lock:
                    if self._words[self._own + _ANNOUNCED] < asked:  # with that announcement it is at least as much
                        self._close((asked - 1) >> _BITS)

    def close(self) -> None:
        """Says that this rank announces no more in any round."""
        with self._lock:
            self._close(LAST)

    def _write(self, of: int, number: int) -> None:
        """Writes a word of this rank's, which others see after whatever was written before."""
        fence()
        self._words[self._own + of] = number
