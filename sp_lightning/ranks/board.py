"""The board: a page of shared memory on which each rank says where it is, and why it has failed.

Every word on it has one writer, so looking takes microseconds and needs no lock between processes. What all ranks do
together they do in one order. Each rank numbers and names these *meetings* on the board when it comes to them. So ranks that
have parted are noticed, instead of waiting for each other or mixing what they send, and the error says where each of them is.

Each node has a board. That a rank of another node has failed comes by :class:`NodeNews`.
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
_MEETING = np.dtype([("digest", "q"), ("number", "d"), ("what", "S240")])  # the digest is one of all meetings up to it
_RANK = np.dtype([("came", "q"), ("failed", "q"), ("meetings", _MEETING, _KEPT), ("error", "S4096")])
"""What the board has of each rank: to how many meetings it has come, whether it has failed, its last meetings, and its error."""


def board_bytes(size: int) -> int:
    """Returns how much memory the board takes of so many ranks."""
    return _RANK.itemsize * size


class RankError(RuntimeError):
    """Another rank has failed or is elsewhere, so this one cannot go on."""


class RankInterrupt(KeyboardInterrupt):
    """Another rank was interrupted, and this one ends as if it had been, too."""


LOST = RankError, RankInterrupt
"""What is raised where other ranks are waited for in vain. An interrupt of this process is not among them."""


def _failed(who: str, when: str, error: str) -> BaseException:
    """What is raised where another rank has failed. An interrupt of one is one of all, so that a run ends as it does alone."""
    said = f"{who} has failed {when}: {error}"
    return RankInterrupt(said) if _INTERRUPTED.match(error) else RankError(said)


_INTERRUPTED = re.compile(r"(rank \d+ \(node \d+\): )?KeyboardInterrupt:")
"""How the error of an interrupted rank begins, on another node with the rank's name."""


class RankStatus:
    """What the ranks say to each other.

    Args:
        memory: of :func:`board_bytes`, which all ranks of the node have, full of zeros.
        rank: this process's number on its node.
        processes: of the other ranks, as far as they are known here.
        names: what the ranks of the node are called.
        elsewhere: returns how a rank of another node has failed; an empty string if none has.

    Attributes:
        failure: this rank's own error, in words.
        place: where this rank is in the training, in words.
    """

    def __init__(
        self,
        memory: SharedMemory,
        rank: int,
        processes: Mapping[int, int],
        names: Sequence[str],
        elsewhere: Callable[[], str],
    ) -> None:
        self.rank, self.size = rank, len(names)
        self._names = names
        self._others = [each for each in range(self.size) if each != rank]
        self._elsewhere = elsewhere
        self.failure = self.place = ""
        self._memory = memory  # what follows is in it
        ranks: Any = np.frombuffer(memory.bytes, _RANK, self.size)
        self._meetings, self._errors = ranks["meetings"], ranks["error"]
        # Python reads a number through a view of memory in half the time that NumPy's arrays take.
        self._came_of, self._failed = memoryview(ranks["came"]), memoryview(ranks["failed"])
        self._digests = memoryview(self._meetings["digest"])
        self._came = 0
        self._processes = select.poll()  # select itself refuses descriptors from 1,024 on
        self._descriptors: dict[int, int] = {}
        for other, pid in processes.items():
            with suppress(OSError):
                self._descriptors[descriptor := os.pidfd_open(pid)] = other
                self._processes.register(descriptor, select.POLLIN)

    # ------------------------------------------------------------------ meetings

    def arrive(self, what: str, number: float = 0) -> None:
        """Says that this rank comes to the next meeting.

        Args:
            what: all ranks do there, in words. It must be the same on all of them, as the place must be.
            number: for :meth:`number`. Whole ones are exact up to 2**53.

        Raises:
            RankError: another rank has come to another one.
        """
        text = f"{what}, {self.place}" if self.place else what
        digest = crc32(text.encode(), self.history)
        self._came += 1
        self._meetings[self.rank, self._came % _KEPT] = digest, number, text.encode()  # a text that is too long is cut
        publish(self._came_of, self.rank, self._came)
        self.compare()

    def here(self, rank: int) -> bool:
        """Returns whether a rank has come to this rank's last meeting."""
        return self._came_of[rank] >= self._came

    def all_here(self) -> bool:
        """Returns whether all ranks have come to this rank's last meeting."""
        return all(map(self.here, range(self.size)))

    def number(self, rank: int) -> float:
        """Returns the number that a rank has brought to this rank's last meeting. It has come."""
        return float(self._meetings["number"][rank, self._came % _KEPT])

    def compare(self) -> None:
        """Compares the meetings of all ranks, as far as both of two have come.

        Raises:
            RankError: they differ.
        """
        for other in self._others:
            both = min(self._came, self._came_of[other])
            if both and self._part(other, both):
                if self._failed[other]:  # it comes to other meetings for that
                    raise _failed(self._names[other], "meanwhile", self._error_of(other))
                raise RankError(self._parted(other, both))

    def _part(self, other: int, meeting: int) -> bool:
        mine, theirs = (self._digests[rank, meeting % _KEPT] for rank in (self.rank, other))
        # Of what is long ago there is nothing left to compare; the rank that was behind has done it.
        return mine != theirs and max(self._came, self._came_of[other]) - meeting < _KEPT - 1

    def _parted(self, other: int, meeting: int) -> str:
        """Says where the first difference is that is still on the board."""
        first = meeting
        while first > 1 and self._part(other, first - 1):
            first -= 1
        mine, theirs = (self._what(rank, first) for rank in (self.rank, other))
        return (
            f"The ranks have parted: {self._names[self.rank]} has come to {mine}, and {self._names[other]} to {theirs}. All "
            "ranks need the same number of batches, and whatever else they do together (steps, checkpoints, sums over ranks, "
            "exchanges of parameters or layers) all of them must do, in one order. It must not depend on the rank."
        )

    def _what(self, rank: int, meeting: int) -> str:
        """Returns one of a rank's last meetings, in words."""
        return _decoded(self._meetings["what"][rank, meeting % _KEPT])

    # ------------------------------------------------------------------ runs and failures

    def run_ends(self) -> None:
        """Says that this rank is at the end of its run: a meeting that it does not wait at, and finds no error at."""
        self.place = ""
        if not self.failure:  # else the others would find that they have parted before they find why
            with suppress(*LOST):  # those say so that wait for this rank
                self.arrive("the end of its run")

    def fail(self, error: BaseException) -> None:
        """Says that this rank fails, so that the others stop waiting for it. Only its first error counts."""
        if self.failure:
            return
        interrupted = isinstance(error, KeyboardInterrupt)
        self.failure = f"{KeyboardInterrupt.__name__ if interrupted else type(error).__name__}: {error}"
        self._errors[self.rank] = self.failure.encode(errors="replace")
        publish(self._failed, self.rank, 1)

    def _error_of(self, rank: int) -> str:
        return _decoded(self._errors[rank])

    def check(self, why: str) -> None:
        """Looks for ranks that will not come.

        Args:
            why: what is waited for, in words.

        Raises:
            RankError: one has failed, with its own error; or has parted from this one (by the end of its run, say), or ended.
            KeyboardInterrupt: one was interrupted.
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

    def until(self, reached: Callable[[], bool], why: Wait | str) -> None:
        """Waits for something that other ranks bring about.

        Args:
            reached: looks whether it is there.
            why: what becomes true by the wait, or what is waited for, in words.

        Raises:
            RankError: another rank will not bring it about, or has not within the time that a process group waits.
        """
        said, late, turns = in_words(why), _TIMEOUT.total_seconds(), 0
        began = looked = monotonic()
        while not reached():
            turns += 1
            sleep(0 if turns < 100 else min(turns * 1e-7, 1e-3))
            if turns < 100 or monotonic() - looked < LOOK:
                continue
            looked = monotonic()
            try:
                self.check(said)
                if looked - began > late:
                    raise RankError(
                        f"{self._names[self.rank]} has waited {late:.0f} seconds for {said}. {self._places()}."
                    )
            except LOST:
                if reached():  # in the last moment before another rank went on, and ended
                    return
                raise

    def _places(self) -> str:
        """Where the ranks of the node were last."""
        last = (self._what(rank, self._came_of[rank]) or "nothing" for rank in range(self.size))
        return "; ".join(f"{name} was last at {what}" for name, what in zip(self._names, last, strict=True))

    @property
    def history(self) -> int:
        """A digest of all meetings that this rank has come to. It is the same on all ranks that have come to as many."""
        return self._digests[self.rank, self._came % _KEPT]

    def close(self) -> None:
        """Frees what this object has open."""
        while self._descriptors:
            descriptor, _ = self._descriptors.popitem()
            self._processes.unregister(descriptor)
            os.close(descriptor)


class NodeNews:
    """Tells the ranks of all nodes that one has failed, by torch.distributed's store, at which their processes have met.

    A thread looks there, because a store that is out of reach may not answer for long.

    Args:
        name: under which ranks find each other's news. It is the same on all of them and no other run's.
        pause: seconds between two looks. The store is one process's, and every rank looks.

    Attributes:
        failure: the first one, or an empty string.
        lost: why no more is heard, or an empty string.
    """

    def __init__(self, name: str, pause: float) -> None:
        self._key = f"superpipeline/{name}/failure"
        self._pause = pause
        self.failure = self.lost = ""
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A connection of its own: what waits on the process group's does not hold up the news.
        self._store: Any = dist.TCPStore(*where, is_master=False, wait_for_workers=False)
        self._over = Event()
        self.begin()

    def begin(self) -> None:
        """A run begins: a thread looks for news until :meth:`end`."""
        self._over.set()
        self._over = Event()
        Thread(target=self._look, args=(self._over,), name="superpipeline-nodes", daemon=True).start()

    def _look(self, over: Event) -> None:
        try:
            while not over.wait(self._pause):
                if self._store.check([self._key]):
                    self.failure = self._store.get(self._key).decode(errors="replace")
                    return
        except RuntimeError:  # in order, perhaps: a rank that still needs rank 0 loses another connection, too
            self.lost = "the process of rank 0 (node 0) has ended, or cannot be reached"

    def tell(self, failure: str) -> None:
        """Tells all nodes of a failure, and gives them the time to hear of it: torch's store may go with this process."""
        telling = Thread(target=self._set, args=(failure,), daemon=True)
        telling.start()
        telling.join(1.0 + 2 * self._pause)

    def _set(self, failure: str) -> None:
        with suppress(RuntimeError):  # the store is gone
            self._store.compare_set(self._key, "", failure)
            sleep(2 * self._pause)

    def end(self) -> None:
        """A run ends, and with it the thread."""
        self._over.set()


LOOK = 0.05
"""Seconds between two looks for ranks that have failed."""

_TIMEOUT: timedelta = default_pg_timeout
"""How long a rank waits for another one that neither comes nor fails: as long as torch's process groups do."""


def _decoded(text: bytes) -> str:
    return bytes(text).decode(errors="replace")


def in_words(why: Wait | str) -> str:
    """What is waited for, as it stands after "for"."""
    return f"this: {why.value}" if isinstance(why, Wait) else why
