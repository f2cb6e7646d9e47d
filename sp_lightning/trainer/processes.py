"""The processes of several devices and nodes: as many have to be started as the trainer says, each in its place."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from typing import Any

import torch.distributed as dist

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def _number(strategy: Any) -> tuple[int, int]:
    """How many nodes there are, and how many devices each has."""
    return strategy.num_nodes, len(strategy.parallel_devices)


def _trainer(nodes: int, devices: int) -> str:
    """The trainer that was made, as it is written."""
    return f"Trainer(devices={devices})" if nodes == 1 else f"Trainer(devices={devices}, num_nodes={nodes})"


def _torchrun(nodes: int, devices: int) -> str:
    """How torchrun starts these processes."""
    if nodes == 1:
        return f"torchrun --standalone --nproc-per-node {devices}"
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint HOST:PORT"
    return f"torchrun --nnodes {nodes} --nproc-per-node {devices} {rendezvous} on each node"


def never_came(strategy: Any, error: BaseException) -> str:
    """What to say when other processes have not come."""
    nodes, devices = _number(strategy)
    where = "" if nodes == 1 else f" of node {strategy.node_rank}"
    return (
        f"Rank {strategy.global_rank}{where} has waited in vain for the other processes of {_trainer(nodes, devices)}: {error} "
        "Each logs that it initializes: look which has not, and why. Start them all by "
        f"{_torchrun(nodes, devices)}, or let Lightning start them."
    )


def not_reached(strategy: Any, error: RuntimeError) -> str | None:
    """What to say when processes of several nodes have met, and gloo cannot connect them. None if it is another error."""
    if "connectFullMesh" not in str(error) or strategy.num_nodes == 1:
        return None
    name = os.environ.get(VARIABLE)
    how = f"by the interface {name!r} ({VARIABLE})" if name else "by the address that each node's own name stands for"
    return (
        f"Rank {strategy.global_rank} of node {strategy.node_rank} has met the other processes, and cannot connect to all of "
        f"them {how}: {error}. Name the interface of each node that the others reach: {VARIABLE}=eth0, for example (ip address "
        "lists them)."
    )


def refuse_processes_alone(strategy: Any) -> None:
    """Refuses one device where torchrun, say, has started several processes: each would train by itself.

    Raises:
        ValueError: it has.
    """
    environment = strategy.cluster_environment
    if environment is None or not environment.creates_processes_externally:
        return
    if strategy.num_nodes * len(strategy.parallel_devices) > 1:
        return
    try:
        number = environment.world_size()
    except Exception:  # SLURM's needs SLURM_NTASKS, say. Plain Lightning does not ask it on one device
        return
    if number > 1:
        raise ValueError(
            f"{number} processes were started ({type(environment).__name__} has found them), but Trainer(devices=1) was made "
            f"in each: each would train by itself. Pass Trainer(devices={number}) if all of them are on one node, num_nodes= and "
            "the devices of each node if they are on several, or start one process."
        )


def refuse_other_places(strategy: Any) -> None:
    """Refuses processes that are not numbered node by node, or are not as many as the trainer was told. Collective.

    Raises:
        ValueError: they are not.
    """
    nodes, devices = _number(strategy)
    expected = [(node, local) for node in range(nodes) for local in range(devices)]
    found: list[Any] = [None] * dist.get_world_size()
    if len(found) != len(expected):
        raise ValueError(
            f"{_trainer(nodes, devices)} needs {len(expected)} processes, and {len(found)} were started. Start them by "
            f"{_torchrun(nodes, devices)}."
        )
    if nodes == 1:
        return
    group: Any = dist.new_group(backend="gloo")
    try:
        dist.all_gather_object(found, (strategy.node_rank, strategy.local_rank), group=group)
    finally:
        dist.destroy_process_group(group)
    if found != expected:
        places = "; ".join(f"rank {rank} is number {local} on node {node}" for rank, (node, local) in enumerate(found))
        raise ValueError(
            f"{_trainer(nodes, devices)} needs {devices} processes on each node, numbered node by node, and found others: "
            f"{places}. Start them by {_torchrun(nodes, devices)}, or under SLURM with --ntasks-per-node={devices} "
            "--distribution=block."
        )


# ---------------------------------------------------------------------- the interface by which other nodes are reached

VARIABLE = "GLOO_SOCKET_IFNAME"
_ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux


def choose_interface(address: str) -> None:
    """Has gloo take the interface that leads to an address, unless the user has named one.

    On many systems a machine's own name stands for 127.0.1.1 (``/etc/hosts``), where no other node finds it.

    Args:
        address: where the processes meet: an address or a name of the first node.
    """
    if VARIABLE not in os.environ and (name := interface_to(address)) is not None:
        os.environ[VARIABLE] = name


def interface_to(address: str) -> str | None:
    """The name of the interface that leads to an address (IPv4); None if it is not known, or leads to this machine alone."""
    if fcntl is None:
        return None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # of a datagram's socket this sends nothing
        mine = probe.getsockname()[0]
        if mine.startswith("127."):
            return None
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no such address
                found = fcntl.ioctl(probe, _ADDRESS_OF, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == mine:
                    return name
    return None
