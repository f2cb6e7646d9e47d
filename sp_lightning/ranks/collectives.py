"""Collectives: what ranks do together by torch.distributed, in which no rank waits for one that has failed or is elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import sleep
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sp_lightning.device.device import Wait
from sp_lightning.ranks.board import LOOK, RankError, RankStatus, in_words


class Group(NamedTuple):
    """The same processes twice.

    Attributes:
        host: sends what is in host memory.
        device: sends what is on the devices.
    """

    host: Any
    device: Any


class Collectives:
    """What this rank does with the others of its node, with its peers on the other nodes, and with all ranks. All ranks come to
    the same, in one order.

    Ranks are numbered node by node. The *peers* of a rank are those that have its place on the other nodes. The process groups
    are this object's own: what the user's code reduces meanwhile, in other threads too, is ordered by itself.

    Args:
        device: where this rank computes.
        per_node: how many ranks each node has; None: there is one node.

    Attributes:
        number: this rank's, of all.
        rank: its number on its node.
        node: that of its node.
        size: how many ranks each node has.
        nodes, world: how many nodes and ranks there are.
        primary: whether this is the rank that updates its node's weights (rank 0 of the node).
        first: whether it is the first rank of all: whose buffers, log and files count.
        meanwhile: is called now and then while this rank waits for others.
        sums: how many backwards have ended, after each of which all ranks have come to :meth:`largest`.
    """

    def __init__(self, device: torch.device, per_node: int | None = None) -> None:
        self._on_host = device.type == "cpu"
        self.number, self.world = dist.get_rank(), dist.get_world_size()
        self.size = per_node or self.world
        self.nodes = self.world // self.size
        self.node, self.rank = divmod(self.number, self.size)
        self.primary, self.first = self.rank == 0, self.number == 0
        self.sums = 0
        self.meanwhile: Callable[[], None] = lambda: None
        self._board: RankStatus | None = None
        self._groups: dict[str, Group] = {"everybody": self._group([list(range(self.world))])}
        self._groups["node"] = self._groups["everybody"]
        if self.nodes > 1:
            self._groups["node"] = self._group(self._of_nodes)
            self._groups["peers"] = self._group([list(each) for each in zip(*self._of_nodes, strict=True)])

    @property
    def _of_nodes(self) -> list[list[int]]:
        """The numbers of the ranks of each node."""
        return [list(range(first, first + self.size)) for first in range(0, self.world, self.size)]

    def _group(self, parts: list[list[int]]) -> Group:
        """Makes groups, in which every process takes part, and returns this rank's."""
        backends = ("gloo",) if self._on_host else ("gloo", None)
        made: list[Any] = [dist.new_subgroups_by_enumeration(parts, backend=each)[0] for each in backends]
        return Group(made[0], made[-1])

    @property
    def uploads(self) -> Group:
        """Another group of this node's ranks, for what comes in an order of its own. All ranks ask for it first at one time."""
        if "uploads" not in self._groups:
            self._groups["uploads"] = self._group(self._of_nodes)
        return self._groups["uploads"]

    def end_groups(self) -> None:
        """Ends all groups, which have threads and connections. All ranks do so, though not at the same time."""
        for group in self._groups.values():
            for each in group:
                with suppress(ValueError):  # it has been ended
                    dist.destroy_process_group(each)
        self._groups.clear()

    def called(self, number: int) -> str:
        """What a rank is called."""
        return f"rank {number}" if self.nodes == 1 else f"rank {number} (node {number // self.size})"

    @property
    def name(self) -> str:
        """What this rank is called."""
        return self.called(self.number)

    @property
    def board(self) -> RankStatus:
        """What the ranks of the node say to each other."""
        assert self._board is not None
        return self._board

    # ------------------------------------------------------------------ meetings

    def meet(self, what: str, why: Wait | None = None, number: float = 0) -> None:
        """Waits until all ranks of this node have come here.

        Args:
            what: all of them do here, in words.
            why: what becomes true by the wait, if that has a name.
            number: for the others.

        Raises:
            RankError: another rank has failed, or has come to something else.
        """
        if self._board is None:  # what follows is a collective, which waits by itself
            return
        self._board.arrive(what, number)
        self.until(self._board.all_here, why or what)
        self._board.compare()

    def meet_everybody(self, what: str) -> None:
        """Waits until all ranks of all nodes have come here. ``what`` and the errors are as in :meth:`meet`."""
        self.meet(what)
        if self.nodes > 1:
            self._largest(torch.tensor([]), what)  # no values: it waits

    def barrier(self, why: Wait) -> None:
        """Waits until all ranks of this node have come here. On a device they may still be at work."""
        self.meet(f"a barrier ({why.value})", why)

    def until(self, reached: Callable[[], bool], why: Wait | str) -> None:
        """As :meth:`sp_lightning.ranks.board.RankStatus.until`. Another rank may wait for what :attr:`meanwhile` does."""

        def look() -> bool:
            if reached():
                return True
            self.meanwhile()
            return False

        if self._board is not None:
            self._board.until(look, why)

    # ------------------------------------------------------------------ objects

    def _broadcast_object(self, value: Any, name: str) -> Any:
        """Returns the primary's value on all ranks of the node."""
        values, first = [value], self.node * self.size
        with self.together(f"memory for {name}", self.meet):
            dist.broadcast_object_list(values, first, group=self._groups["node"].host)
        return values[0]

    def _gather_objects(self, value: Any, what: str) -> list[Any]:
        """Returns the values of all ranks, in their order, on all of them."""
        values: list[Any] = [None] * self.world
        with self.together(what, self.meet_everybody):
            dist.all_gather_object(values, value, group=self._groups["everybody"].host)
        return values

    @contextmanager
    def together(self, what: str, meet: Callable[[str], None]) -> Iterator[None]:
        """Around a collective: it begins once all ranks have come to it.

        Raises:
            RankError: another rank has failed meanwhile, or left it.
        """
        meet(what)
        try:
            yield
        except RuntimeError as error:
            raise self.lost(what, error) from error

    # ------------------------------------------------------------------ tensors

    def largest(self, values: Tensor) -> None:
        """Replaces whole numbers in host memory by the largest that any rank has at the same place."""
        self.board.arrive("the end of a backward")
        self._largest(values, Wait.SHOW_AFTER_LANDING)
        self.sums += 1

    def _largest(self, values: Tensor, why: Wait | str) -> None:
        """As :meth:`largest`. Between nodes this also shows whether all ranks have come the same way here."""
        history = 0 if self.nodes == 1 else self.board.history
        words = torch.cat([values.to(torch.int64), torch.tensor([history, -history])])
        group = self._groups["everybody"].host
        self._wait_for(dist.all_reduce(words, dist.ReduceOp.MAX, group=group, async_op=True), why)
        if words[-2] != -words[-1]:
            raise RankError(
                f"{self.name} and a rank of another node have made different calls before {in_words(why)}. All ranks must make "
                "the same calls in the same order."
            )
        values.copy_(words[:-2])

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites tensors by those of rank 0: all that have a device and a dtype in common at once, as ddp does."""
        alike = defaultdict[Any, list[Tensor]](list)
        for tensor in tensors:
            alike[tensor.device, tensor.dtype].append(tensor)
        for (device, _), each in alike.items():
            host = self._on_host or device.type == "cpu"
            flat = torch.cat([tensor.reshape(-1) for tensor in each])
            group = self._groups["everybody"][not host]
            self.board.arrive(f"the buffers of rank 0, {flat.nbytes} bytes")
            self._wait_for(dist.broadcast(flat, 0, group=group, async_op=True), "the buffers of rank 0", host=host)
            if not self.first:
                for tensor, value in zip(each, flat.split([tensor.numel() for tensor in each]), strict=True):
                    tensor.copy_(value.view(tensor.shape))

    def exchange(self, received: Tensor, sent: Tensor, what: str) -> None:
        """Sends the parts of a flat tensor on the device, one to each rank of the node, and receives as many.

        Args:
            received: is overwritten: the parts of all ranks that are meant for this one, in the order of ranks.
            sent: of the same size, which all ranks can divide by their number.
            what: what is sent, in words.
        """
        self.board.arrive(what)
        group = self._groups["node"].device
        self._wait_for(dist.all_to_all_single(received, sent, group=group, async_op=True), what, host=self._on_host)

    def exchange_between_nodes(self, received: Tensor, sent: Tensor, what: str) -> None:
        """As :meth:`exchange`, between the peers on all nodes, in the order of nodes."""
        work = dist.all_to_all_single(received, sent, group=self._groups["peers"].device, async_op=True)
        self._wait_for(work, f"{what} of other nodes", host=self._on_host)

    def gather_between_nodes(self, everybody: Tensor, own: Tensor, what: str) -> None:
        """Puts the flat tensors of all peers one behind the other, in the order of nodes."""
        work = dist.all_gather_into_tensor(everybody, own, group=self._groups["peers"].device, async_op=True)
        self._wait_for(work, f"{what} of other nodes", host=self._on_host)

    def gather(self, everybody: Tensor, group: Group, what: str) -> None:
        """Fills flat memory on the device, of which each rank of the node has its own of as many equal parts.

        It is no meeting: the ranks have agreed on it elsewhere (:mod:`~sp_lightning.layers.uploads`), at a time that may
        differ between other meetings.

        Args:
            everybody: is overwritten but for this rank's part.
            group: the node's, in which nothing else is sent.
            what: what is sent, in words.
        """
        own = everybody.chunk(self.size)[self.rank]
        work = dist.all_gather_into_tensor(everybody, own, group=group.device, async_op=True)
        self._wait_for(work, what, host=self._on_host)

    def _wait_for(self, work: Any, why: Wait | str, *, host: bool = True) -> None:
        """Waits for a collective: the host by looking at it now and then, a stream of an accelerator by itself."""
        if host:
            self.until(work.is_completed, why)
        try:
            work.wait()
        except RuntimeError as error:
            raise self.lost(why, error) from error

    def lost(self, why: Wait | str, error: BaseException) -> RankError:
        """Returns what to raise for a collective that has failed, because another rank has left it.

        Raises:
            RankError: the other rank has said why, for which it is given some time.
        """
        seconds = 0 if self._board is None else min(self.nodes, 3)
        for _ in range(int(seconds / LOOK)):
            self.board.check(in_words(why))
            sleep(LOOK)
        return RankError(f"{self.name} has lost the others while it waited for {in_words(why)}: {error}")
