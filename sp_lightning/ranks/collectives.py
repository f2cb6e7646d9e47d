"""Collectives of torch.distributed that do not wait for a rank which has failed or has reached another collective."""

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
from sp_lightning.ranks.rank_status import CHECK_SECONDS, RankError, RankStatus, in_words


class ProcessGroups(NamedTuple):
    """Two process groups of the same processes.

    Attributes:
        host: for tensors in host memory.
        device: for tensors on the devices.
    """

    host: Any
    device: Any


class Collectives:
    """Collectives with the ranks of the node, with the peers on other nodes, and with all ranks.

    All ranks call them in the same order. Ranks are numbered node by node. The *peers* of a rank have the same number on their
    own nodes. The process groups belong to this object, so collectives of user code (in other threads as well) have their own
    order.

    Args:
        device: the device on which this rank computes.
        per_node: the number of ranks of each node; None if there is one node.

    Attributes:
        number: this rank's number of all.
        rank: its number on its node.
        node: the number of its node.
        size: the number of ranks of each node.
        nodes, world: the numbers of nodes and of ranks.
        primary: whether this rank updates its node's weights (rank 0 of the node).
        first: whether this is rank 0 of all, whose buffers, log and files count.
    """

    def __init__(self, device: torch.device, per_node: int | None = None) -> None:
        self._on_host = device.type == "cpu"
        self.number, self.world = dist.get_rank(), dist.get_world_size()
        self.size = per_node or self.world
        self.nodes = self.world // self.size
        self.node, self.rank = divmod(self.number, self.size)
        self.primary = self.rank == 0
        self.first = self.number == 0
        self._status: RankStatus | None = None
        self._groups: dict[str, ProcessGroups] = {"everybody": self._group([list(range(self.world))])}
        self._groups["node"] = self._groups["everybody"]
        if self.nodes > 1:
            self._groups["node"] = self._group(self._of_nodes)
            self._groups["peers"] = self._group([list(each) for each in zip(*self._of_nodes, strict=True)])

    @property
    def _of_nodes(self) -> list[list[int]]:
        """The ranks of each node, by number."""
        return [list(range(first, first + self.size)) for first in range(0, self.world, self.size)]

    def _group(self, parts: list[list[int]]) -> ProcessGroups:
        """Makes process groups, one for each part. Returns this rank's. Collective."""
        backends = ("gloo",) if self._on_host else ("gloo", None)
        made: list[Any] = [dist.new_subgroups_by_enumeration(parts, backend=each)[0] for each in backends]
        return ProcessGroups(made[0], made[-1])

    def end_groups(self) -> None:
        """Ends all groups, with their threads and connections. All ranks call it, but not at the same time."""
        for group in self._groups.values():
            for each in group:
                with suppress(ValueError):  # it has ended already
                    dist.destroy_process_group(each)
        self._groups.clear()

    def called(self, number: int) -> str:
        """Returns the name of a rank, for messages."""
        return f"rank {number}" if self.nodes == 1 else f"rank {number} (node {number // self.size})"

    @property
    def name(self) -> str:
        """The name of this rank, for messages."""
        return self.called(self.number)

    @property
    def status(self) -> RankStatus:
        """The status of the node's ranks."""
        assert self._status is not None
        return self._status

    # ------------------------------------------------------------------ barriers

    def barrier(self, what: str, why: Wait | None = None, number: float = 0) -> None:
        """Waits until all ranks of this node have called it.

        Args:
            what: the name of the barrier.
            why: the named wait, if it is one.
            number: a number for the other ranks.

        Raises:
            RankError: another rank has failed, or has reached another collective.
        """
        if self._status is None:  # a collective follows, which waits by itself
            return
        self._status.arrive(what, number)
        self.until(self._status.all_have_arrived, why or what)
        self._status.compare()

    def barrier_of_all_nodes(self, what: str) -> None:
        """Waits until all ranks of all nodes have called it. ``what`` and the errors are those of :meth:`barrier`."""
        self.barrier(what)
        if self.nodes > 1:
            self._largest(torch.tensor([]), what)  # without values it only waits

    def barrier_for(self, why: Wait) -> None:
        """Waits until all ranks of this node have called it. Their devices may still be busy."""
        self.barrier(f"a barrier ({why.value})", why)

    def until(self, reached: Callable[[], bool], why: Wait | str) -> None:
        """Waits as :meth:`RankStatus.wait_until`."""
        if self._status is not None:
            self._status.wait_until(reached, why)

    # ------------------------------------------------------------------ objects

    def _broadcast_object(self, value: Any, name: str) -> Any:
        """Returns the primary's value on all ranks of the node."""
        values = [value]
        first = self.node * self.size
        with self.together(f"memory for {name}", self.barrier):
            dist.broadcast_object_list(values, first, group=self._groups["node"].host)
        return values[0]

    def _gather_objects(self, value: Any, what: str) -> list[Any]:
        """Returns the values of all ranks, in their order, on all of them."""
        values: list[Any] = [None] * self.world
        with self.together(what, self.barrier_of_all_nodes):
            dist.all_gather_object(values, value, group=self._groups["everybody"].host)
        return values

    @contextmanager
    def together(self, what: str, barrier: Callable[[str], None]) -> Iterator[None]:
        """A context for a collective. It begins once all ranks have reached it.

        Raises:
            RankError: another rank has failed during the collective, or has left it.
        """
        barrier(what)
        try:
            yield
        except RuntimeError as error:
            raise self.lost(what, error) from error

    # ------------------------------------------------------------------ tensors

    def largest(self, values: Tensor) -> None:
        """Replaces integers in host memory by the maximum over all ranks, element by element."""
        self.status.arrive("the end of a backward")
        self._largest(values, Wait.SHOW_AFTER_LANDING)

    def _largest(self, values: Tensor, why: Wait | str) -> None:
        """Computes :meth:`largest`. Between nodes it also checks that all ranks have reached the same collectives before."""
        history = 0 if self.nodes == 1 else self.status.history
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
        """Overwrites tensors with those of rank 0. As in ddp, tensors of one device and dtype are sent together."""
        alike = defaultdict[Any, list[Tensor]](list)
        for tensor in tensors:
            alike[tensor.device, tensor.dtype].append(tensor)
        for (device, _), each in alike.items():
            host = self._on_host or device.type == "cpu"
            flat = torch.cat([tensor.reshape(-1) for tensor in each])
            group = self._groups["everybody"][not host]
            self.status.arrive(f"the buffers of rank 0, {flat.nbytes} bytes")
            self._wait_for(dist.broadcast(flat, 0, group=group, async_op=True), "the buffers of rank 0", host=host)
            if not self.first:
                for tensor, value in zip(each, flat.split([tensor.numel() for tensor in each]), strict=True):
                    tensor.copy_(value.view(tensor.shape))

    def exchange(self, received: Tensor, sent: Tensor, what: str) -> None:
        """Sends one part of a flat tensor on the device to each rank of the node, and receives one from each (all-to-all).

        Args:
            received: is overwritten with the parts for this rank, in the order of ranks.
            sent: a tensor of the same size, a multiple of the number of ranks.
            what: the name of the data, for errors.
        """
        self.status.arrive(what)
        group = self._groups["node"].device
        self._wait_for(dist.all_to_all_single(received, sent, group=group, async_op=True), what, host=self._on_host)

    def exchange_between_nodes(self, received: Tensor, sent: Tensor, what: str) -> None:
        """Exchanges parts as :meth:`exchange` does, between the peers on all nodes, in the order of nodes."""
        work = dist.all_to_all_single(received, sent, group=self._groups["peers"].device, async_op=True)
        self._wait_for(work, f"{what} of other nodes", host=self._on_host)

    def gather_between_nodes(self, everybody: Tensor, own: Tensor, what: str) -> None:
        """Gathers the flat tensors of all peers, in the order of nodes (all-gather)."""
        work = dist.all_gather_into_tensor(everybody, own, group=self._groups["peers"].device, async_op=True)
        self._wait_for(work, f"{what} of other nodes", host=self._on_host)

    def _wait_for(self, work: Any, why: Wait | str, *, host: bool = True) -> None:
        """Waits for a collective: the host by polling, a stream of an accelerator by itself."""
        if host:
            self.until(work.is_completed, why)
        try:
            work.wait()
        except RuntimeError as error:
            raise self.lost(why, error) from error

    def lost(self, why: Wait | str, error: BaseException) -> RankError:
        """Returns the error to raise for a collective that another rank has left.

        Raises:
            RankError: the other rank has written its own error to the status memory within some seconds.
        """
        seconds = 0 if self._status is None else min(self.nodes, 3)
        for _ in range(int(seconds / CHECK_SECONDS)):
            self.status.check(in_words(why))
            sleep(CHECK_SECONDS)
        return RankError(f"{self.name} has lost the others while it waited for {in_words(why)}: {error}")
