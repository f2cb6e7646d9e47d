"""Runs a function in several processes that train together, forked from one warm process."""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterable
from functools import cache
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

import torch

_SECONDS = 120
"""How long a function may take in all processes together."""


@cache
def _context() -> Any:
    """A server that has imported everything and computed nothing, so that a fork of it is quick and safe."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.warm"])
    return context


class RanksFailed(AssertionError):
    """Some processes have raised; ``errors`` has the traceback of each, None for those that have not."""

    def __init__(self, errors: list[str | None]) -> None:
        super().__init__("\n".join(f"rank {rank}:\n{error}" for rank, error in enumerate(errors) if error))
        self.errors = errors


def in_ranks(number: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Returns what a function of a module returns in each of so many processes, in the order of ranks.

    Args:
        number: how many.
        function: a function of a module. It finds its rank as Lightning does, in the environment.
        args, kwargs: are pickled.

    Raises:
        RanksFailed: it has raised in some.
    """
    outcomes = start(number, function, *args, **kwargs).outcomes()
    if any(error for error, _ in outcomes):
        raise RanksFailed([error for error, _ in outcomes])
    return [result for _, result in outcomes]


class Started:
    """Processes that run.

    Attributes:
        processes: the processes, in the order of ranks.
    """

    def __init__(self, processes: list[Any], ends: list[Connection]) -> None:
        self.processes = processes
        self._ends = ends

    def outcomes(self) -> list[tuple[str | None, Any]]:
        """Waits for all. Returns a traceback or None, and a result, of each."""
        found: dict[int, tuple[str | None, Any]] = {}
        deadline = monotonic() + _SECONDS
        while len(found) < len(self._ends):
            left = [end for rank, end in enumerate(self._ends) if rank not in found]
            ready = wait(left, timeout=max(0.0, deadline - monotonic()))
            if not ready:
                self._kill()
                missing = [rank for rank in range(len(self._ends)) if rank not in found]
                told = "\n".join(error for error, _ in found.values() if error)
                raise TimeoutError(f"ranks {missing} have not ended in {_SECONDS} seconds\n{told}")
            for end in ready:
                rank = self._ends.index(end)  # type: ignore[arg-type]
                try:
                    found[rank] = _loaded(end.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    found[rank] = (f"rank {rank} was killed", None)
        for process in self.processes:
            process.join(10)
        self._kill()
        return [found[rank] for rank in range(len(self._ends))]

    def _kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()


def start(number: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Started:
    """Starts the processes of :func:`in_ranks`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes, ends = [], []
    for rank in range(number):
        here, there = _context().Pipe(duplex=False)
        process = _context().Process(target=_run, args=(there, rank, port, function, args, kwargs))
        process.start()
        there.close()
        processes.append(process)
        ends.append(here)
    return Started(processes, ends)


def _run(end: Connection, rank: int, port: int, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    torch.set_num_threads(1)
    outcome: tuple[str | None, Any]
    try:
        outcome = None, function(*args, **kwargs)
    except BaseException:
        outcome = traceback.format_exc(), None
    end.send_bytes(_saved(outcome))
    end.close()
    os._exit(0)  # processes that are connected wait for each other when they end in order


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def rank() -> int:
    """This process's rank."""
    return int(os.environ["LOCAL_RANK"])


def each_equal(values: Iterable[Any]) -> bool:
    """Whether all values are equal."""
    first, *others = values
    return all(value == first for value in others)
