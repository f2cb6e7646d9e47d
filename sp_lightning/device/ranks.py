"""The ranks: the processes that train one model together, each with a device of its own, over one store on the host.

Tensors travel by ``torch.distributed``. Beside it the ranks have a *board* in shared memory: every wait ends when another rank
has failed, with that rank's own error, or has come to something else.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import and_
from time import sleep
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from sp_lightning.device.board import LOOK, Board, RankError, board_bytes, in_words
from sp_lightning.device.layout import whole_pages
from sp_lightning.device.shared_memory import SharedMemory, create, supported
from sp_lightning.device.waits import Wait

FINISHED, CLOSURE = 0, 1
"""What the primary says at the end of its turn: that it is over, or that everybody is to run the closure first."""


class Ranks:
    """The processes of this node. All of them make one of these, and call its collective methods, in the same order.

    Attributes:
        rank: this process's number.
        size: how many there are.
        primary: whether this is the rank that updates the weights (rank 0).

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
        self._turns = 0
        self._board: Board | None = None
        memory = self.share(board_bytes(self.size), "board")
        self._board = Board(memory, self.rank, self.size, self._pids)

    @property
    def board(self) -> Board:
        """What the ranks say to each other."""
        assert self._board is not None
        return self._board

    # ------------------------------------------------------------------ memory

    def share(self, nbytes: int, name: str) -> SharedMemory:
        """Makes memory that all ranks have, full of zeros. Collective.

        Args:
            nbytes: how much.
            name: what it is for.

        Raises:
            RuntimeError: the system has no such memory.
        """
        nbytes = whole_pages(nbytes)
        with self._for_memory(nbytes, name):
            made = create(nbytes, f"superpipeline {name}") if self.primary else None
        descriptor = self._receive(name) if made is None else self._hand_out(made, name)
        with self._for_memory(nbytes, name):
            memory = SharedMemory(descriptor, nbytes)
        os.close(descriptor)
        return memory

    @contextmanager
    def _for_memory(self, nbytes: int, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RuntimeError(
                f"The system does not give rank {self.rank} {nbytes / 2**30:.2f} GiB of host memory for {name}, which all "
                f"processes of the node share: {error}. Raise the limits of processes (ulimit -v, ulimit -f), or train less: "
                "freeze layers, or train adapters."
            ) from error

    def _hand_out(self, descriptor: int, name: str) -> int:
        """Sends the descriptor of memory to the others, which need no file system in common with this one."""
        with socket.socket(socket.AF_UNIX) as server:
            token = f"superpipeline-{uuid4().hex}"
            server.bind(f"\0{token}")
            server.listen(self.size)
            server.settimeout(_PATIENCE)
            self._broadcast_object(token, name)
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

    def _receive(self, name: str) -> int:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_PATIENCE)
            connection.connect(f"\0{self._broadcast_object(None, name)}")
            connection.sendall(struct.pack("q", self.rank))
            self._pids[0] = _peer(connection)[0]
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        return descriptors[0]

    # ------------------------------------------------------------------ collectives

    def meet(self, what: str, why: Wait | None = None, number: int = 0) -> None:
        """Waits until all ranks have come here.

        Args:
            what: all of them do here, in words.
            why: what becomes true by the wait, if that has a name.
            number: for the others.

        Raises:
            RankError: another rank has failed, or has come to something else.
        """
        if self._board is None:  # what follows is a collective, which waits by itself
            return
        self._board.come(what, number)
        self.until(self._board.all_here, why or what)
        self._board.compare()

    def barrier(self, why: Wait) -> None:
        """Waits until all ranks have come here. On a device they may still be at work."""
        self.meet(f"a barrier ({why.value})", why)

    def _broadcast_object(self, value: Any, name: str) -> Any:
        """Returns the primary's value on all ranks."""
        values = [value]
        self.meet(f"memory for {name}")
        try:
            dist.broadcast_object_list(values, 0, group=self._host)
        except RuntimeError as error:
            raise self.lost("something that rank 0 sends") from error
        return values[0]

    def _gather_objects(self, value: Any, what: str) -> list[Any]:
        """Returns the values of all ranks, in their order, on all of them."""
        values: list[Any] = [None] * self.size
        self.meet(f"a comparison of {what}")
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
        everybody = self._gather_objects(dict(mine), what)
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
        self.board.come("the end of a backward")
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
            self.board.come(f"the buffers of rank 0, {flat.nbytes} bytes")
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
        self.board.come(f"gradients of {sent.nbytes} bytes")
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
        said = in_words(why)
        for _ in range(0 if self._board is None else 20):  # whoever has failed says so, if it can
            self.board.check(said)
            sleep(LOOK)
        return RankError(f"rank {self.rank} has lost the others while it waited for {said}")

    # ------------------------------------------------------------------ the primary's turn

    def arrive(self) -> None:
        """Says that this rank has come to the primary's next turn."""
        self._turns += 1
        self.board.come("an optimizer's step or clipping")

    def all_arrived(self) -> None:
        """Lets the primary wait until all others have come to its turn."""
        self.arrive()
        self.until(self.board.all_here, Wait.STEP_AFTER_ARRIVAL)
        self.board.compare()

    def say(self, word: int, value: float = 0.0) -> None:
        """Ends the primary's turn, with a word and a number for the others."""
        self.board.end_turn(self._turns, word, value)

    def hear(self) -> tuple[int, float]:
        """Waits for the end of the primary's turn, and returns what it has said."""
        self.until(lambda: self.board.turn_is_over(self._turns), Wait.USE_AFTER_TURN)
        return self.board.said()

    def same(self, number: int, what: str) -> bool:
        """Returns whether all ranks have come with the same number.

        Args:
            number: this rank's.
            what: what begins, in words.
        """
        self.meet(what, number=number)
        return len(set(self.board.numbers())) == 1

    def all_have(self, bits: int, what: str) -> int:
        """Returns the bits that all ranks have come with. The arguments are as in :meth:`same`."""
        self.meet(what, number=bits)
        return reduce(and_, self.board.numbers())

    # ------------------------------------------------------------------ waits

    def publish(self, words: Any, index: int, number: int) -> None:
        """As :meth:`sp_lightning.device.board.Board.publish`."""
        self.board.publish(words, index, number)

    def until(self, reached: Callable[[], bool], why: Wait | str) -> None:
        """As :meth:`sp_lightning.device.board.Board.until`."""
        if self._board is not None:
            self._board.until(reached, why)

    @property
    def failure(self) -> str:
        """This rank's own error, in words."""
        return self.board.failure

    def fail(self, error: BaseException) -> None:
        """As :meth:`sp_lightning.device.board.Board.fail`."""
        self.board.fail(error)

    def close(self) -> None:
        """Frees what this object has open. Not collective."""
        self.board.close()


_PATIENCE = 60.0
"""Seconds until a rank that does not come for shared memory is given up."""


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
