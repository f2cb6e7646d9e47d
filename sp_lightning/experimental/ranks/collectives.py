"""Collectives of torch.distributed. They raise an error if another rank has failed or has reached another collective.

In a barrier each rank sends the name of its next operation. If the names differ, the barrier raises an error. Other collectives
have no names: torch.distributed matches them by their order alone. Barriers guard them: between two barriers all ranks run the
same collectives.
"""

from __future__ import annotations

import os
import select
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import Any
from uuid import uuid4
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from sp_lightning.core.device.device import Wait
from sp_lightning.experimental.ranks.failures import Failures, RankError
from sp_lightning.experimental.ranks.rank_order import mean_in_order

TIMEOUT: timedelta = default_pg_timeout
"""How long a rank waits for a rank that neither arrives nor fails: the default timeout of torch's process groups."""

_LOOK = timedelta(seconds=0.1)
"""How long the host waits for a collective between two checks whether another rank has failed."""

_ABORTS = 5
"""Seconds in which aborted collectives end."""

_TEXT = 504
"""Bytes of the name that a rank sends in a barrier. A longer name is cut."""


class Collectives:
    """Collectives with the ranks of the node, and with all ranks.

    All ranks call the collectives in the same order. Ranks are numbered node by node.

    Tensors in host memory are sent by gloo, in process groups of this object. User code uses other groups, so its collectives may
    run in any order relative to these, also in other threads. Tensors on accelerators are sent in the default group, as those of
    ``DistributedDataParallel``: NCCL needs one order of the collectives of all groups on all ranks. In one group they run one
    after the other, in the order in which the program issues them. Backward issues the sums of gradients, and the collectives of
    user code in backward (``sync_batchnorm=True``), from one thread.

    Args:
        device: the device on which this rank computes.
        per_node: the number of ranks of each node; None if there is one node.

    Attributes:
        number: this rank's number among all ranks.
        rank: this rank's number on its node.
        node: the number of this rank's node.
        size: the number of ranks of each node.
        nodes, world: the numbers of nodes and of ranks.
        first: True if this is rank 0 of all ranks. It writes files and the full log. Other ranks get copies of its buffers.
        failure: this rank's own error as text; empty before an error.
        place: the present place of this rank in the training, as text. Barriers compare it.
    """

    def __init__(self, device: torch.device, per_node: int | None = None) -> None:
        self._on_host = device.type == "cpu"
        self.number, self.world = dist.get_rank(), dist.get_world_size()
        self.size = per_node or self.world
        self.nodes = self.world // self.size
        self.node, self.rank = divmod(self.number, self.size)
        self.first = self.number == 0
        self.failure = ""
        self.place = ""
        self._failures: Failures | None = None
        self._aborted = 0.0  # the time at which the collectives of the devices were aborted; 0 before
        # A descriptor shows the end of a process at once. Connections do not: the workers of a DataLoader are forked, and keep
        # the connections of a killed process open.
        self._processes = select.poll()
        self._rank_of: dict[int, int] = {}  # the ranks of the node's other processes, by the descriptor of the process
        everybody = self._group([range(self.world)])
        on_nodes = [range(first, first + self.size) for first in range(0, self.world, self.size)]
        self._everybody: Any = everybody
        self._node: Any = everybody
        self._peers: Any = None
        self._on_devices: Any = everybody if self._on_host else dist.group.WORLD
        if self.nodes > 1:
            self._node, self._peers = self._group(on_nodes), self._group(list(zip(*on_nodes, strict=True)))
        started = self._gather_objects((uuid4().hex, os.getpid()), "the first collective")
        self._failures = Failures(started[0][0], self.name, self.world, self.abort)
        for rank in on_nodes[self.node]:
            if rank != self.number:
                with suppress(
                    OSError
                ):  # the system has no such descriptors: collectives with an ended process fail later
                    self._rank_of[descriptor := os.pidfd_open(started[rank][1])] = rank
                    self._processes.register(descriptor, select.POLLIN)

    def _group(self, parts: Sequence[Sequence[int]]) -> Any:
        """Makes a process group of gloo for each part, and returns the group of this rank's part. Collective.

        Args:
            parts: the numbers of the ranks of each part.
        """
        return dist.new_subgroups_by_enumeration(list(map(list, parts)), timeout=TIMEOUT, backend="gloo")[0]

    def end_groups(self) -> None:
        """Ends all process groups, with their threads and connections. Every rank calls it, not necessarily at the same time."""
        groups = {self._everybody, self._node, self._peers} - {None}
        self._everybody = self._node = self._peers = None  # a group's threads end with the last reference
        self._on_devices = None
        while groups:
            with suppress(ValueError):  # user code has ended all groups
                dist.destroy_process_group(groups.pop())
        for descriptor in self._rank_of:
            os.close(descriptor)
        self._rank_of.clear()

    def called(self, number: int) -> str:
        """Returns the name of a rank, for messages."""
        return f"rank {number}" if self.nodes == 1 else f"rank {number} (node {number // self.size})"

    @property
    def name(self) -> str:
        """The name of this rank, for messages."""
        return self.called(self.number)

    @property
    def failures(self) -> Failures:
        """The failures of all ranks."""
        assert self._failures is not None
        return self._failures

    # ------------------------------------------------------------------ barriers

    def barrier(self, what: str, number: float = 0, *, why: Wait | None = None) -> list[float]:
        """Waits until all ranks have called the barrier. Their devices may still be busy.

        Args:
            what: the name of this rank's next operation. It must be the same on all ranks.
            number: a number that is sent to the other ranks. Integers are exact up to 2**53.
            why: the member of ``Wait`` for this wait; None if there is no member for it.

        Returns:
            The numbers of all ranks.

        Raises:
            RankError: another rank has failed, or has sent another name or place.
            RankInterrupt: another rank was interrupted.
        """
        text = f"{what}, {self.place}" if self.place else what
        mine = struct.pack(f"d{_TEXT}s", number, text.encode())
        # gloo's all-to-all takes half the time of its all-gather, which sends around a ring.
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).repeat(self.world)
        received = torch.empty_like(sent)
        self._wait_for(dist.all_to_all_single(received, sent, group=self._everybody, async_op=True), why or what)
        found = [struct.unpack(f"d{_TEXT}s", each.numpy().tobytes()) for each in received.chunk(self.world)]
        for rank, (_, name) in enumerate(found):
            if name != found[self.number][1]:
                texts = [name.rstrip(b"\0").decode(errors="replace") for _, name in found]
                raise RankError(
                    f"Ranks disagree: {self.name} has reached {texts[self.number]}, and {self.called(rank)} {texts[rank]}. All "
                    "ranks need the same number of batches (limit_train_batches=). Whatever else they do together (steps, "
                    "checkpoints, sums over ranks, exchanges of layers) all of them must do, in the same order."
                )
        return [each for each, _ in found]

    def compare(self, what: str, mine: Mapping[tuple[str, str], Any], remedy: str, why: Wait | None = None) -> None:
        """Checks that values, and their order, are the same on all ranks, by a digest. Collective.

        Args:
            what: the name of the barrier, for errors.
            mine: this rank's values, by the name of their kind and their own name.
            remedy: a sentence for the error.
            why: as in :meth:`barrier`.

        Raises:
            ValueError: the values of a rank, or their order, differ from those of rank 0. All ranks raise the same error.
        """
        digests = self.barrier(what, crc32(repr(mine).encode()), why=why)
        if len(set(digests)) == 1:
            return
        of_ranks = self._gather_objects(dict(mine), f"a comparison before {what}")
        for rank, theirs in enumerate(of_ranks):
            if found := _first_difference(of_ranks[0], theirs):
                (kind, name), first, other = found
                raise ValueError(
                    f"The {kind} of {self.called(rank)} are not those of rank 0: {name} is {other} on rank {rank} and "
                    f"{first} on rank 0. {remedy}"
                )

    def error(self, why: Wait | str) -> BaseException | None:
        """Returns the error to raise if another rank has failed or its process has ended; None if this rank may still wait.

        Args:
            why: the purpose of the wait, for the message.
        """
        waited = f"while {self.name} waited for {in_words(why)}"
        ended = self._processes.poll(0) if self._rank_of else []
        if ended and self._failures is not None:
            sleep(3 * self._failures.pause)  # it may have reported its error, which the thread of `Failures` reads
        if self._failures is not None and (error := self._failures.error(waited)) is not None:
            return error
        if not ended:
            return None
        who = self.called(self._rank_of[ended[0][0]])
        return RankError(
            f"the process of {who} has ended {waited}. It was killed (see dmesg for lack of memory), or it left trainer.fit "
            "earlier than this process."
        )

    def check(self, why: Wait) -> None:
        """Raises the error of :meth:`error`, because the host waits for work of this rank's device.

        Collectives that another rank never joins are aborted before. They end within a moment, so that gradients in flight can be
        dropped: that wait raises an error only after :data:`_ABORTS`.
        """
        if (error := self.error(why)) is not None:
            self.abort()
            if why is not Wait.DROP_AFTER_DRAIN or monotonic() > self._aborted + _ABORTS:
                raise error

    def abort(self) -> None:
        """Ends the collectives of the devices after a failure: streams, and hosts that wait for them, would wait for ever.

        They are in the default group, which has no use any more in these processes. gloo's are waited for on the host, which
        looks for failures itself.
        """
        group = self._on_devices
        if self._on_host or group is None or self._aborted:
            return
        self._aborted = monotonic()
        with suppress(RuntimeError):  # its backend cannot abort
            group.abort()

    @property
    def aborted(self) -> bool:
        """True if :meth:`abort` has ended the default group."""
        return self._aborted > 0

    # ------------------------------------------------------------------ objects

    def _broadcast_object(self, value: Any, name: str) -> Any:
        """Returns the value of the first rank of each node on all ranks of the node. Collective on all nodes.

        Args:
            value: the value of this rank. Only the first rank's is used.
            name: the purpose of the memory that the value describes, for errors.
        """
        values = [value]
        with self.together(f"memory for {name}"):
            dist.broadcast_object_list(values, self.node * self.size, group=self._node)
        return values[0]

    def _gather_objects(self, value: Any, what: str) -> list[Any]:
        """Returns the values of all ranks, in the order of ranks. Collective; ``what`` is its name for errors."""
        values: list[Any] = [None] * self.world
        with self.together(what):
            dist.all_gather_object(values, value, group=self._everybody)
        return values

    def to_first(self, value: Any, owner: int) -> Any:
        """Sends a value from a rank of node 0 to rank 0, and returns it there. Ranks that have no part in it return None."""
        if self.node or owner == self.rank == 0:
            return None if self.node else value
        values = [value]
        if self.rank == owner:
            dist.send_object_list(values, 0, group=self._node)
        elif self.first:
            dist.recv_object_list(values, owner, group=self._node)
            return values[0]
        return None

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A context for a collective of all ranks. It begins with a barrier.

        Args:
            what: the name of the collective, for the barrier and for errors.

        Raises:
            RankError: another rank has reached another collective, or has failed or ended during this one.
            RankInterrupt: another rank was interrupted.
        """
        self.barrier(what)
        try:
            yield
        except RuntimeError as error:
            raise self._lost(what, error) from error

    # ------------------------------------------------------------------ tensors

    def largest(self, values: Tensor, what: str) -> None:
        """Replaces numbers in host memory by the maximum over all ranks, element by element."""
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self._everybody, async_op=True)
        self._wait_for(work, what)

    def add_up(self, values: Tensor, what: str) -> None:
        """Replaces numbers in host memory by the sum over the ranks of the node, element by element."""
        self._wait_for(dist.all_reduce(values, group=self._node, async_op=True), what)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites tensors with those of rank 0. As in DDP, tensors of one device and dtype are sent together. Collective."""
        alike = defaultdict[Any, list[Tensor]](list)
        for tensor in tensors:
            alike[tensor.device, tensor.dtype].append(tensor)
        for (device, _), each in alike.items():
            host = self._on_host or device.type == "cpu"
            flat = torch.cat([tensor.reshape(-1) for tensor in each])
            self.barrier(f"sending rank 0's values ({flat.nbytes} bytes)")
            work = dist.broadcast(flat, 0, group=self._everybody if host else self._on_devices, async_op=True)
            self._wait_for(work, "values of rank 0", host=host)
            if not self.first:
                for tensor, value in zip(each, flat.split([tensor.numel() for tensor in each]), strict=True):
                    tensor.copy_(value.view(tensor.shape))

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites tensors in host memory with those of this rank's peer on node 0. Collective on all nodes."""
        assert self._peers is not None
        self.barrier("sending rank 0's weights")
        for tensor in tensors:
            work = dist.broadcast(tensor, self.rank, group=self._peers, async_op=True)
            self._wait_for(work, "the weights of rank 0")

    def mean(self, flat: Tensor, owner: int, what: str) -> list[Tensor]:
        """Replaces a flat tensor on the device by its mean over all ranks, on a rank of each node; see ``mean_in_order``."""
        wait = lambda work: self._wait_for(work, what, host=self._on_host)  # noqa: E731
        return mean_in_order(flat, self.size, self._on_devices, wait, owner if self.nodes == 1 else None)

    def _wait_for(self, work: Any, why: Wait | str, *, host: bool = True) -> None:
        """Waits for a collective: on the host, or on the current stream of an accelerator.

        Args:
            work: the collective, as torch.distributed has returned it.
            why: the purpose of the wait, for errors.
            host: True to wait on the host, False for the current stream.

        Raises:
            RankError: another rank has failed or ended, or the collective has failed.
            RankInterrupt: another rank was interrupted.
        """
        while host and not work.is_completed():
            # The error means that this wait has timed out, or that the collective has failed. The wait below raises the latter.
            with suppress(RuntimeError):
                work.wait(_LOOK)
            if not work.is_completed() and (error := self.error(why)) is not None:
                raise error
        try:
            work.wait()
        except RuntimeError as failed:
            raise self._lost(why, failed) from failed

    def _lost(self, why: Wait | str, error: BaseException) -> BaseException:
        """Returns the error to raise for a collective that has failed or timed out.

        If another rank has failed, its own error is in the store within a moment, so this waits up to a second for it.

        Args:
            why: the purpose of the wait for the collective, for the message.
            error: the error of the collective.
        """
        late = monotonic() + (1 if self._failures is not None and self._failures.reads else 0.1)
        while (found := self.error(why)) is None and monotonic() < late:
            sleep(0.02)
        others = [f"node {node}" for node in range(self.nodes) if node != self.node]
        # Here all processes of this node still run, if it has descriptors of them.
        where = (
            f" (not of this node, but of {' or '.join(others)})"
            if len(self._rank_of) == self.size - 1 and others
            else ""
        )
        lost = f"{self.name} has lost other ranks while it waited for {in_words(why)}"
        return found or RankError(f"{lost}{where}: {error}")


def in_words(why: Wait | str) -> str:
    """Returns the purpose of a wait in words. Messages put it after "waited for"."""
    return f"this: {why.value}" if isinstance(why, Wait) else why


def _first_difference(first: Mapping[Any, Any], other: Mapping[Any, Any]) -> tuple[Any, Any, Any] | None:
    """Returns the first name whose values differ, with both values; None if values and order are the same.

    If only the order differs, the two values state which name is before which.
    """
    for name in dict.fromkeys([*first, *other]):
        values = first.get(name, "not there"), other.get(name, "not there")
        if values[0] != values[1]:
            return name, *values
    if list(first) != list(other):
        return next((a, f"before {b[1]!r}", f"after {b[1]!r}") for a, b in zip(first, other, strict=True) if a != b)
    return None
