"""Runs a function in several processes that train together, forked from one warm process."""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import cycle
from multiprocessing.connection import Connection, wait
from random import Random
from time import monotonic
from typing import Any

import torch

LAUNCHERS = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")
"""What Lightning's launcher leaves in the environment of a process that has trained on several devices."""

_SECONDS = 120
"""How long a function may take in all processes together."""


@cache
def fresh_processes() -> Any:
    """A server that has imported everything and computed nothing, so that a fork of it is quick and safe."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.warm"])
    return context


class RanksFailed(AssertionError):
    """Some processes have raised; ``errors`` has the traceback of each, None for those that have not."""

    def __init__(self, errors: list[str | None]) -> None:
        super().__init__("\n".join(f"rank {rank}:\n{error}" for rank, error in enumerate(errors) if error))
        self.errors = errors


Number = int | tuple[int, int]
"""How many processes there are; or how many of them stand for nodes, and how many there are on each."""


def total(number: Number) -> int:
    """How many processes there are in all."""
    return number if isinstance(number, int) else number[0] * number[1]


def devices(number: Number) -> dict[str, int]:
    """The options of a trainer of so many processes."""
    nodes, devices = (1, number) if isinstance(number, int) else number
    return {"devices": devices, "num_nodes": nodes}


def in_ranks(number: Number, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Returns what a function of a module returns in each of so many processes, in the order of ranks.

    The processes stay for the next call, unless one has raised.

    Args:
        number: how many processes, of how many nodes.
        function: a function of a module. It finds its rank as Lightning does, in the environment.
        args, kwargs: are pickled.

    Raises:
        RanksFailed: it has raised in some.
    """
    if number not in _waiting:
        _waiting[number] = start(number, _serve)
    started = _waiting[number]
    for orders in started.orders:
        orders.send_bytes(_saved((function, args, kwargs)))
    try:
        outcomes = started.outcomes(ending=False)
        if any(error for error, _ in outcomes):
            raise RanksFailed([error for error, _ in outcomes])
    except BaseException:
        del _waiting[number]
        started.stop()
        raise
    return [result for _, result in outcomes]


_waiting: dict[Number, Started] = {}


@atexit.register
def _stop_all() -> None:
    for started in _waiting.values():
        started.stop()


def _serve(orders: Connection, results: Connection) -> None:
    """Runs one function after the other."""
    while True:
        function, args, kwargs = _loaded(orders.recv_bytes())
        results.send_bytes(_saved(_outcome(function, args, kwargs)))


class Started:
    """Processes that run.

    Attributes:
        processes: the processes, in the order of ranks.
    """

    def __init__(self, processes: list[Any], ends: list[Connection], orders: list[Connection]) -> None:
        self.processes = processes
        self._ends = ends
        self.orders = orders

    def outcomes(self, *, ending: bool = True) -> list[tuple[str | None, Any]]:
        """Waits for all, and for their end if they are ``ending``. Returns a traceback or None, and a result, of each."""
        found: dict[int, tuple[str | None, Any]] = {}
        deadline = monotonic() + _SECONDS
        while len(found) < len(self._ends):
            left = [end for rank, end in enumerate(self._ends) if rank not in found]
            ready = wait(left, timeout=max(0.0, deadline - monotonic()))
            if not ready:
                self.stop()
                missing = [rank for rank in range(len(self._ends)) if rank not in found]
                told = "\n".join(error for error, _ in found.values() if error)
                raise TimeoutError(f"ranks {missing} have not ended in {_SECONDS} seconds\n{told}")
            for end in ready:
                rank = self._ends.index(end)  # type: ignore[arg-type]
                try:
                    found[rank] = _loaded(end.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    found[rank] = (f"rank {rank} was killed", None)
        if ending:
            for process in self.processes:
                process.join(10)
            self.stop()
        return [found[rank] for rank in range(len(self._ends))]

    def stop(self) -> None:
        """Ends those that still run."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()


_PORTS = cycle(Random(os.getpid()).sample(range(15_000, 32_000), 1_000))


def free_port() -> int:
    """A port that nobody is likely to take meanwhile: the system gives those from 32,768 on to clients."""
    for port in _PORTS:
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a cycle has no end")


def start(number: Number, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Started:
    """Starts the processes of :func:`in_ranks`."""
    port, per_node = free_port(), number if isinstance(number, int) else number[1]
    processes, ends, orders = [], [], []
    for rank in range(total(number)):
        here, there = fresh_processes().Pipe(duplex=False)
        reads, writes = fresh_processes().Pipe(duplex=False)
        where = {"NODE_RANK": str(rank // per_node), "LOCAL_RANK": str(rank % per_node), "MASTER_PORT": str(port)}
        process = fresh_processes().Process(target=_run, args=(there, reads, rank, where, function, args, kwargs))
        process.start()
        there.close()
        reads.close()
        processes.append(process)
        ends.append(here)
        orders.append(writes)
    return Started(processes, ends, orders)


def _run(
    end: Connection,
    orders: Connection,
    rank: int,
    where: dict[str, str],
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **where, _RANK: str(rank)}
    torch.set_num_threads(1)
    if function is _serve:
        _serve(orders, end)
    end.send_bytes(_saved(_outcome(function, args, kwargs)))
    end.close()
    os._exit(0)  # processes that are connected wait for each other when they end in order


def _outcome(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[str | None, Any]:
    try:
        return None, function(*args, **kwargs)
    except BaseException:
        return traceback.format_exc(), None


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


_RANK = "SP_LIGHTNING_TEST_RANK"


def rank() -> int:
    """This process's rank among those of all nodes."""
    return int(os.environ[_RANK])
