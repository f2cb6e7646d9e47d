"""One background thread, which runs the most urgent work first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class Piece:
    """Queued work.

    Attributes:
        work: the function to run.
        urgency: a lower number runs first. None: in the order of calls, before all work with a number.
        done: completes when the work ends.
    """

    work: Callable[[], None]
    urgency: int | None
    done: Future[None] = field(default_factory=Future)


class Pieces:
    """A queue of work, ordered by urgency. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._lock = threading.Lock()

    def add(self, work: Callable[[], None], urgency: int | None) -> Future[None]:
        """Queues work."""
        piece = Piece(work, urgency)
        with self._lock:
            self._pieces.append(piece)
        return piece.done

    def take(self) -> Piece:
        """Removes and returns the most urgent work."""
        with self._lock:
            piece = min(self._pieces, key=_rank)  # the first one of equal rank
            self._pieces.remove(piece)
            return piece

    def urge(self, wanted: Future[None]) -> None:
        """Moves work that a thread waits for before all other work that has an urgency. Work without an urgency is not moved."""
        with self._lock:
            for piece in self._pieces:
                if piece.done is wanted and piece.urgency is not None:
                    piece.urgency = -1


def _rank(piece: Piece) -> int:
    return -2 if piece.urgency is None else piece.urgency


class BackgroundThread:
    """The background thread.

    Args:
        of_operators: number of threads that torch's operators use in the background thread.
        begin: called first in the background thread.
    """

    def __init__(self, of_operators: int, begin: Callable[[], None]) -> None:
        threads = torch.get_num_threads()

        def set_number() -> None:
            begin()
            # torch sets the number of threads of a new thread lazily, to the value that any thread has set last. The first call
            # triggers this. Otherwise it would happen later, and overwrite the value that the second call sets.
            torch.get_num_threads()
            torch.set_num_threads(of_operators)

        self._pieces = Pieces()
        self._executor = ThreadPoolExecutor(1, "superpipeline", set_number)
        self._executor.submit(lambda: None).result()  # starts the thread, which calls set_number
        torch.set_num_threads(threads)  # the default for threads that start later

    def submit(self, work: Callable[[], None], urgency: int | None = None) -> Future[None]:
        """Queues work; see :class:`Piece` for ``urgency``."""
        done = self._pieces.add(work, urgency)
        self._executor.submit(self._do_next)
        return done

    def urge(self, wanted: Future[None]) -> None:
        """Moves queued work before all other work that has an urgency. Work without an urgency is not moved."""
        self._pieces.urge(wanted)

    def close(self) -> None:
        """Ends the thread after all queued work."""
        self._executor.shutdown()

    def _do_next(self) -> None:
        """Runs the most urgent work. It need not be the work that was queued together with this call."""
        piece = self._pieces.take()
        piece.done.set_running_or_notify_cancel()
        try:
            piece.work()
        except BaseException as error:
            piece.done.set_exception(error)
        else:
            piece.done.set_result(None)
