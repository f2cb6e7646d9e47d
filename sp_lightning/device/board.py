"""The board: a page of shared memory on which each rank says where it is, and why it has failed.

Every word on it has one writer, so looking takes microseconds and needs no lock between processes. What all ranks do
together they do in one order. Each rank numbers and names these *meetings* on the board when it comes to them. So ranks that
have parted are noticed, instead of waiting for each other or mixing what they send, and the error says where each of them is.
"""

from __future__ import annotations

import os
import select
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import Any
from zlib import crc32

from torch.distributed.constants import default_pg_timeout

from sp_lightning.device.layout import PAGE
from sp_lightning.device.shared_memory import SharedMemory
from sp_lightning.device.waits import Wait

_WORDS, _KEPT, _ENTRY = 64, 32, 256  # of each rank: words of 8 bytes, meetings that are kept, and bytes of each of them
_TEXT = _ENTRY - 16
_FORMAT = f"qq{_TEXT}s"  # of a meeting: a digest of all up to it, a number, and what it is
_CAME, _FAILED, _ENDED, _TURNS, _SAID, _VALUE = range(6)  # the last three are the primary's (rank 0's)
_PAGES = _WORDS * 8 + _KEPT * _ENTRY + PAGE  # the last page has the text of an error


def board_bytes(size: int) -> int:
    """Returns how much memory the board of so many ranks takes."""
    return _PAGES * size


class RankError(RuntimeError):
    """Another rank has failed or is elsewhere, so this one cannot go on."""


class Board:
    """What the ranks say to each other.

    Args:
        memory: of :func:`board_bytes`, which all ranks have, full of zeros.
        rank: this process's number.
        size: how many ranks there are.
        processes: of the other ranks, as far as they are known here.

    Attributes:
        failure: this rank's own error, in words.
        place: where this rank is in the training, in words.
    """

    def __init__(self, memory: SharedMemory, rank: int, size: int, processes: Mapping[int, int]) -> None:
        self.rank, self.size = rank, size
        self.failure = self.place = ""
        self._memory = memory  # the words below are in it
        self._words: Any = memory.words("q")
        self._values: Any = memory.words("d")
        self._lock = threading.Lock()
        self._came = self._runs = 0
        self._descriptors: dict[int, int] = {}
        for other, pid in processes.items():
            with suppress(OSError):
                self._descriptors[other] = os.pidfd_open(pid)

    def publish(self, words: Any, index: int, number: int) -> None:
        """Writes a number for the others, who see whatever was written before once they see it."""
        with self._lock:
            words[index] = number

    def _word(self, rank: int, of: int) -> int:
        number: int = self._words[rank * _PAGES // 8 + of]
        return number

    def _write(self, of: int, number: int) -> None:
        self.publish(self._words, self.rank * _PAGES // 8 + of, number)

    # ------------------------------------------------------------------ meetings

    def come(self, what: str, number: int = 0) -> None:
        """Says that this rank comes to the next meeting.

        Args:
            what: all ranks do there, in words. It must be the same on all of them, as the place must be.
            number: for :meth:`numbers`.

        Raises:
            RankError: another rank has come to another one.
        """
        text = f"{what}, {self.place}" if self.place else what
        came = self._came + 1
        digest = crc32(text.encode(), self._entry(self.rank, self._came)[0])
        at = self._entry_at(self.rank, came)
        # A text that is cut ends in zeros, as a shorter one does.
        entry = struct.pack(_FORMAT, digest, number, text.encode()[: _TEXT - 1])
        self._memory.bytes[at : at + _ENTRY] = entry
        self._came = came
        self._write(_CAME, came)
        self.compare()

    def all_here(self) -> bool:
        """Returns whether all ranks have come to this rank's last meeting."""
        return all(self._word(rank, _CAME) >= self._came for rank in range(self.size))

    def numbers(self) -> list[int]:
        """Returns the numbers that all ranks have brought to this rank's last meeting. All of them are here."""
        entries = (self._entry_at(rank, self._came) for rank in range(self.size))
        return [struct.unpack_from(_FORMAT, self._memory.bytes, at)[1] for at in entries]

    def compare(self) -> None:
        """Compares the meetings of all ranks, as far as both of two have come.

        Raises:
            RankError: they differ.
        """
        for other in range(self.size):
            both = min(self._came, self._word(other, _CAME))
            if other != self.rank and both and self._part(other, both):
                raise RankError(self._parted(other, both))

    def _part(self, other: int, meeting: int) -> bool:
        mine, theirs = self._entry(self.rank, meeting), self._entry(other, meeting)
        # Of what is long ago there is nothing left to compare; whoever was behind has done it.
        return mine[0] != theirs[0] and max(self._came, self._word(other, _CAME)) - meeting < _KEPT - 1

    def _parted(self, other: int, meeting: int) -> str:
        """Says where the first difference is that is still on the board."""
        first = meeting
        while first > 1 and self._part(other, first - 1):
            first -= 1
        mine, theirs = (self._entry(rank, first)[1] for rank in (self.rank, other))
        return (
            f"The ranks have parted: rank {self.rank} has come to {mine}, and rank {other} to {theirs}. All ranks need the same "
            "number of batches, and whatever else they do together (steps, checkpoints, sums over ranks, exchanges of parameters "
            "or layers) all of them must do, in one order. What it depends on must not depend on the rank."
        )

    def _entry_at(self, rank: int, meeting: int) -> int:
        return rank * _PAGES + _WORDS * 8 + meeting % _KEPT * _ENTRY

    def _entry(self, rank: int, meeting: int) -> tuple[int, str]:
        """Returns a digest of all meetings up to this one, and what it is."""
        at = self._entry_at(rank, meeting)
        digest, _, text = struct.unpack_from(_FORMAT, self._memory.bytes, at)
        return digest, text.rstrip(b"\0").decode(errors="replace")

    # ------------------------------------------------------------------ the primary's turns

    def end_turn(self, turns: int, word: int, value: float) -> None:
        """Says on the primary that so many of its turns are over, and what it has to say."""
        self._words[_SAID] = word
        self._values[_VALUE] = value
        self._write(_TURNS, turns)

    def turn_is_over(self, turns: int) -> bool:
        """Returns whether so many of the primary's turns are over."""
        return self._word(0, _TURNS) >= turns

    def said(self) -> tuple[int, float]:
        """Returns what the primary has said at the end of its last turn."""
        return self._words[_SAID], self._values[_VALUE]

    # ------------------------------------------------------------------ runs and failures

    def run_begins(self) -> None:
        """Says that this rank begins its next run."""
        self._runs += 1
        self.place = ""

    def run_ends(self) -> None:
        """Says that this rank is at the end of its run: it comes to no more meetings of it."""
        self.place = ""
        self._write(_ENDED, self._runs)

    def fail(self, error: BaseException) -> None:
        """Says that this rank fails, so that the others stop waiting for it. Only its first error counts."""
        if self.failure:
            return
        self.failure = f"{type(error).__name__}: {error}"
        begin = (self.rank + 1) * _PAGES - PAGE
        text = self.failure.encode(errors="replace")[: PAGE - 1]
        self._memory.bytes[begin : begin + len(text)] = text
        self._write(_FAILED, 1)

    def check(self, why: str) -> None:
        """Looks for ranks that will not come.

        Args:
            why: what is waited for, in words.

        Raises:
            RankError: one has failed, with its own error; or has parted from this one, ended its run, or ended.
        """
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank in others:
            if self._word(rank, _FAILED):
                end = (rank + 1) * _PAGES
                text = self._memory.bytes[end - PAGE : end].rstrip(b"\0").decode(errors="replace")
                raise RankError(f"rank {rank} has failed while rank {self.rank} waited for {why}: {text}")
        self.compare()
        running = self._word(self.rank, _ENDED) < self._runs
        for rank in others:
            if running and self._word(rank, _ENDED) >= self._runs and self._word(rank, _CAME) < self._came:
                raise RankError(
                    f"rank {rank} has ended its run while rank {self.rank} waited for {why}. The last that they did together "
                    f"was {self._last(rank)}; rank {self.rank} has come to {self._last(self.rank)}. All ranks need the same "
                    "number of batches and steps."
                )
        for rank, descriptor in self._descriptors.items():
            if select.select([descriptor], [], [], 0)[0]:
                raise RankError(
                    f"the process of rank {rank} has ended while rank {self.rank} waited for {why}. It was killed, by the "
                    "system for want of memory, say, or it has left trainer.fit earlier than this one."
                )

    def _last(self, rank: int) -> str:
        return self._entry(rank, self._word(rank, _CAME))[1] or "nothing"

    def until(self, reached: Callable[[], bool], why: Wait | str) -> None:
        """Waits for something that other ranks bring about.

        Args:
            reached: looks whether it is there.
            why: what becomes true by the wait, or what is waited for, in words.

        Raises:
            RankError: another rank will not bring it about, or has not within the time that a process group waits.
        """
        said, late = in_words(why), _TIMEOUT.total_seconds()
        for waited in _pauses(reached):
            try:
                self.check(said)
                if waited > late:
                    places = "; ".join(f"rank {rank} was last at {self._last(rank)}" for rank in range(self.size))
                    raise RankError(f"rank {self.rank} has waited {late:.0f} seconds for {said}. {places}.")
            except RankError:
                if reached():  # in the last moment before another rank went on, and ended
                    return
                raise

    def close(self) -> None:
        """Frees what this object has open."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


LOOK = 0.05
"""Seconds between two looks for ranks that have failed."""

_TIMEOUT: timedelta = default_pg_timeout
"""How long a rank waits for another one that neither comes nor fails: as long as torch's process groups do."""


def _pauses(reached: Callable[[], bool]) -> Iterator[float]:
    """Waits for something. Yields the seconds that have passed when it is time to look for ranks that have failed."""
    turns, began = 0, monotonic()
    looked = began
    while not reached():
        turns += 1
        if turns < 100:
            sleep(0)
            continue
        sleep(min(turns * 1e-7, 1e-3))
        if monotonic() - looked > LOOK:
            looked = monotonic()
            yield looked - began


def in_words(why: Wait | str) -> str:
    """What is waited for, as it stands after "for"."""
    return f"this: {why.value}" if isinstance(why, Wait) else why
