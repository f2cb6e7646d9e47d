"""Collectives: what ranks do together by torch.distributed, in which nobody waits for a rank that has failed or is elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sp_lightning.device.board import LATE, LOOK, Board, RankError, in_words
from sp_lightning.device.groups import Group, Groups
from sp_lightning.device.waits import Wait


class Collectives:
    """What this rank does with the others of its node, with its peers on the other nodes, and with everybody. All ranks come to
    the same, in one order.

    Args:
        device: where this rank computes.
        per_node: how many ranks each node has; None: there is one node.

    Attributes:
        groups: the process groups, which know this rank's number of all and its node.
        rank: this process's number on its node.
        size: how many ranks each node has.
        primary: whether this is the rank that updates its node's weights (rank 0 of the node).
        meanwhile: is called now and then while this rank waits for others.
        sums: how many backwards have ended, after each of which all ranks have come to :meth:`largest`.
    """

    def __init__(self, device: torch.device, per_node: int | None = None) -> None:
        self._on_host = device.type == "cpu"
        self.groups = Groups(device, per_node or dist.get_world_size())
        self.rank, self.size = self.groups.rank, self.groups.per_node
        self.primary = self.rank == 0
        self.sums = 0
        self.meanwhile: Callable[[], None] = lambda: None
        self._board: Board | None = None

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return self.groups.nodes

    @property
    def world(self) -> int:
        """How many ranks there are on all nodes."""
        return self.nodes * self.size

    @property
    def first(self) -> bool:
        """Whether this is the first rank of all: whose buffers, log and files count."""
        return self.groups.number == 0

    @property
    def uploads(self) -> Group:
        """Another group of this node's ranks, for what comes in an order of its own. All ranks ask for it first at one time."""
        return self.groups.uploads

    @property
    def name(self) -> str:
        """What this rank is called."""
        return self.groups.name(self.groups.number)

    @property
    def board(self) -> Board:
        """What the ranks say to each other."""
        assert self._board is not None
        return self._board

    # ------------------------------------------------------------------ meetings

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

    def meet_everybody(self, what: str) -> None:
        """Waits until all ranks of all nodes have come here. The arguments and errors are as in :meth:`meet`."""
        self.meet(what)
        if self.nodes > 1:
            self._largest(torch.tensor([]), what)

    def barrier(self, why: Wait) -> None:
        """Waits until all ranks have come here. On a device they may still be at work."""
        self.meet(f"a barrier ({why.value})", why)

    def until(self, reached: Callable[[], bool], why: Wait | str) -> None:
        """As :meth:`sp_lightning.device.board.Board.until`. Another rank may wait for what :attr:`meanwhile` does."""

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
        values = [value]
        self.meet(f"memory for {name}")
        try:
            dist.broadcast_object_list(values, self.groups.first, group=self.groups.on_node.host)
        except RuntimeError as error:
            raise self.lost(f"something that rank {self.groups.first} sends") from error
        return values[0]

    def _gather_objects(self, value: Any, what: str) -> list[Any]:
        """Returns the values of all ranks, in their order, on all of them."""
        values: list[Any] = [None] * self.world
        self.meet_everybody(f"a comparison of {what}")
        try:
            dist.all_gather_object(values, value, group=self.groups.everybody.host)
        except RuntimeError as error:
            raise self.lost("what the others have, to compare it") from error
        return values

    # ------------------------------------------------------------------ tensors

    def largest(self, values: Tensor) -> None:
        """Replaces whole numbers in host memory by the largest that any rank has at the same place."""
        self.board.come("the end of a backward")
        self._largest(values, Wait.SHOW_AFTER_LANDING)
        self.sums += 1

    def _largest(self, values: Tensor, why: Wait | str) -> None:
        """As :meth:`largest`. Between nodes this also shows whether all ranks have come the same way here."""
        history = 0 if self.nodes == 1 else self.board.history
        words = torch.cat([values.to(torch.int64), torch.tensor([history, -history])])
        group = self.groups.everybody.host
        self._wait_for(dist.all_reduce(words, dist.ReduceOp.MAX, group=group, async_op=True), why)
        if words[-2] != -words[-1]:
            raise self._without_news(
                f"{self.name} and a rank of another node have come different ways to {in_words(why)}", why
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
            group = self.groups.everybody.host if host else self.groups.everybody.device
            self.board.come(f"the buffers of rank 0, {flat.nbytes} bytes")
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
        self.board.come(what)
        group = self.groups.on_node.device
        self._wait_for(dist.all_to_all_single(received, sent, group=group, async_op=True), what, host=self._on_host)

    def exchange_between_nodes(self, received: Tensor, sent: Tensor, what: str) -> None:
        """As :meth:`exchange`, between the peers on all nodes, in the order of nodes."""
        work = dist.all_to_all_single(received, sent, group=self._peers.device, async_op=True)
        self._wait_for(work, f"{what} of other nodes", host=self._on_host)

    def gather_between_nodes(self, everybody: Tensor, own: Tensor, what: str) -> None:
        """Puts the flat tensors of all peers one behind the other, in the order of nodes."""
        work = dist.all_gather_into_tensor(everybody, own, group=self._peers.device, async_op=True)
        self._wait_for(work, f"{what} of other nodes", host=self._on_host)

    def gather(self, everybody: Tensor, group: Group, what: str) -> None:
        """Fills flat memory on the device, of which each rank of the node has its own of as many equal parts.

        It is no meeting: the ranks have agreed on it elsewhere (:mod:`~sp_lightning.weights.uploads`), at a time that may
        differ between other meetings.

        Args:
            everybody: is overwritten but for this rank's part.
            group: the node's, in which nothing else is sent.
            what: what is sent, in words.
        """
        own = everybody.chunk(self.size)[self.rank]
        work = dist.all_gather_into_tensor(everybody, own, group=group.device, async_op=True)
        self._wait_for(work, what, host=self._on_host)

    @property
    def _peers(self) -> Group:
        assert self.groups.peers is not None
        return self.groups.peers

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
        return self._without_news(f"{self.name} has lost the others while it waited for {in_words(why)}", why)

    def _without_news(self, what: str, why: Wait | str) -> RankError:
        """Returns an error that says what has happened, unless another rank or node says why, which it is given time for."""
        if self._board is None:
            return RankError(what)
        seconds = 1.0 if self.nodes == 1 else 2 * LATE
        for _ in range(int(seconds / LOOK)):
            self._board.check(in_words(why))
            sleep(LOOK)
        return RankError(f"{what}{self._board.silent()}")
