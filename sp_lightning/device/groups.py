"""The process groups of one rank: its node's, its peers', and everybody's.

Ranks are numbered node by node. The *peers* of a rank are those that have its place on the other nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Group(NamedTuple):
    """The same processes twice.

    Attributes:
        host: sends what is in host memory.
        device: sends what is on the devices.
    """

    host: Any
    device: Any


class Groups:
    """The process groups of one rank. They are its own: what the user's code reduces meanwhile, in other threads too, is ordered
    by itself. All ranks make one of these together.

    Args:
        device: where this rank computes.
        per_node: how many ranks each node has.

    Attributes:
        number: this rank's, of all.
        node: that of its node.
        rank: its number on its node.
        per_node: how many ranks each node has.
        nodes: how many nodes there are.
        everybody, on_node: the groups of all ranks, and of those on this node.
        peers: the group of this rank's peers and itself; None on one node.
    """

    def __init__(self, device: torch.device, per_node: int) -> None:
        self.number, world = dist.get_rank(), dist.get_world_size()
        self.per_node = per_node
        self.nodes = world // per_node
        self.node, self.rank = divmod(self.number, per_node)
        self._on_host = device.type == "cpu"
        self._made: list[Any] = []
        self.everybody = self._make(range(world))
        self.on_node, self.peers = self.everybody, None
        if self.nodes > 1:
            self.on_node = self._of_this_node()
            # Every process takes part in making each group.
            self.peers = [self._make(each) for each in zip(*self._of_nodes, strict=True)][self.rank]

    @property
    def _of_nodes(self) -> list[range]:
        """The numbers of the ranks of each node."""
        return [range(node * self.per_node, (node + 1) * self.per_node) for node in range(self.nodes)]

    @cached_property
    def uploads(self) -> Group:
        """Another group of this node's ranks, for what comes in an order of its own. All ranks of all nodes ask for it first at
        the same time."""
        return self._of_this_node()

    def _of_this_node(self) -> Group:
        return [self._make(each) for each in self._of_nodes][self.node]

    def _make(self, numbers: Sequence[int]) -> Group:
        backends = ("gloo",) if self._on_host else ("gloo", None)
        made: list[Any] = [dist.new_group(list(numbers), backend=backend) for backend in backends]
        self._made += made
        return Group(made[0], made[-1])

    def close(self) -> None:
        """Ends all of them, which have threads and connections. All ranks do so, though not at the same time."""
        for group in self._made:
            with suppress(ValueError):  # a process that this one is not in, or all groups have been ended
                dist.destroy_process_group(group)
        self._made.clear()
        for name in ("everybody", "on_node", "peers", "uploads"):  # a group ends when nobody has it any more
            vars(self).pop(name, None)

    @property
    def first(self) -> int:
        """The number of all of the first rank on this node."""
        return self.node * self.per_node

    @property
    def names(self) -> list[str]:
        """What the ranks of this node are called, and behind them all nodes if there are several."""
        numbers = range(self.first, self.first + self.per_node)
        if self.nodes == 1:
            return [f"rank {number}" for number in numbers]
        return [self.name(number) for number in numbers] + [f"node {node}" for node in range(self.nodes)]

    def name(self, number: int) -> str:
        """What a rank is called."""
        return f"rank {number}" if self.nodes == 1 else f"rank {number} (node {number // self.per_node})"
