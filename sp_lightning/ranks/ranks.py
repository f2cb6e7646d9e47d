"""The ranks: the processes that train one model together, each with a device of its own, over one store on the host.

Tensors travel by ``torch.distributed``. What all ranks do together, in one order, is a *meeting*. The ranks have a *board* in
shared memory: every wait ends when another rank has failed, with that rank's own error, or has come to something else.

Several nodes are replicas: each has a store and a board of its own, and a primary that updates its weights. What ranks of
different nodes do together is a collective of torch.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from operator import and_
from typing import Any
from uuid import uuid4

import torch

from sp_lightning.device.device import Wait
from sp_lightning.device.layout import whole_pages
from sp_lightning.device.pages import create, supported
from sp_lightning.ranks.board import NodeNews, RankError, RankStatus, board_bytes
from sp_lightning.ranks.collectives import Collectives
from sp_lightning.ranks.shared_memory import SharedMemory, hand_out, receive


class Ranks(Collectives):
    """The processes of this node, and what they have to do with those of others. The processes of all nodes make one of these,
    and call its collective methods, in the same order.

    Args:
        device: where this rank computes.
        per_node: how many ranks each node has; None: there is one node.

    Raises:
        RuntimeError: memory cannot be shared on this system.

    Attributes:
        over: whether its last run has ended: the next object that is made closes this one.
        closed: whether it is closed.
    """

    def __init__(self, device: torch.device, per_node: int | None = None) -> None:
        why = supported()
        if why:
            raise RuntimeError(
                f"superpipeline shares host memory between the processes of several devices, and cannot do so here: {why}. "
                "Pass Trainer(devices=1)."
            )
        for each in list(_open):  # here, where all processes are: not when Python collects them
            if each.over:
                each.close()
        super().__init__(device, per_node)
        self.over: bool = False
        self.closed = False
        self._pids: dict[int, int] = {}
        memory = self.share(board_bytes(self.size), "board")
        names = [self.called(self.node * self.size + rank) for rank in range(self.size)]
        self._news: NodeNews | None = None
        self._board = RankStatus(memory, self.rank, self._pids, names, lambda: self._news.failure if self._news else "")
        if self.nodes > 1:
            try:
                name = self._gather_objects(uuid4().hex, "the first meeting of all nodes")[0]
                self._news = NodeNews(name, 0.2 * max(1, self.world // 32))
            except BaseException as error:
                self._board.fail(error)  # no other code has this object yet that would tell of it
                raise
        _open.append(self)

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
        if made is None:
            descriptor, self._pids[0] = receive(self._broadcast_object(None, name), self.rank)
        else:
            descriptor = made
            self._pids.update(hand_out(made, self.size - 1, lambda token: self._broadcast_object(token, name)))
        try:
            with self._for_memory(nbytes, name):
                return SharedMemory(descriptor, nbytes)
        finally:
            os.close(descriptor)

    @contextmanager
    def _for_memory(self, nbytes: int, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RuntimeError(
                f"The system does not give {self.name} {nbytes / 2**30:.2f} GiB of host memory for {name}, which all "
                f"processes of the node share: {error}. Raise the limits of processes (ulimit -v, ulimit -f), or train less: "
                "freeze layers, or train adapters."
            ) from error

    # ------------------------------------------------------------------ what is compared

    def must_agree(self, what: str, mine: Mapping[str, Any], remedy: str, *, primaries: bool = False) -> None:
        """Compares what should be the same on all ranks. Collective; all ranks raise the same error.

        Args:
            what: what is compared, in words.
            mine: this rank's, by name, in order.
            remedy: what to do about a difference.
            primaries: whether only what the primaries of the nodes have is compared.

        Raises:
            ValueError: some rank has something else than rank 0.
        """
        everybody = self._gather_objects(
            dict(mine) if self.primary or not primaries else None, f"a comparison of {what}"
        )
        for rank, theirs in enumerate(everybody):
            found = None if theirs is None else _first_difference(everybody[0], theirs)
            if found:
                name, first, other = found
                raise ValueError(
                    f"The {what} of {self.called(rank)} are not those of rank 0: {name} is {other} on rank {rank} and "
                    f"{first} on rank 0. {remedy}"
                )

    def gather_numbers(self, number: int, what: str) -> list[int]:
        """Returns the numbers of all ranks of this node. The arguments are as in :meth:`same`."""
        self.meet(what, number=number)
        return [int(self.board.number(rank)) for rank in range(self.size)]

    def same(self, number: int, what: str) -> bool:
        """Returns whether all ranks of all nodes have come with the same number.

        Args:
            number: this rank's, from 0 to 2**53.
            what: what begins, in words.
        """
        return len(set(self._gather_from_all(number, what))) == 1

    def all_have(self, bits: int, what: str) -> int:
        """Returns the bits that all ranks of all nodes have come with. The arguments are as in :meth:`same`."""
        return reduce(and_, self._gather_from_all(bits, what))

    def _gather_from_all(self, number: int, what: str) -> list[int]:
        own = self.gather_numbers(number, what)
        if self.nodes == 1:
            return own
        everybody = torch.zeros(self.world, dtype=torch.int64)
        everybody[self.number] = number
        self._largest(everybody, what)
        return everybody.tolist()

    # ------------------------------------------------------------------ the primary's turn

    def begin_turn(self, what: str) -> None:
        """Comes to the primary's next turn, on the primary when all others have.

        Args:
            what: it is for, in words, which must be the same on all ranks.
        """
        self.board.arrive(what)
        if self.primary:
            self.until(self.board.all_here, Wait.STEP_AFTER_ARRIVAL)
            self.board.compare()

    def end_turn(self, number: float = 0.0) -> float:
        """Comes to the end of the primary's turn, and returns the primary's number, on the others when it has come there."""
        self.board.arrive("the end of the primary's turn", number)
        self.until(lambda: self.board.here(0), Wait.USE_AFTER_TURN)
        return self.board.number(0)

    # ------------------------------------------------------------------ waits

    @property
    def failure(self) -> str:
        """This rank's own error, in words."""
        return self.board.failure

    def fail(self, error: BaseException) -> None:
        """As :meth:`sp_lightning.ranks.board.RankStatus.fail`, for the other nodes, too."""
        if self.board.failure:
            return
        self.board.fail(error)
        if self._news is not None:
            self._news.tell(f"{self.name}: {self.failure}")

    def lost(self, why: Wait | str, error: BaseException) -> RankError:
        """As the base class. If news of other nodes are out of reach, that is said, too."""
        found = super().lost(why, error)
        return RankError(f"{found}; {self._news.lost}") if self._news is not None and self._news.lost else found

    def run_begins(self) -> None:
        """Says that another run of the same processes begins."""
        if self._news is not None and self.over:
            self._news.begin()
        self.over = False

    def run_ends(self) -> None:
        """Says that this rank is at the end of its run: it comes to no more meetings of it."""
        self.over = True
        if self._news is not None:
            self._news.end()
        self.board.run_ends()

    def close(self) -> None:
        """Frees what this object has open. Not collective, but all ranks do so."""
        self.closed = True
        _open.remove(self)
        if self._news is not None:
            self._news.end()
        self.board.close()
        if not self.failure:  # else others may be in the midst of a collective
            self.end_groups()


_open: list[Ranks] = []
"""What this process has made and not closed. Usually that is one: what is over is closed when the next one is made."""


def _first_difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Returns the first name whose values differ, with both values."""
    for name in dict.fromkeys([*first, *other]):
        values = first.get(name, "not there"), other.get(name, "not there")
        if values[0] != values[1]:
            return name, *values
    if list(first) != list(other):
        return next((a, f"before {b!r}", f"after {b!r}") for a, b in zip(first, other, strict=True) if a != b)
    return None
