"""The ranks: the processes that train one model together. Each has its own device; those of a node share one host store.

Tensors are sent by ``torch.distributed``. All ranks reach the same collectives in the same order. The ranks of a
node write their status (``rank_status``) to shared memory. A wait for other ranks ends with an error when the status shows that a
rank has failed, or that it has reached another collective.

Nodes are replicas: each has its own store, its own status memory, and a primary that updates its weights. Ranks of different
nodes wait for each other in collectives of torch.distributed only.
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
from sp_lightning.ranks.collectives import Collectives
from sp_lightning.ranks.rank_status import NodeNews, RankError, RankStatus, status_bytes
from sp_lightning.ranks.shared_memory import SharedMemory, hand_out, receive


class Ranks(Collectives):
    """The processes of this node, and their collectives with those of other nodes.

    Every process of every node makes one of these, and calls its collective methods in the same order.

    Args:
        device: the device on which this rank computes.
        per_node: the number of ranks of each node; None if there is one node.

    Raises:
        RuntimeError: memory cannot be shared on this system.

    Attributes:
        over: whether the last run has ended. The next object of this class then closes this one.
        closed: whether this object is closed.
    """

    def __init__(self, device: torch.device, per_node: int | None = None) -> None:
        why = supported()
        if why:
            raise RuntimeError(
                f"superpipeline shares host memory between the processes of several devices, and cannot do so here: {why}. "
                "Pass Trainer(devices=1)."
            )
        for each in list(_open):  # in all processes at the same time, and not when Python collects them
            if each.over:
                each.close()
        super().__init__(device, per_node)
        self.over: bool = False
        self.closed = False
        self._pids: dict[int, int] = {}
        memory = self.share(status_bytes(self.size), "status")
        names = [self.called(self.node * self.size + rank) for rank in range(self.size)]
        self._news: NodeNews | None = None
        self._status = RankStatus(
            memory, self.rank, self._pids, names, lambda: self._news.failure if self._news else ""
        )
        if self.nodes > 1:
            try:
                name = self._gather_objects(uuid4().hex, "the first collective of all nodes")[0]
                self._news = NodeNews(name, 0.2 * max(1, self.world // 32))
            except BaseException as error:
                self._status.fail(error)  # no other code has this object yet to announce the error
                raise
        _open.append(self)

    # ------------------------------------------------------------------ memory

    def share(self, nbytes: int, name: str) -> SharedMemory:
        """Makes memory that all ranks of the node share, filled with zeros. Collective.

        Args:
            nbytes: its size.
            name: its purpose, for errors.

        Raises:
            RuntimeError: the system has not enough memory.
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

    # ------------------------------------------------------------------ comparisons

    def must_agree(self, what: str, mine: Mapping[str, Any], remedy: str, *, primaries: bool = False) -> None:
        """Compares values that should be the same on all ranks. Collective; all ranks raise the same error.

        Args:
            what: the name of the values, for the error.
            mine: this rank's values by name, in order.
            remedy: a sentence for the error.
            primaries: compare only the values of the primaries.

        Raises:
            ValueError: a rank has other values than rank 0.
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
        """Returns the numbers of all ranks of this node. Collective; the arguments are those of :meth:`same`."""
        self.barrier(what, number=number)
        return [int(self.status.number_of(rank)) for rank in range(self.size)]

    def same(self, number: int, what: str) -> bool:
        """Returns True if all ranks of all nodes have the same number. Collective.

        Args:
            number: this rank's number, from 0 to 2**53.
            what: the name of the collective, for errors.
        """
        return len(set(self._gather_from_all(number, what))) == 1

    def all_have(self, bits: int, what: str) -> int:
        """Returns the bits that all ranks of all nodes have in common. Collective; the arguments are those of :meth:`same`."""
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
        """Begins the primary's turn. The primary waits for all other ranks.

        Args:
            what: the purpose of the turn. It must be the same on all ranks.
        """
        self.status.arrive(what)
        if self.primary:
            self.until(self.status.all_have_arrived, Wait.STEP_AFTER_ARRIVAL)
            self.status.compare()

    def end_turn(self, number: float = 0.0) -> float:
        """Ends the primary's turn, and returns the primary's number. The other ranks wait for the primary."""
        self.status.arrive("the end of the primary's turn", number)
        self.until(lambda: self.status.has_arrived(0), Wait.USE_AFTER_TURN)
        return self.status.number_of(0)

    # ------------------------------------------------------------------ waits

    @property
    def failure(self) -> str:
        """This rank's own error as text; empty if it has none."""
        return self.status.failure

    def fail(self, error: BaseException) -> None:
        """Announces an error of this rank, on its own node and on the others. Only the first error counts."""
        if self.status.failure:
            return
        self.status.fail(error)
        if self._news is not None:
            self._news.tell(f"{self.name}: {self.failure}")

    def lost(self, why: Wait | str, error: BaseException) -> RankError:
        """Returns the base class's error. The message also names other nodes that cannot be reached."""
        found = super().lost(why, error)
        return RankError(f"{found}; {self._news.lost}") if self._news is not None and self._news.lost else found

    def run_begins(self) -> None:
        """Called when another run of the same processes begins."""
        if self._news is not None and self.over:
            self._news.begin()
        self.over = False

    def run_ends(self) -> None:
        """Called when this rank's run ends: it reaches no more collectives."""
        self.over = True
        if self._news is not None:
            self._news.end()
        self.status.run_ends()

    def close(self) -> None:
        """Closes groups, files and threads. Not collective, but all ranks call it."""
        self.closed = True
        _open.remove(self)
        if self._news is not None:
            self._news.end()
        self.status.close()
        if not self.failure:  # otherwise other ranks may be in a collective
            self.end_groups()


_open: list[Ranks] = []
"""The objects of this process that are not closed: usually one, because each new one closes those whose run is over."""


def _first_difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Returns the first name whose values differ, with both values."""
    for name in dict.fromkeys([*first, *other]):
        values = first.get(name, "not there"), other.get(name, "not there")
        if values[0] != values[1]:
            return name, *values
    if list(first) != list(other):
        return next((a, f"before {b!r}", f"after {b!r}") for a, b in zip(first, other, strict=True) if a != b)
    return None
