"""The board: a page of shared memory on which each rank says where it is, and why it has failed.

Every word on it has one writer, so looking takes microseconds and needs no lock between processes. What all ranks do
together they do in one order. Each rank numbers and names these *meetings* on the board when it comes to them. So ranks that
have parted are noticed, instead of waiting for each other or mixing what they send, and the error says where each of them is.

On several nodes each has a board. A board then also has a copy of what the primary of each other node has said on its own
(:mod:`~sp_lightning.device.node_news` brings it), which is looked at as a rank's is.
"""

from __future__ import annotations

import os
import select
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import Any
from zlib import crc32

from torch.distributed.constants import default_pg_timeout

from sp_lightning.device.layout import PAGE
from sp_lightning.device.shared_memory import SharedMemory, fence
from sp_lightning.device.waits import Wait

_WORDS, _KEPT, _ENTRY = 64, 32, 256  # of each rank: words of 8 bytes, meetings that are kept, and bytes of each of them
_TEXT = _ENTRY - 16
_FORMAT = f"qq{_TEXT}s"  # of a meeting: a digest of all up to it, a number, and what it is
# The last ones are the primary's (rank 0's); of them _HEARD is written where a copy is: when it was last another one.
_CAME, _FAILED, _TURNS, _SAID, _VALUE, _BEAT, _HEARD = range(7)
_PAGES = _WORDS * 8 + _KEPT * _ENTRY + PAGE  # the last page has the text of an error


def board_bytes(size: int, nodes: int = 1) -> int:
    """Returns how much memory the board takes of so many ranks, on one of so many nodes."""
    return _PAGES * (size + (nodes if nodes > 1 else 0))


class RankError(RuntimeError):
    """Another rank has failed or is elsewhere, so this one cannot go on."""


class Board:
    """What the ranks say to each other.

    Args:
        memory: of :func:`board_bytes`, which all ranks of the node have, full of zeros.
        rank: this process's number on its node.
        size: how many ranks the node has.
        processes: of the other ranks, as far as they are known here.
        names: what ranks are called, and behind them the nodes, if there are several.
        node: this node's number.

    Attributes:
        names: what ranks and nodes are called.
        failure: this rank's own error, in words.
        place: where this rank is in the training, in words.
    """

    def __init__(
        self,
        memory: SharedMemory,
        rank: int,
        size: int,
        processes: Mapping[int, int],
        names: Sequence[str] = (),
        node: int = 0,
    ) -> None:
        self.rank, self.size = rank, size
        self.names = list(names) or [f"rank {each}" for each in range(size)]
        self._name = self.names[rank]
        self._nodes = [each for each in range(size, len(self.names)) if each != size + node]
        self._others = [each for each in range(size) if each != rank] + self._nodes
        self.failure = self.place = ""
        self._memory = memory  # the words below are in it
        self._words: Any = memory.words("q")
        self._values: Any = memory.words("d")
        self._came = 0
        self._descriptors: dict[int, int] = {}
        for other, pid in processes.items():
            with suppress(OSError):
                self._descriptors[other] = os.pidfd_open(pid)

    def publish(self, words: Any, index: int, number: int) -> None:
        """Writes a number for the others, who see whatever was written before once they see it."""
        fence()
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
        for other in self._others:
            came = self._word(other, _CAME)
            both = min(self._came, came)
            if both and self._part(other, both) and (other < self.size or self._word(other, _CAME) == came):
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
            f"The ranks have parted: {self._name} has come to {mine}, and {self.names[other]} to {theirs}. All ranks need the "
            "same number of batches, and whatever else they do together (steps, checkpoints, sums over ranks, exchanges of "
            "parameters or layers) all of them must do, in one order. What it depends on must not depend on the rank."
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

    def run_ends(self) -> None:
        """Says that this rank is at the end of its run: a meeting that it does not wait at, and finds no error at."""
        self.place = ""
        if not self.failure:  # else the others would find that they have parted before they find why
            with suppress(RankError):  # those say so that wait for this rank
                self.come("the end of its run")

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
            RankError: one has failed, with its own error; or has parted from this one (by the end of its run, say), or ended.
        """
        for other in self._others:
            if self._word(other, _FAILED):
                raise RankError(
                    f"{self.names[other]} has failed while {self._name} waited for {why}: {self._error(other)}"
                )
        self.compare()
        for rank in self._gone():
            raise RankError(
                f"the process of {self.names[rank]} has ended while {self._name} waited for {why}. It was killed, by the "
                "system for want of memory, say, or it has left trainer.fit earlier than this one."
            )

    def _error(self, of: int) -> str:
        end = (of + 1) * _PAGES
        return self._memory.bytes[end - PAGE : end].rstrip(b"\0").decode(errors="replace")

    def _gone(self) -> Iterator[int]:
        """The ranks of the node whose processes have ended, as far as they are known here."""
        for rank, descriptor in self._descriptors.items():
            process = select.poll()  # select itself refuses descriptors from 1,024 on
            process.register(descriptor, select.POLLIN)
            if process.poll(0):
                yield rank

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
                    raise RankError(f"{self._name} has waited {late:.0f} seconds for {said}. {self._places()}.")
            except RankError:
                if reached():  # in the last moment before another rank went on, and ended
                    return
                raise

    def _places(self) -> str:
        """Where everybody was last."""
        found = [f"{self.names[rank]} was last at {self._last(rank)}" for rank in range(self.size)]
        for node, seconds in self.silences().items():
            said = f"{self.names[node]} was last at {self._last(node)}"
            found.append(
                f"{said}, and nothing has been heard of it for {seconds:.0f} seconds" if seconds > LATE else said
            )
        return "; ".join(found)

    # ------------------------------------------------------------------ nodes

    @property
    def history(self) -> int:
        """A digest of all meetings that this rank has come to. It is the same on all ranks that have come to as many."""
        return self._entry(self.rank, self._came)[0]

    def tell(self) -> bytes:
        """Returns what the primary has said, for the other nodes; and if another rank of this one has failed, how it has."""
        self._write(_BEAT, self._word(self.rank, _BEAT) + 1)
        begin = self.rank * _PAGES
        said = bytearray(self._memory.bytes[begin : begin + _PAGES])
        failure = self._first_failure()
        if failure:
            struct.pack_into("q", said, _FAILED * 8, 1)
            said[-PAGE:] = failure.encode(errors="replace")[: PAGE - 1].ljust(PAGE, b"\0")
        return bytes(said)

    def _first_failure(self) -> str:
        """The error of a rank of this node that other ranks' errors come from, as far as that can be told."""
        failed = [(self._error(rank), self.names[rank]) for rank in range(self.size) if self._word(rank, _FAILED)]
        first = min(failed, key=lambda each: each[0].startswith(RankError.__name__), default=None)
        if first is not None:
            return f"{first[1]}: {first[0]}"
        return next((f"the process of {self.names[rank]} has ended" for rank in self._gone()), "")

    def hear(self, node: int, said: bytes) -> None:
        """Copies what the primary of another node has said.

        Whoever looks meanwhile sees nothing or all of it: the number of meetings is written last, and is 0 until then.
        """
        record, words = self.size + node, _WORDS * 8
        begin, word = record * _PAGES, record * _PAGES // 8
        came, beat = (struct.unpack_from("q", said, of * 8)[0] for of in (_CAME, _BEAT))
        if beat == self._words[word + _BEAT]:
            return
        numbers = bytearray(said[:words])
        struct.pack_into("d", numbers, _HEARD * 8, monotonic())
        self.publish(self._words, word + _CAME, 0)
        self._memory.bytes[begin + words : begin + _PAGES] = said[words:]
        self._memory.bytes[begin + 8 : begin + words] = numbers[8:]
        self.publish(self._words, word + _CAME, came)

    def silences(self) -> dict[int, float]:
        """For how many seconds nothing has been heard of each other node."""
        heard = {node: self._values[node * _PAGES // 8 + _HEARD] for node in self._nodes}
        return {node: monotonic() - when for node, when in heard.items() if when}

    def silent(self) -> str:
        """Of which nodes nothing is heard any more, as a further sentence; an empty string if there are none."""
        late = [
            f"{self.names[node]} for {seconds:.0f} seconds"
            for node, seconds in self.silences().items()
            if seconds > LATE
        ]
        return f". Nothing has been heard of {', '.join(late)}: it has ended, or cannot be reached." if late else ""

    def close(self) -> None:
        """Frees what this object has open."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


LOOK = 0.05
"""Seconds between two looks for ranks that have failed."""

LATE = 2.0
"""Seconds after which a node of which nothing was heard is named."""

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
