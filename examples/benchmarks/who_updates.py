"""Who should update the layers of several ranks: one process with all cores, or each process a part of them?

Measures fused AdamW steps on the CPU for the same parameters: by one process with all cores, and by several processes at the same
time, each with its part of the parameters and of the cores. Then the time to send all new weights to another process with gloo,
over this machine's loopback, which is faster than a network.

From the root of the repository::

    python -m examples.benchmarks.who_updates --processes 1 2 4
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LAYER = 4_000_000
"""Parameters of a layer."""


def _least(work: Callable[[], object], repeats: int) -> float:
    """Returns the least seconds of a call, for all processes together: they begin each call at the same time."""
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        begun = time.perf_counter()
        work()
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])


def _run(rank: int, processes: int, port: int, layers: int, repeats: int, found: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))
    mine = [torch.nn.Parameter(torch.randn(LAYER)) for _ in range(layers)][rank::processes]
    for each in mine:
        each.grad = torch.randn(LAYER)
    update = _least(torch.optim.AdamW(mine, fused=True).step, repeats)
    weights = torch.randn(LAYER)
    send = layers * _least(lambda: dist.broadcast(weights, 0), repeats) if processes > 1 else None
    if rank == 0:
        found[processes] = update, send
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        port: int = tried.getsockname()[1]
    return port


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one row for each number of processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=16, help=f"layers of {LAYER:,} parameters")
    parser.add_argument("--repeats", type=int, default=15)
    asked = parser.parse_args(arguments)
    print(
        "| processes | update, ns per parameter | sending float32 weights to the others, ns per parameter |\n|---|---|---|"
    )
    for processes in asked.processes:
        with mp.Manager() as manager:
            found = manager.dict()
            options = (processes, _free_port(), asked.layers, asked.repeats, found)
            mp.spawn(_run, options, nprocs=processes)
            update, send = (None if each is None else each / asked.layers / LAYER * 1e9 for each in found[processes])
        print(f"| {processes} | {update:.2f} | {'–' if send is None else f'{send:.2f}'} |", flush=True)


if __name__ == "__main__":
    main()
