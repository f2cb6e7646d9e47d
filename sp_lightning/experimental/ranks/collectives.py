"""Collectives of torch.distributed. They raise an error if another rank has failed or has reached another collective.

In a barrier each rank sends the name of its next operation. If the names differ, the barrier raises an error. Other collectives
have no names: torch.distributed matches them by their order alone. Barriers guard them: between two barriers all ranks run the
same collectives.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from sp_lightning.core.device.device import Wait
from sp_lightning.experimental.ranks.failures import Failures, RankError
from sp_lightning.experimental.ranks.process_locks import ProcessLocks
from sp_lightning.experimental.ranks.rank_order import all_gather_single

TIMEOUT: timedelta = default_pg_timeout
"""How long a rank waits for a rank that neither arrives nor fails: the default timeout of torch's process groups."""

_LOOK = timedelta(seconds=0.1)
"""How long the host waits for a collective between two checks whether another rank has failed."""

_TEXT = 504
"""Bytes of the name that a rank sends in a barrier. A longer name is cut."""


class ProcessGroups(NamedTuple):
    """Two process groups of the same processes.

    Attributes:
        host: the group for tensors in host memory.
        device: the group for tensors on the devices. On the CPU it is the same group.
    """

    host: Any
    device: Any


class Collectives:
    """Collectives with the ranks of the node, with the peers on other nodes, and with all ranks.

    All ranks call the collectives in the same order. Ranks are numbered node by node. The *peers* of a rank are the ranks with
    the same number on the other nodes. The process groups belong to this object. User code uses other groups, so its collectives
    may run in any order relative to these, also in other threads.

    Args:
        device: the device on which this rank computes.
        per_node: the number of ranks of each node; None if there is one node.

    Attributes:
        number: this rank's number among all ranks.
        rank: this rank's number on its node.
        node: the number of this rank's node.
        size: the number of ranks of each node.
        nodes, world: the numbers of nodes and of ranks.
        primary: True if this rank updates its node's weights (rank 0 of the node).
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
        self.primary = self.rank == 0
        self.first = self.number == 0
        self.failure = ""
        self.place = ""
        self._last = "nothing"  # the last barrier of this rank
        self._failures: Failures | None = None
        self._locks: ProcessLocks | None = None
        self._groups: dict[str, ProcessGroups] = {"everybody": self._group([list(range(self.world))])}
        self._groups["node"] = self._groups["everybody"]
        if self.nodes > 1:
            self._groups["node"] = self._group(self._of_nodes)
            self._groups["peers"] = self._group([list(each) for each in zip(*self._of_nodes, strict=True)])
        run = self._gather_objects(uuid4().hex, "the first collective")[0]
        names = [self.called(each) for each in range(self.world)]
        self._failures = Failures(run, self.number, names, lambda: self._last)

    @property
    def _of_nodes(self) -> list[list[int]]:
        """The ranks of each node, by number."""
        return [list(range(first, first + self.size)) for first in range(0, self.world, self.size)]

    def _group(self, parts: list[list[int]]) -> ProcessGroups:
        """Makes process groups for each part, and returns the groups of this rank's part. Collective.

        Args:
            parts: the numbers of the ranks of each part.
        """
        backends = ("gloo",) if self._on_host else ("gloo", None)
        made: list[Any] = [
            dist.new_subgroups_by_enumeration(parts, timeout=None if each is None else TIMEOUT, backend=each)[0]
            for each in backends
        ]
        return ProcessGroups(made[0], made[-1])

    @property
    def background(self) -> Any:
        """A separate group of all ranks, for barriers of their background threads. Made at the first use, which is collective."""
        if "background" not in self._groups:
            group = dist.new_group(backend="gloo", timeout=TIMEOUT)
            self._groups["background"] = ProcessGroups(group, group)
        return self._groups["background"].host

    def end_groups(self) -> None:
        """Ends all process groups, with their threads and connections. Every rank calls it, not necessarily at the same time."""
        for group in self._groups.values():
            for each in group:
                with suppress(ValueError):  # the group has ended already, for example as `host` of a pair on the CPU
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
    def failures(self) -> Failures:
        """The failures of all ranks."""
        assert self._failures is not None
        return self._failures

    # ------------------------------------------------------------------ barriers

    def barrier(self, what: str, number: float = 0, *, why: Wait | None = None, group: Any = None) -> list[float]:
        """Waits until all ranks have called the barrier. Their devices may still be busy.

        Args:
            what: the name of this rank's next operation. It must be the same on all ranks.
            number: a number that is sent to the other ranks. Integers are exact up to 2**53.
            why: the member of ``Wait`` for this wait; None if there is no member for it.
            group: :attr:`background` in a background thread, which works at another place of the training than the main thread;
                None for the group of all ranks. With None, :attr:`place` must be the same on all ranks as well, and the barrier
                is recorded as this rank's last one.

        Returns:
            The numbers of all ranks.

        Raises:
            RankError: another rank has failed, or has sent another name or place.
            RankInterrupt: another rank was interrupted.
        """
        text = what
        if group is None:
            text = self._last = f"{what}, {self.place}" if self.place else what
        mine = struct.pack(f"d{_TEXT}s", number, text.encode())
        # gloo's all-to-all takes half the time of its all-gather, which sends around a ring.
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).repeat(self.world)
        received = torch.empty_like(sent)
        group = group or self._groups["everybody"].host
        self._wait_for(dist.all_to_all_single(received, sent, group=group, async_op=True), why or what)
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

    def _error(self, why: Wait | str) -> BaseException | None:
        """Returns the error to raise if another rank has failed or its process has ended; None if this rank may still wait.

        Args:
            why: the purpose of the wait, for the message.
        """
        waited = f"while {self.name} waited for {in_words(why)}"
        ended = None if self._locks is None else self._locks.ended()
        if ended is not None and self._failures is not None:
            sleep(
                3 * self._failures.pause
            )  # the process may have reported its error, which the thread of `Failures` reads
        if self._failures is not None and (error := self._failures.error(waited)) is not None:
            return error
        if ended is None:
            return None
        number = self.node * self.size + ended
        more = ""
        # If the store does not answer, the process could not report its error.
        if number and self._failures is not None and self._failures.reads and not self._failures.places():
            more = f" The store of torch.distributed cannot be reached: {self.called(0)} or torchrun has ended as well."
        return RankError(
            f"the process of {self.called(number)} has ended {waited}. It was killed (see dmesg for lack of memory), or it left "
            f"trainer.fit earlier than this process.{more}"
        )

    # ------------------------------------------------------------------ objects

    def _broadcast_object(self, value: Any, name: str) -> Any:
        """Returns the primary's value on all ranks of the node. Collective on all nodes.

        Args:
            value: the value of this rank. Only the primary's is used.
            name: the purpose of the memory that the value describes, for errors.
        """
        values = [value]
        first = self.node * self.size
        with self.together(f"memory for {name}"):
            dist.broadcast_object_list(values, first, group=self._groups["node"].host)
        return values[0]

    def _gather_objects(self, value: Any, what: str) -> list[Any]:
        """Returns the values of all ranks, in the order of ranks. Collective; ``what`` is its name for errors."""
        values: list[Any] = [None] * self.world
        with self.together(what):
            dist.all_gather_object(values, value, group=self._groups["everybody"].host)
        return values

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

    def largest(self, values: Tensor, why: Wait | str) -> None:
        """Replaces integers in host memory by the maximum over all ranks, element by element."""
        words = values.to(torch.int64)
        group = self._groups["everybody"].host
        self._wait_for(dist.all_reduce(words, dist.ReduceOp.MAX, group=group, async_op=True), why)
        values.copy_(words)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites tensors with those of rank 0. As in DDP, tensors of one device and dtype are sent together. Collective."""
        alike = defaultdict[Any, list[Tensor]](list)
        for tensor in tensors:
            alike[tensor.device, tensor.dtype].append(tensor)
        for (device, _), each in alike.items():
            host = self._on_host or device.type == "cpu"
            flat = torch.cat([tensor.reshape(-1) for tensor in each])
            group = self._groups["everybody"][not host]
            self.barrier(f"sending rank 0's buffers ({flat.nbytes} bytes)")
            self._wait_for(dist.broadcast(flat, 0, group=group, async_op=True), "the buffers of rank 0", host=host)
            if not self.first:
                for tensor, value in zip(each, flat.split([tensor.numel() for tensor in each]), strict=True):
                    tensor.copy_(value.view(tensor.shape))

    def exchange(self, received: Tensor, sent: Tensor, what: str) -> None:
        """Sends one part of a flat tensor on the device to each rank of the node, and receives one part from each (all-to-all).

        Args:
            received: overwritten with the parts for this rank, in the order of ranks.
            sent: the tensor to send, of the same size. Its size is a multiple of the number of the node's ranks.
            what: the name of the data, for errors.
        """
        group = self._groups["node"].device
        self._wait_for(dist.all_to_all_single(received, sent, group=group, async_op=True), what, host=self._on_host)

    def exchange_between_nodes(self, received: Tensor, sent: Tensor, what: str) -> None:
        """Does the same as :meth:`exchange` with this rank's peers on all nodes, in the order of nodes."""
        work = dist.all_to_all_single(received, sent, group=self._groups["peers"].device, async_op=True)
        self._wait_for(work, f"{what} of other nodes", host=self._on_host)

    def gather_between_nodes(self, everybody: Tensor, own: Tensor, what: str) -> None:
        """Gathers the flat tensors of all peers, in the order of nodes (all-gather).

        Args:
            everybody: overwritten with the tensors of all peers.
            own: this rank's tensor.
            what: the name of the data, for errors.
        """
        work = all_gather_single(everybody, own, group=self._groups["peers"].device, async_op=True)
        self._wait_for(work, f"{what} of other nodes", host=self._on_host)

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
            if not work.is_completed() and (error := self._error(why)) is not None:
                raise error
        try:
            work.wait()
        except RuntimeError as failed:
            raise self._lost(why, failed) from failed

    def _lost(self, why: Wait | str, error: BaseException) -> BaseException:
        """Returns the error to raise for a collective that has failed or timed out.

        If another rank has failed, its own error is in the store within a moment, so this waits up to a second for it. Otherwise
        this rank asks all ranks for their places, and the error names the ranks that do not answer.

        Args:
            why: the purpose of the wait for the collective, for the message.
            error: the error of the collective.
        """
        reads = self._failures is not None and self._failures.reads
        late = monotonic() + (1 if reads else 0.1)
        while (found := self._error(why)) is None and monotonic() < late:
            sleep(0.02)
        if found is not None:
            return found
        if self._failures is None or not reads:
            return RankError(f"{self.name} has lost other ranks while it waited for {in_words(why)}: {error}")
        places = self._failures.places()
        if not places:
            said = f"No answer from {self.called(0)}, which has the store of torch.distributed"
        elif missing := [name for each in range(self.world) if (name := self.called(each)) not in places]:
            said = f"No answer from {', '.join(missing)}: the process stands still, or has ended"
        else:
            said = "; ".join(f"{name} was last at {place}" for name, place in places.items())
        return RankError(f"{self.name} has lost other ranks while it waited for {in_words(why)}. {said}. ({error})")


def in_words(why: Wait | str) -> str:
    """Returns the purpose of a wait in words. Messages put it after "waited for"."""
    return f"this: {why.value}" if isinstance(why, Wait) else why
