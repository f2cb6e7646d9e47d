"""Failures: errors that ranks report to each other outside of collectives, by the store of torch.distributed.

If a process ends, collectives with it raise errors on the other ranks. These errors do not contain the reason. So a rank that
fails writes its error to the store, and a thread of each rank reads the store. If ranks do not reach a collective, a rank that
waits in it asks all ranks for their places: each process then writes its place in the training to the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Thread
from time import sleep
from typing import Any

from sp_lightning.core.torch_compat.private import store_of_default_group


class RankError(RuntimeError):
    """Another rank has failed, or has reached another collective, so this rank cannot continue."""


class RankInterrupt(KeyboardInterrupt):
    """Another rank was interrupted (``KeyboardInterrupt``). This rank ends as if it had been interrupted itself."""


LOST = RankError, RankInterrupt
"""The errors that a wait for other ranks raises. A ``KeyboardInterrupt`` of this process is not among them."""


class Failures:
    """Reads and writes the store, in threads: if the store cannot be reached, calls of the store may block for a long time.

    Args:
        run: a text that is the same on all ranks, and different in each object of this class in a process.
        rank: this rank's number.
        names: the names of all ranks.
        place: returns the place of this rank in the training, as text.

    Attributes:
        first: the name of the rank that failed first, and its error; None until this process has read an error.
        pause: seconds between two reads of the store.
    """

    def __init__(self, run: str, rank: int, names: Sequence[str], place: Callable[[], str]) -> None:
        self._prefix = f"superpipeline/{run}/"
        self._rank = rank
        self._names = names
        self._place = place
        self.pause = 0.1 * max(1, len(names) // 32)  # one process serves the store to all ranks
        self.first: tuple[str, str] | None = None
        # A separate connection: a call that waits on the process group's connection would block calls on the same connection.
        self._store: Any = store_of_default_group().clone()
        self._over = Event()
        self._over.set()

    @property
    def reads(self) -> bool:
        """True between :meth:`begin` and :meth:`end`."""
        return not self._over.is_set()

    def begin(self) -> None:
        """Starts the thread that reads the store until :meth:`end`."""
        self.end()
        self._over = Event()
        Thread(target=self._look, args=(self._over,), name="superpipeline-failures", daemon=True).start()

    def _look(self, over: Event) -> None:
        """Reads the store until ``over`` is set: records the first error of any rank, and answers if places are wanted."""
        failure, wanted, mine = (self._prefix + key for key in ("failure", "places wanted", f"place {self._rank}"))
        answered = False
        with suppress(RuntimeError):  # the process with the store has ended: collectives with it raise errors
            while not over.wait(self.pause):
                if self._store.check([failure]):
                    who, _, error = self._store.get(failure).decode(errors="replace").partition("\n")
                    self.first = who, error
                    return  # the process with the store may end now, and torch would print that it cannot be read
                if not answered and self._store.check([wanted]):
                    self._store.set(mine, self._place())
                    answered = True

    def report(self, error: BaseException) -> None:
        """Writes an error of this rank to the store. If another rank has written an error before, does not replace that error.

        Then waits until all ranks have had time to read the error, because this process may end afterwards.
        """
        kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else type(error)
        text = f"{self._names[self._rank]}\n{kind.__name__}: {error}"
        self._try(lambda: self._store.compare_set(f"{self._prefix}failure", "", text), 3 * self.pause)

    def error(self, waited: str) -> RankError | RankInterrupt | None:
        """Returns the error to raise if a rank has failed, as far as this process has read; None otherwise.

        Args:
            waited: a clause for the message: "while", the name of this rank, and the purpose of its wait.
        """
        if self.first is None:
            return None
        who, error = self.first
        kind = RankInterrupt if error.startswith(f"{KeyboardInterrupt.__name__}:") else RankError
        return kind(f"{who} has failed {waited}: {error}")

    def places(self) -> dict[str, str]:
        """Asks all ranks for their places in the training, and returns the places by the ranks' names.

        Ranks that do not answer are missing: their process has ended or is stopped. If the store does not answer, all are
        missing.
        """
        found: dict[str, str] = {}

        def call() -> None:
            self._store.set(f"{self._prefix}places wanted", "")
            sleep(3 * self.pause + 0.5)
            for rank, name in enumerate(self._names):
                key = f"{self._prefix}place {rank}"
                if self._store.check([key]):
                    found[name] = self._store.get(key).decode(errors="replace")

        self._try(call, 0.0)
        return found

    def _try(self, call: Callable[[], object], then: float) -> None:
        """Calls the store in a thread, and then waits ``then`` seconds. Errors of the store are ignored.

        Returns after ``3 + then`` seconds, even if the store has not answered.
        """

        def run() -> None:
            with suppress(RuntimeError):
                call()
                sleep(then)

        thread = Thread(target=run, daemon=True)
        thread.start()
        thread.join(3.0 + then)

    def end(self) -> None:
        """Ends the thread that reads the store.

        Called before the process with the store ends, because torch prints an error if the store cannot be read.
        """
        self._over.set()
