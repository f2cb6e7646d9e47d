"""Failures: errors that ranks report to each other outside of collectives, by the store of torch.distributed.

A collective ends with an error when a process of it has ended, but that error does not have the reason. So a rank that fails
writes its error to the store, and a thread of each rank reads the store. If ranks are missing in a collective, another rank asks
all for their places: each process then writes where it is in the training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Thread
from time import sleep
from typing import Any

from sp_lightning.torch_compat.private import store_of_default_group


class RankError(RuntimeError):
    """Another rank has failed, or has reached another collective, so this one cannot continue."""


class RankInterrupt(KeyboardInterrupt):
    """Another rank was interrupted, and this one ends like an interrupted one."""


LOST = RankError, RankInterrupt
"""The errors that a wait for other ranks raises. An interrupt of this process is not one of them."""


class Failures:
    """Reads and writes the store. A thread does it, because a store that cannot be reached may not answer for a long time.

    Args:
        run: a text that is the same on all ranks, and differs from that of other objects of this class.
        rank: this rank's number.
        names: the names of all ranks.
        place: returns where this rank is, in words.

    Attributes:
        first: the name of the rank that failed first, and its error; None before a rank fails.
    """

    def __init__(self, run: str, rank: int, names: Sequence[str], place: Callable[[], str]) -> None:
        self._prefix = f"superpipeline/{run}/"
        self._rank = rank
        self._names = names
        self._place = place
        self._pause = 0.1 * max(1, len(names) // 32)  # seconds between two looks: one process answers all ranks
        self.first: tuple[str, str] | None = None
        # A separate connection: a wait on the process group's would block this one.
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
        failure, wanted, mine = (self._prefix + key for key in ("failure", "places wanted", f"place {self._rank}"))
        answered = False
        with suppress(RuntimeError):  # the process with the store has ended: collectives with it raise errors
            while not over.wait(self._pause):
                if self._store.check([failure]):
                    who, _, error = self._store.get(failure).decode(errors="replace").partition("\n")
                    self.first = who, error
                    return  # the process with the store may end now, and torch would print that it cannot be read
                if not answered and self._store.check([wanted]):
                    self._store.set(mine, self._place())
                    answered = True

    def report(self, error: BaseException) -> None:
        """Writes an error of this rank, and waits until all ranks have had time to read it, because the process may end now.

        Only the first error of all ranks counts.
        """
        kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else type(error)
        text = f"{self._names[self._rank]}\n{kind.__name__}: {error}"
        self._try(lambda: self._store.compare_set(f"{self._prefix}failure", "", text), 3 * self._pause)

    def error(self, waited: str) -> RankError | RankInterrupt | None:
        """Returns the error to raise because another rank has failed; None if none has.

        Args:
            waited: "while" and which rank waited for what, for the message.
        """
        if self.first is None:
            return None
        who, error = self.first
        kind = RankInterrupt if error.startswith(f"{KeyboardInterrupt.__name__}:") else RankError
        return kind(f"{who} has failed {waited}: {error}")

    def places(self) -> dict[str, str]:
        """Asks all ranks for their places in the training, and returns those by the ranks' names.

        The names of ranks whose process has ended, or is stopped, are missing.
        """
        found: dict[str, str] = {}

        def call() -> None:
            self._store.set(f"{self._prefix}places wanted", "")
            sleep(3 * self._pause + 0.5)
            for rank, name in enumerate(self._names):
                key = f"{self._prefix}place {rank}"
                if self._store.check([key]):
                    found[name] = self._store.get(key).decode(errors="replace")

        self._try(call, 0.0)
        return found

    def _try(self, call: Callable[[], object], then: float) -> None:
        """Calls the store in a thread, waits ``then`` seconds, and gives up after some seconds."""

        def run() -> None:
            with suppress(RuntimeError):
                call()
                sleep(then)

        thread = Thread(target=run, daemon=True)
        thread.start()
        thread.join(3.0 + then)

    def end(self) -> None:
        """Ends the thread. Called before the process with the store ends, because torch prints an error if it cannot be read."""
        self._over.set()
