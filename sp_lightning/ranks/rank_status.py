"""The status of ranks: shared memory in which each rank writes which collective it has reached, and why it has failed.

Each word has one writer, so reading takes microseconds and needs no lock. All ranks reach the same *collectives* in the
same order: barriers, sums, exchanges, and the end of the run. Each rank writes the number and the name of a collective when it
reaches it. If ranks reach different collectives, an error names both, instead of a wait that never ends or mixed data.

Each node has its own status memory. :class:`NodeNews` reports failures on other nodes.
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any
from zlib import crc32

import numpy as np  # Lightning needs torchmetrics, which needs NumPy
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from sp_lightning.device.device import Wait
from sp_lightning.ranks.shared_memory import SharedMemory, publish

_KEPT = 32
# The digest covers all collectives up to this one.
_COLLECTIVE = np.dtype([("digest", "q"), ("number", "d"), ("what", "S240")])
_RANK = np.dtype([("arrivals", "q"), ("failed", "q"), ("collectives", _COLLECTIVE, _KEPT), ("error", "S4096")])
"""The entry of a rank: the number of its collectives, whether it has failed, its last collectives, and its error."""


def status_bytes(size: int) -> int:
    """Returns the bytes of the status memory of ``size`` ranks."""
    return _RANK.itemsize * size


class RankError(RuntimeError):
    """Another rank has failed, or has reached another collective, so this one cannot continue."""


class RankInterrupt(KeyboardInterrupt):
    """Another rank was interrupted, and this one ends like an interrupted one."""


LOST = RankError, RankInterrupt
"""The errors that a wait for other ranks raises. An interrupt of this process is not one of them."""


def _failed(who: str, when: str, error: str) -> BaseException:
    """Returns the error to raise because another rank has failed. An interrupt of one rank ends all like an interrupt."""
    said = f"{who} has failed {when}: {error}"
    return RankInterrupt(said) if _INTERRUPTED.match(error) else RankError(said)


_INTERRUPTED = re.compile(r"(rank \d+ \(node \d+\): )?KeyboardInterrupt:")
"""The beginning of an interrupted rank's error; on another node, the rank's name comes first."""


class RankStatus:
    """The status of a node's ranks, as one rank reads and writes it.

    Args:
        memory: shared memory of :func:`status_bytes` bytes, filled with zeros.
        rank: this process's number on its node.
        processes: the known process ids of other ranks.
        names: the names of the node's ranks.
        elsewhere: returns the error of a rank of another node; an empty string if none has failed.

    Attributes:
        failure: this rank's own error as text; empty if it has none.
        place: where this rank is in the training, as text.
    """

    def __init__(
        self,
        memory: SharedMemory,
        rank: int,
        processes: Mapping[int, int],
        names: Sequence[str],
        elsewhere: Callable[[], str],
    ) -> None:
        self.rank = rank
        self.size = len(names)
        self._names = names
        self._others = [each for each in range(self.size) if each != rank]
        self._elsewhere = elsewhere
        self.failure = ""
        self.place = ""
        self._memory = memory  # the arrays below are views of it
        ranks: Any = np.frombuffer(memory.bytes, _RANK, self.size)
        self._collectives, self._errors = ranks["collectives"], ranks["error"]
        # Python reads a number through a view of memory in half the time that NumPy's arrays take.
        self._arrivals_of, self._failed = memoryview(ranks["arrivals"]), memoryview(ranks["failed"])
        self._digests = memoryview(self._collectives["digest"])
        self._arrivals = 0
        self._processes = select.poll()  # select itself refuses descriptors from 1,024 on
        self._descriptors: dict[int, int] = {}
        for other, pid in processes.items():
            with suppress(OSError):
                self._descriptors[descriptor := os.pidfd_open(pid)] = other
                self._processes.register(descriptor, select.POLLIN)

    # ------------------------------------------------------------------ collectives

    def arrive(self, what: str, number: float = 0) -> None:
        """Writes that this rank has reached the next collective.

        Args:
            what: the name of the collective. It must be the same on all ranks, and so must :attr:`place`.
            number: a number for the other ranks. Integers are exact up to 2**53.

        Raises:
            RankError: another rank has reached another collective.
        """
        text = f"{what}, {self.place}" if self.place else what
        digest = crc32(text.encode(), self.history)
        self._arrivals += 1
        self._collectives[self.rank, self._arrivals % _KEPT] = digest, number, text.encode()  # NumPy cuts a longer text
        publish(self._arrivals_of, self.rank, self._arrivals)
        self.compare()

    def has_arrived(self, rank: int) -> bool:
        """Returns True if a rank has reached this rank's last collective."""
        return self._arrivals_of[rank] >= self._arrivals

    def all_have_arrived(self) -> bool:
        """Returns True if all ranks have reached this rank's last collective."""
        return all(map(self.has_arrived, range(self.size)))

    def number_of(self, rank: int) -> float:
        """Returns a rank's number at this rank's last collective, which it must have reached."""
        return float(self._collectives["number"][rank, self._arrivals % _KEPT])

    def compare(self) -> None:
        """Compares the last collective that this rank and each other rank have both reached.

        Raises:
            RankError: they differ.
        """
        for other in self._others:
            both = min(self._arrivals, self._arrivals_of[other])
            if both and self._differ(other, both):
                if self._failed[other]:  # therefore it reaches other collectives
                    raise _failed(self._names[other], "meanwhile", self._error_of(other))
                raise RankError(self._difference(other, both))

    def _differ(self, other: int, collective: int) -> bool:
        mine, theirs = (self._digests[rank, collective % _KEPT] for rank in (self.rank, other))
        # Old entries are overwritten; the rank that was behind has compared them.
        return mine != theirs and max(self._arrivals, self._arrivals_of[other]) - collective < _KEPT - 1

    def _difference(self, other: int, collective: int) -> str:
        """Returns a sentence on the first difference that is still stored."""
        first = collective
        while first > 1 and self._differ(other, first - 1):
            first -= 1
        mine, theirs = (self._what(rank, first) for rank in (self.rank, other))
        return (
            f"Ranks disagree: {self._names[self.rank]} has reached {mine}, and {self._names[other]} {theirs}. All "
            "ranks need the same number of batches, and whatever else they do together (steps, checkpoints, sums over ranks, "
            "exchanges of parameters or layers) all of them must do, in one order. It must not depend on the rank."
        )

    def _what(self, rank: int, collective: int) -> str:
        """Returns the name of one of a rank's last collectives."""
        return _decoded(self._collectives["what"][rank, collective % _KEPT])

    # ------------------------------------------------------------------ runs and failures

    def run_ends(self) -> None:
        """Writes that this rank's run ends: a collective at which it neither waits nor raises an error."""
        self.place = ""
        if not self.failure:  # otherwise other ranks would report different collectives instead of the failure
            with suppress(*LOST):  # the ranks that wait for this one raise it
                self.arrive("the end of its run")

    def fail(self, error: BaseException) -> None:
        """Writes that this rank has failed, so that others stop waiting for it. Only the first error counts."""
        if self.failure:
            return
        interrupted = isinstance(error, KeyboardInterrupt)
        self.failure = f"{KeyboardInterrupt.__name__ if interrupted else type(error).__name__}: {error}"
        self._errors[self.rank] = self.failure.encode(errors="replace")
        publish(self._failed, self.rank, 1)

    def _error_of(self, rank: int) -> str:
        return _decoded(self._errors[rank])

    def check(self, why: str) -> None:
        """Raises an error if a rank will not arrive.

        Args:
            why: the purpose of the wait, for the error.

        Raises:
            RankError: a rank has failed, has reached another collective (for example the end of its run), or its process
                has ended.
            KeyboardInterrupt: a rank was interrupted.
        """
        waited = f"while {self._names[self.rank]} waited for {why}"
        for other in self._others:
            if self._failed[other]:
                raise _failed(self._names[other], waited, self._error_of(other))
        self.compare()
        for descriptor, _ in self._processes.poll(0):
            raise RankError(
                f"the process of {self._names[self._descriptors[descriptor]]} has ended {waited}. The system killed it (out of "
                "memory, for example: see dmesg), or it left trainer.fit earlier than this process."
            )
        if elsewhere := self._elsewhere():
            raise _failed("another node", waited, elsewhere)

    def wait_until(self, reached: Callable[[], bool], why: Wait | str) -> None:
        """Waits until other ranks have made a condition true.

        Args:
            reached: returns True if the condition holds.
            why: the purpose of the wait.

        Raises:
            RankError: another rank will not make it true, or has not within the timeout of torch's process groups.
        """
        said = in_words(why)
        late = _TIMEOUT.total_seconds()
        turns = 0
        began = checked = monotonic()
        while not reached():
            turns += 1
            sleep(0 if turns < 100 else min(turns * 1e-7, 1e-3))
            if turns < 100 or monotonic() - checked < CHECK_SECONDS:
                continue
            checked = monotonic()
            try:
                self.check(said)
                if checked - began > late:
                    raise RankError(
                        f"{self._names[self.rank]} has waited {late:.0f} seconds for {said}. {self._places()}."
                    )
            except LOST:
                if reached():  # at the last moment, before the other rank continued and ended
                    return
                raise

    def _places(self) -> str:
        """Returns a sentence on the last collective of each rank."""
        last = (self._what(rank, self._arrivals_of[rank]) or "nothing" for rank in range(self.size))
        return "; ".join(f"{name} was last at {what}" for name, what in zip(self._names, last, strict=True))

    @property
    def history(self) -> int:
        """A digest of all collectives of this rank. It is the same on all ranks with the same number of collectives."""
        return self._digests[self.rank, self._arrivals % _KEPT]

    def close(self) -> None:
        """Closes the descriptors of processes."""
        while self._descriptors:
            descriptor, _ = self._descriptors.popitem()
            self._processes.unregister(descriptor)
            os.close(descriptor)


class NodeNews:
    """Reports a failure to the ranks of all nodes, by the store of torch.distributed.

    A thread polls the store, because a store that cannot be reached may not answer for a long time.

    Args:
        name: the key of this run. It is the same on all ranks, and differs from that of other runs.
        pause: seconds between two polls. One process serves the polls of all ranks.

    Attributes:
        failure: the first failure; empty if there is none.
        lost: why the store cannot be reached; empty if it can.
    """

    def __init__(self, name: str, pause: float) -> None:
        self._key = f"superpipeline/{name}/failure"
        self._pause = pause
        self.failure = ""
        self.lost = ""
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A separate connection: a wait on the process group's would block this one.
        self._store: Any = dist.TCPStore(*where, is_master=False, wait_for_workers=False)
        self._over = Event()
        self.begin()

    def begin(self) -> None:
        """Starts the thread that polls until :meth:`end`."""
        self._over.set()
        self._over = Event()
        Thread(target=self._look, args=(self._over,), name="superpipeline-nodes", daemon=True).start()

    def _look(self, over: Event) -> None:
        try:
            while not over.wait(self._pause):
                if self._store.check([self._key]):
                    self.failure = self._store.get(self._key).decode(errors="replace")
                    return
        except RuntimeError:  # this may be no error: a rank that still needs rank 0 loses another connection as well
            self.lost = "the process of rank 0 (node 0) has ended, or cannot be reached"

    def tell(self, failure: str) -> None:
        """Reports a failure to all nodes. Waits until they have polled, because the store may end with this process."""
        telling = Thread(target=self._set, args=(failure,), daemon=True)
        telling.start()
        telling.join(1.0 + 2 * self._pause)

    def _set(self, failure: str) -> None:
        with suppress(RuntimeError):  # the store is gone
            self._store.compare_set(self._key, "", failure)
            sleep(2 * self._pause)

    def end(self) -> None:
        """Ends the thread."""
        self._over.set()


CHECK_SECONDS = 0.05
"""Seconds between two checks for failed ranks."""

_TIMEOUT: timedelta = default_pg_timeout
"""How long a rank waits for another one that neither arrives nor fails: the timeout of torch's process groups."""


def _decoded(text: bytes) -> str:
    return bytes(text).decode(errors="replace")


def in_words(why: Wait | str) -> str:
    """Returns the purpose of a wait, to stand after "waited for"."""
    return f"this: {why.value}" if isinstance(why, Wait) else why
