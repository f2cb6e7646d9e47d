"""The ranks: the processes that train one model together, each with a device of its own, over one store on the host.

Tensors travel by ``torch.distributed``. Beside it the ranks have a *board*, a page of shared memory with one writer for each
word. A wait on the board takes microseconds, and it ends when another rank has failed: with that rank's own error.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from sp_lightning.device.layout import PAGE, whole_pages
from sp_lightning.device.shared_memory import SharedMemory, create, supported
from sp_lightning.device.waits import Wait

_ROW, _TEXT = 64, PAGE  # words of 8 bytes, and bytes of text, for each rank
_ARRIVED, _FAILED, _DONE, _WORD, _VALUE, _NUMBER, _COMPARED = range(7)

FINISHED, CLOSURE = 0, 1
"""What the primary says at the end of its turn: that it is over, or that everybody is to run the closure first."""


class RankError(RuntimeError):
    """Another rank has failed, so this one cannot go on."""


class Ranks:
    """The processes of this node. All of them make one of these, and call its collective methods, in the same order.

    Attributes:
        rank: this process's number.
        size: how many there are.
        primary: whether this is the rank that updates the weights (rank 0).
        failure: this rank's own error, in words.

    Args:
        device: where this rank computes.

    Raises:
        RuntimeError: memory cannot be shared on this system.
    """

    def __init__(self, device: torch.device) -> None:
        why = supported()
        if why:
            raise RuntimeError(
                f"superpipeline shares host memory between the processes of several devices, and cannot do so here: {why}. "
                "Pass Trainer(devices=1)."
            )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.primary = self.rank == 0
        # Groups of their own: what the user's code reduces meanwhile, in other threads too, is ordered by itself.
        self._host: Any = dist.new_group(backend="gloo")
        self._on_host = device.type == "cpu"
        self._devices: Any = self._host if self._on_host else dist.new_group()
        self._pids: dict[int, int] = {}
        self._process_descriptors: dict[int, int] = {}
        self._turns = self._comparisons = 0
        self._lock = threading.Lock()
        self.failure = ""
        self._words: Any = None  # until there is a board
        board = self.share((_ROW * 8 + _TEXT) * self.size, "board")
        self._board = board
        self._words = board.words("q")
        self._values: Any = board.words("d")
        for rank, pid in self._pids.items():
            with suppress(OSError):
                self._process_descriptors[rank] = os.pidfd_open(pid)

    # ------------------------------------------------------------------ memory

    def share(self, nbytes: int, name: str) -> SharedMemory:
        """Makes memory that all ranks have, full of zeros. Collective.

        Args:
            nbytes: how much.
            name: what it is for.
        """
        nbytes = whole_pages(nbytes)
        descriptor = self._hand_out(nbytes, name) if self.primary else self._receive()
        memory = SharedMemory(descriptor, nbytes)
        os.close(descriptor)
        return memory

    def _hand_out(self, nbytes: int, name: str) -> int:
        """Creates memory and sends its descriptor to the others, which need no file system in common with this one."""
        descriptor = create(nbytes, f"superpipeline {name}")
        with socket.socket(socket.AF_UNIX) as server:
            token = f"superpipeline-{uuid4().hex}"
            server.bind(f"\0{token}")
            server.listen(self.size)
            server.settimeout(_PATIENCE)
            self.broadcast_object(token)
            left = self.size - 1
            while left:
                connection, _ = server.accept()
                with connection:
                    pid, user, _ = _peer(connection)
                    if user == os.getuid():
                        rank = struct.unpack("q", connection.recv(8))[0]
                        self._pids[rank] = pid
                        socket.send_fds(connection, [b"."], [descriptor])
                        left -= 1
        return descriptor

    def _receive(self) -> int:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_PATIENCE)
            connection.connect(f"\0{self.broadcast_object(None)}")
            connection.sendall(struct.pack("q", self.rank))
            self._pids[0] = _peer(connection)[0]
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        return descriptors[0]

    # ------------------------------------------------------------------ collectives

    def barrier(self, why: Wait) -> None:
        """Waits until all ranks have come here."""
        self._wait_for(dist.barrier(group=self._host, async_op=True), why)

    def broadcast_object(self, value: Any) -> Any:
        """Returns the primary's value on all ranks."""
        values = [value]
        try:
            dist.broadcast_object_list(values, 0, group=self._host)
        except RuntimeError as error:
            raise self.lost("something that rank 0 sends") from error
        return values[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in their order, on all of them."""
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self._host)
        except RuntimeError as error:
            raise self.lost("what the others have, to compare it") from error
        return values

    def must_agree(self, what: str, mine: Mapping[str, Any], remedy: str) -> None:
        """Compares what should be the same on all ranks. Collective; all ranks raise the same error.

        Args:
            what: what is compared, in words.
            mine: this rank's, by name, in order.
            remedy: what to do about a difference.

        Raises:
            ValueError: some rank has something else than rank 0.
        """
        everybody = self.gather_objects(dict(mine))
        for rank, theirs in enumerate(everybody):
            found = _first_difference(everybody[0], theirs)
            if found:
                name, first, other = found
                raise ValueError(
                    f"The {what} of rank {rank} are not those of rank 0: {name} is {other} on rank {rank} and {first} on "
                    f"rank 0. {remedy}"
                )

    def largest(self, values: Tensor) -> None:
        """Replaces whole numbers in host memory by the largest that any rank has at the same place."""
        self._wait_for(
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._host, async_op=True), Wait.SHOW_AFTER_LANDING
        )

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites tensors by the primary's: all that have a device and a dtype in common at once, as ddp does."""
        alike = defaultdict[Any, list[Tensor]](list)
        for tensor in tensors:
            alike[tensor.device, tensor.dtype].append(tensor)
        for (device, _), each in alike.items():
            host = self._on_host or device.type == "cpu"
            flat = torch.cat([tensor.reshape(-1) for tensor in each])
            group = self._host if host else self._devices
            self._wait_for(dist.broadcast(flat, 0, group=group, async_op=True), "the buffers of rank 0", host=host)
            if not self.primary:
                for tensor, value in zip(each, flat.split([tensor.numel() for tensor in each]), strict=True):
                    tensor.copy_(value.view(tensor.shape))

    def exchange(self, received: Tensor, sent: Tensor) -> None:
        """Sends the parts of a flat tensor on the device, one to each rank, and receives as many.

        Args:
            received: is overwritten: the parts of all ranks that are meant for this one, in the order of ranks.
            sent: of the same size, which all ranks can divide by their number.
        """
        self._wait_for(
            dist.all_to_all_single(received, sent, group=self._devices, async_op=True), "gradients", host=self._on_host
        )

    def _wait_for(self, work: Any, why: Wait | str, *, host: bool = True) -> None:
        """Waits for a collective: the host by looking at it now and then, a stream of an accelerator by itself."""
        if host:
            self.until(work.is_completed, why)
        try:
            work.wait()
        except RuntimeError as error:
            raise self.lost(why) from error

    def lost(self, why: Wait | str) -> RankError:
        """Returns the error for a collective that has failed, because another rank has left it.

        Raises:
            RankError: the other rank has said why.
        """
        for _ in range(0 if self._words is None else 20):  # whoever has failed says so, if it can
            self.check(why)
            sleep(_LOOK)
        return RankError(f"rank {self.rank} has lost the others while it waited for {_said(why)}")

    # ------------------------------------------------------------------ the primary's turn

    def arrive(self) -> None:
        """Says that this rank has come to the primary's next turn."""
        self._turns += 1
        self.publish(self._words, self.rank * _ROW + _ARRIVED, self._turns)

    def all_arrived(self) -> None:
        """Lets the primary wait until all others have come to its turn."""
        self.arrive()
        others = range(1, self.size)
        self.until(
            lambda: all(self._words[r * _ROW + _ARRIVED] >= self._turns for r in others), Wait.STEP_AFTER_ARRIVAL
        )

    def say(self, word: int, value: float = 0.0) -> None:
        """Ends the primary's turn, with a word and a number for the others."""
        self._words[_WORD] = word
        self._values[_VALUE] = value
        self.publish(self._words, _DONE, self._turns)

    def hear(self) -> tuple[int, float]:
        """Waits for the end of the primary's turn, and returns what it has said."""
        self.until(lambda: self._words[_DONE] >= self._turns, Wait.USE_AFTER_TURN)
        with self._lock:
            return self._words[_WORD], self._values[_VALUE]

    def same(self, number: int, what: str) -> bool:
        """Returns whether all ranks have come with the same number. Between two calls there is another wait for all.

        Args:
            number: this rank's.
            what: what begins, for the error of a wait.
        """
        self._comparisons += 1
        self._words[self.rank * _ROW + _NUMBER] = number
        self.publish(self._words, self.rank * _ROW + _COMPARED, self._comparisons)
        rows = range(0, self.size * _ROW, _ROW)
        self.until(lambda: all(self._words[row + _COMPARED] >= self._comparisons for row in rows), what)
        return all(self._words[row + _NUMBER] == number for row in rows)

    # ------------------------------------------------------------------ failures

    def fail(self, error: BaseException) -> None:
        """Says that this rank fails, so that the others stop waiting for it. Only its first error counts."""
        if self.failure:
            return
        self.failure = f"{type(error).__name__}: {error}"
        begin = self.size * _ROW * 8 + self.rank * _TEXT
        text = self.failure.encode(errors="replace")[: _TEXT - 1]
        self._board.bytes[begin : begin + len(text)] = text
        self.publish(self._words, self.rank * _ROW + _FAILED, 1)

    def check(self, why: Wait | str) -> None:
        """Looks for ranks that have failed.

        Raises:
            RankError: one has, with its own error.
        """
        for rank in range(self.size):
            if rank != self.rank and self._words[rank * _ROW + _FAILED]:
                begin = self.size * _ROW * 8 + rank * _TEXT
                text = bytes(self._board.bytes[begin : begin + _TEXT]).rstrip(b"\0").decode(errors="replace")
                raise RankError(f"rank {rank} has failed while rank {self.rank} waited for {_said(why)}: {text}")
        for rank, descriptor in self._process_descriptors.items():
            if select.select([descriptor], [], [], 0)[0]:
                raise RankError(
                    f"the process of rank {rank} has ended while rank {self.rank} waited for {_said(why)}. It was killed, "
                    "by the system for want of memory, say, or it has left trainer.fit earlier than this one."
                )

    def publish(self, words: Any, index: int, number: int) -> None:
        """Writes a number for the others, who see whatever was written before once they see it."""
        with self._lock:
            words[index] = number

    def until(self, reached: Callable[[], bool], why: Wait | str) -> None:
        """Waits for something that other ranks bring about.

        Args:
            reached: looks whether it is there.
            why: what becomes true by the wait, or what is waited for, in words.

        Raises:
            RankError: another rank has failed meanwhile.
        """
        turns, looked = 0, monotonic()
        while not reached():
            turns += 1
            if turns < 100:
                sleep(0)
                continue
            sleep(min(turns * 1e-7, 1e-3))
            if monotonic() - looked > _LOOK:
                looked = monotonic()
                self.check(why)

    def close(self) -> None:
        """Frees what this object has open. Not collective."""
        for descriptor in self._process_descriptors.values():
            os.close(descriptor)
        self._process_descriptors.clear()


_PATIENCE = 60.0
"""Seconds until a rank that does not come for shared memory is given up."""

_LOOK = 0.05
"""Seconds between two looks for ranks that have failed."""


def _said(why: Wait | str) -> str:
    """What is waited for, as it stands after "for"."""
    return f"this: {why.value}" if isinstance(why, Wait) else why


def _first_difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Returns the first name whose values differ, with both values."""
    for name in dict.fromkeys([*first, *other]):
        values = first.get(name, "not there"), other.get(name, "not there")
        if values[0] != values[1]:
            return name, *values
    if list(first) != list(other):
        return next((a, f"before {b!r}", f"after {b!r}") for a, b in zip(first, other, strict=True) if a != b)
    return None


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """Returns process, user and group at the other end of a connection, as this process numbers them."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
