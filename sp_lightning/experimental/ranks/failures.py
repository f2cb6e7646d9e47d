"""Failures: errors that ranks report to each other outside of collectives, by the store of torch.distributed.

If a process ends, collectives with it raise errors on the other ranks. These errors do not contain the reason. So a rank that
fails writes its error to the store, and a thread of each rank reads the store.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread, current_thread
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
    """Reads and writes the store.

    Args:
        run: a text that is the same on all ranks, and different in each object of this class in a process.
        name: this rank's name.
        ranks: the number of ranks.
        on_failure: called in the thread that reads the store, once it has read an error.

    Attributes:
        serve: called at each read of the store. If it returns True, it is called again in a millisecond.
        first: the name of the rank that failed first, and its error; None until this process has read an error.
        pause: seconds between two reads of the store.
    """

    def __init__(self, run: str, name: str, ranks: int, on_failure: Callable[[], None] = lambda: None) -> None:
        self._key = f"superpipeline/{run}/failure"
        self._name = name
        self.pause = 0.1 * max(1, ranks // 32)  # one process serves the store to all ranks
        self._on_failure = on_failure
        self.serve: Callable[[], bool] = lambda: False
        self.first: tuple[str, str] | None = None
        # A separate connection: a call that waits on the process group's connection would block calls on the same connection.
        self._store: Any = store_of_default_group().clone()
        self._over = Event()
        self._over.set()
        self._reader: Thread | None = None

    @property
    def reads(self) -> bool:
        """True between :meth:`begin` and :meth:`end`."""
        return not self._over.is_set()

    def begin(self) -> None:
        """Starts the thread that reads the store until :meth:`end`."""
        self.end()
        self._over = Event()
        self._reader = Thread(target=self._look, args=(self._over,), name="superpipeline-failures", daemon=True)
        self._reader.start()

    def _look(self, over: Event) -> None:
        """Reads the store until ``over`` is set, or until a rank has failed."""
        with suppress(RuntimeError):  # the process with the store has ended: collectives with it raise errors
            while not over.wait(1e-3 if self.serve() else self.pause):
                if self._store.check([self._key]):
                    who, _, error = self._store.get(self._key).decode(errors="replace").partition("\n")
                    self.first = who, error
                    self._on_failure()
                    return  # the process with the store may end now, and torch would print that it cannot be read

    def report(self, error: BaseException) -> None:
        """Writes an error of this rank to the store. If another rank has written an error before, does not replace that error.

        Then waits until all ranks have had time to read the error, because this process may end afterwards.
        """
        kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else type(error)
        text = f"{self._name}\n{kind.__name__}: {error}"

        def write() -> None:
            with suppress(RuntimeError):
                self._store.compare_set(self._key, "", text)
                sleep(3 * self.pause)

        # In a thread: if the store cannot be reached, the call may block for a long time.
        thread = Thread(target=write, daemon=True)
        thread.start()
        thread.join(3.0 + 3 * self.pause)

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

    def end(self) -> None:
        """Ends the thread that reads the store.

        Called before the process with the store ends, because torch prints an error if the store cannot be read. Waits for a read
        that runs: Python ends a thread that is in C++ when the process ends, and C++ then aborts the process.
        """
        self._over.set()
        reader, self._reader = self._reader, None
        if reader is not None and reader is not current_thread():
            reader.join(3.0)  # longer only if the store does not answer
