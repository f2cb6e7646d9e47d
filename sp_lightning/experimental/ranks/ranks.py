"""The ranks: the processes that train one model together. Each rank has its own device. The ranks of a node share one host store.

All communication goes through torch.distributed: tensors and barriers through collectives (``collectives``), errors through its
store (``failures``). Nodes are replicas: each node has its own host store, and a primary that updates the node's weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from operator import and_
from typing import Any

import torch

from sp_lightning.core.device.device import Wait
from sp_lightning.core.device.layout import PAGE, whole_pages
from sp_lightning.core.device.pages import create, supported
from sp_lightning.experimental.ranks.collectives import Collectives
from sp_lightning.experimental.ranks.process_locks import ProcessLocks
from sp_lightning.experimental.ranks.shared_memory import SharedMemory


class Ranks(Collectives):
    """The processes of this node, and their collectives with those of other nodes.

    Every process of every node makes an object of this class at the same time, and calls its collective methods in the same
    order. The new object closes earlier objects whose run has ended.

    Args:
        device: the device on which this rank computes.
        per_node: the number of ranks of each node; None if there is one node.

    Raises:
        RuntimeError: memory cannot be shared on this system.

    Attributes:
        over: True if the last run has ended. The next object of this class then closes this object.
        closed: True if this object is closed.
    """

    def __init__(self, device: torch.device, per_node: int | None = None) -> None:
        why = supported()
        if why:
            raise RuntimeError(
                f"superpipeline shares CPU memory between the processes of several devices, and cannot do so here: {why}. "
                "Pass Trainer(devices=1)."
            )
        former = [each for each in _open if each.over]
        for each in former:  # here, in all processes at the same time, and not when Python's garbage collector runs
            each.close()
        super().__init__(device, per_node)
        locks = ProcessLocks(self._file(PAGE, "locks"), self.rank, self.size)
        self.barrier("the locks of all processes")
        self._locks = (
            locks  # only now: a process without its lock counts as ended, so waits check locks after the barrier
        )
        for each in former:  # of failed runs: now all processes have connected anew, so none is in a collective of them
            each.end_groups()
        self.over: bool = False
        self.closed = False
        _open.append(self)

    # ------------------------------------------------------------------ memory

    def share(self, nbytes: int, name: str) -> SharedMemory:
        """Makes memory that all ranks of the node share, filled with zeros. Collective.

        Args:
            nbytes: the size in bytes. It is rounded up to whole pages.
            name: the purpose of the memory, for errors.

        Raises:
            RuntimeError: the system has not enough memory.
        """
        nbytes = whole_pages(nbytes)
        descriptor = self._file(nbytes, name)
        try:
            with self._for_memory(nbytes, name):
                return SharedMemory(descriptor, nbytes)
        finally:
            os.close(descriptor)

    def _file(self, nbytes: int, name: str) -> int:
        """Makes a file in memory that all ranks of the node share, and returns a descriptor of it. Collective.

        The other ranks open the primary's descriptor through ``/proc``, where only processes of the same user may open it. So the
        processes need no common file system, and the memory has no name that other users could find.
        """
        made = -1
        with self._for_memory(nbytes, name):
            if self.primary:
                made = create(nbytes, f"superpipeline {name}")
        path = self._broadcast_object(f"/proc/{os.getpid()}/fd/{made}", name)
        with self._for_memory(nbytes, name):
            if not self.primary:
                made = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.barrier(f"access to memory for {name}")  # until here the primary's descriptor must stay open
        return made

    @contextmanager
    def _for_memory(self, nbytes: int, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RuntimeError(
                f"The system does not give {self.name} {nbytes / 2**30:.2f} GiB of CPU memory for {name}, which all "
                f"processes of the node share: {error}. Raise the limits of processes (ulimit -v, ulimit -f), or train less: "
                "freeze layers, or train adapters."
            ) from error

    # ------------------------------------------------------------------ comparisons

    def must_agree(self, what: str, mine: Mapping[str, Any], remedy: str, *, primaries: bool = False) -> None:
        """Checks that values, and their order, are the same on all ranks. Collective. If not, all ranks raise the same error.

        Args:
            what: the name of the values, for the error.
            mine: this rank's values by name.
            remedy: a sentence for the error.
            primaries: True to compare only the values of the primaries.

        Raises:
            ValueError: the values of a rank, or their order, differ from those of rank 0.
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

    def same(self, number: int, what: str) -> bool:
        """Returns True if all ranks have the same number. Collective.

        Args:
            number: this rank's number, from 0 to 2**53.
            what: the name of the collective, for errors.
        """
        return len(set(self.barrier(what, number))) == 1

    def all_have(self, bits: int, what: str) -> int:
        """Returns the bits that are set on all ranks. Collective. The arguments are those of :meth:`same`."""
        return reduce(and_, map(int, self.barrier(what, bits)))

    # ------------------------------------------------------------------ the primary's turn

    def begin_turn(self, what: str) -> None:
        """Begins the primary's turn. All ranks wait for each other.

        Args:
            what: the purpose of the turn. It must be the same on all ranks.
        """
        self.barrier(what, why=Wait.STEP_AFTER_ARRIVAL)

    def end_turn(self, number: float = 0.0) -> float:
        """Ends the primary's turn. All ranks wait for each other.

        Args:
            number: the number that the primary sends to the other ranks of its node.

        Returns:
            The number of the primary of this node.
        """
        return self.barrier("the end of the primary's turn", number, why=Wait.USE_AFTER_TURN)[self.node * self.size]

    # ------------------------------------------------------------------ runs and failures

    def fail(self, error: BaseException) -> None:
        """Records an error of this rank, and reports it to all ranks. Does nothing after the first error of this rank."""
        if self.failure:
            return
        self.failure = f"{type(error).__name__}: {error}"
        self.failures.report(error)

    def run_begins(self) -> None:
        """Called when a run begins. Starts the thread that reads errors of other ranks."""
        self.over = False
        self.failures.begin()

    def run_ends(self) -> None:
        """Called when this rank's run ends. If this rank has not failed, waits for all ranks. Then ends the reading thread."""
        self.over = True
        self.place = ""
        try:
            if not self.failure:
                self.barrier("the end of its run")
        finally:
            self.failures.end()

    def close(self) -> None:
        """Releases this process's lock, and ends the thread and the process groups. Not collective, but all ranks call it.

        After an error of this rank, other ranks may still be in a collective. In this case the groups end later, when all ranks
        have connected anew.
        """
        self.closed = True
        _open.remove(self)
        self.failures.end()
        if self._locks is not None:
            self._locks.close()
        if not self.failure:
            self.end_groups()


_open: list[Ranks] = []
"""The objects of this process that are not closed: usually one, because a new object closes those whose run has ended."""


def _first_difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Returns the first name whose values differ, with both values; None if values and order are the same.

    If only the order differs, the two values state which name is before which.
    """
    for name in dict.fromkeys([*first, *other]):
        values = first.get(name, "not there"), other.get(name, "not there")
        if values[0] != values[1]:
            return name, *values
    if list(first) != list(other):
        return next((a, f"before {b!r}", f"after {b!r}") for a, b in zip(first, other, strict=True) if a != b)
    return None
