"""One thread in the background, which does the most urgent work first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class Piece:
    """A piece of work that was not begun yet.

    Attributes:
        work: the work.
        urgency: the lower, the sooner it is done. None: in the order in which work was given, and before all that has a number.
        done: the future of its end.
    """

    work: Callable[[], None]
    urgency: int | None
    done: Future[None] = field(default_factory=Future)


class Pieces:
    """The pieces of work that wait for their turn. Any thread may use it."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._lock = threading.Lock()

    def add(self, work: Callable[[], None], urgency: int | None) -> Future[None]:
        """Adds a piece of work."""
        piece = Piece(work, urgency)
        with self._lock:
            self._pieces.append(piece)
        return piece.done

    def take(self) -> Piece:
        """Removes and returns the next piece of work."""
        with self._lock:
            piece = min(self._pieces, key=_rank)  # of several the first
            self._pieces.remove(piece)
            return piece

    def urge(self, wanted: Future[None]) -> None:
        """Moves a piece of work before all others that have an urgency, because a thread waits for it."""
        with self._lock:
            for piece in self._pieces:
                if piece.done is wanted and piece.urgency is not None:
                    piece.urgency = -1


def _rank(piece: Piece) -> int:
    return -2 if piece.urgency is None else piece.urgency


class BackgroundThread:
    """The thread.

    Args:
        of_operators: how many threads the operators use that it calls.
        begin: is called first in it.
    """

    def __init__(self, of_operators: int, begin: Callable[[], None]) -> None:
        threads = torch.get_num_threads()

        def set_number() -> None:
            begin()
            # The first call in a thread sets the thread's number to the one that any thread has set last. It has to come
            # before set_num_threads here, or it would undo that later.
            torch.get_num_threads()
            torch.set_num_threads(of_operators)

        self._pieces = Pieces()
        self._executor = ThreadPoolExecutor(1, "superpipeline", set_number)
        self._executor.submit(lambda: None).result()
        torch.set_num_threads(threads)  # threads that start from now on take this number again

    def submit(self, work: Callable[[], None], urgency: int | None = None) -> Future[None]:
        """Takes a piece of work. The lower its urgency, the sooner it is done; None: in the order of calls."""
        done = self._pieces.add(work, urgency)
        self._executor.submit(self._do_next)
        return done

    def urge(self, wanted: Future[None]) -> None:
        """Does a piece of work next, unless its order is that of calls."""
        self._pieces.urge(wanted)

    def close(self) -> None:
        """Ends the thread, once all work is done."""
        self._executor.shutdown()

    def _do_next(self) -> None:
        piece = self._pieces.take()
        piece.done.set_running_or_notify_cancel()
        try:
            piece.work()
        except BaseException as error:
            piece.done.set_exception(error)
        else:
            piece.done.set_result(None)
