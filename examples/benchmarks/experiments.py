"""Experiments that hardware alone can judge: what the engine might do otherwise, measured without it. A row of limits.py each.

None of them runs unless it is asked for, and nothing in the package depends on one. Each says what would turn it on.

From the root of the repository::

    python -m examples.benchmarks.limits --experiments copy-queues numa huge-pages --seconds 20 --out rows.jsonl
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

Rates = dict[str, float]
"""Rates of the ways that are compared, by name. Empty where this machine has nothing to compare."""

QUEUES = (1, 2, 4)
NODES = Path("/sys/devices/system/node")
_TURNS = 3


def copy_queues(nbytes: int, seconds: float) -> Rates:
    """Bytes/s from page-locked host memory to the device, whole and in as many parts as there are streams."""
    if not torch.cuda.is_available():
        return {}
    near = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    far = torch.ones(nbytes, dtype=torch.uint8).pin_memory()

    def copy(streams: list[torch.cuda.Stream]) -> None:
        pairs = zip(streams, near.chunk(len(streams)), far.chunk(len(streams)), strict=True)
        for stream, target, source in pairs:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)

    streams = [torch.cuda.Stream() for _ in range(max(QUEUES))]
    share = seconds / len(QUEUES)
    return {f"{count} queues": nbytes / median_seconds(partial(copy, streams[:count]), share) for count in QUEUES}


def numa(nbytes: int, seconds: float, nodes: Path = NODES) -> Rates:
    """Parameters/s of fused AdamW with threads anywhere, and in one process on each node, whose memory is that node's."""
    lists = [(node / "cpulist").read_text().strip() for node in sorted(nodes.glob("node[0-9]*"))]
    if len(lists) < 2:
        return {}
    anywhere = sum(_update_rates([""], nbytes, seconds / 2))
    return {"anywhere": anywhere, "each on its node": sum(_update_rates(lists, nbytes // len(lists), seconds / 2))}


def _update_rates(cpus: list[str], nbytes: int, seconds: float) -> list[float]:
    """Parameters/s of processes that update at the same time, each on these processors; an empty list is all of them."""
    command = [sys.executable, "-m", "examples.benchmarks.experiments", str(nbytes), str(seconds)]
    running = [subprocess.Popen([*command, each], stdout=subprocess.PIPE, text=True) for each in cpus]
    return [float(each.communicate()[0]) for each in running]


def huge_pages(nbytes: int, seconds: float) -> Rates:
    """Parameters/s of fused AdamW whose weights, gradients and state are in pages of 4 KiB, and in huge ones."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return {}
    ways = {"small pages": mmap.MADV_NOHUGEPAGE, "huge pages": mmap.MADV_HUGEPAGE}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_TURNS):  # what else runs is alike for both
        for name, advice in ways.items():
            share = seconds / _TURNS / len(ways)
            rates[name].append(updates_per_second(nbytes, share, partial(_pages, advice=advice)))
    return {name: statistics.median(each) for name, each in rates.items()}


def _pages(nbytes: int, advice: int) -> Tensor:
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(advice)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    ctypes.memset(memory.data_ptr(), 0, nbytes)
    return memory


def updates_per_second(nbytes: int, seconds: float, allocate: Callable[[int], Tensor]) -> float:
    """Parameters/s of a fused AdamW step whose float32 weight takes so many bytes."""
    weight = nn.Parameter(allocate(nbytes).view(torch.float32))
    weight.grad = allocate(nbytes).view(torch.float32).fill_(1)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[weight][name] = allocate(nbytes).view(torch.float32)
    return weight.numel() / median_seconds(optimizer.step, seconds)


def median_seconds(call: Callable[[], object], seconds: float) -> float:
    """Median seconds of a call, which is made until so many are over, and three times at least. The GPU is waited for."""
    call()
    synchronize()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        start = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


EXPERIMENTS: dict[str, tuple[Callable[[int, float], Rates], str]] = {
    "copy-queues": (
        copy_queues,
        "If two or four queues move a tenth more bytes than one, Accelerator would upload through as many streams.",
    ),
    "numa": (
        numa,
        "If processes on their nodes update a tenth more parameters together, the background's threads would be bound to the "
        "node of each layer's memory.",
    ),
    "huge-pages": (
        huge_pages,
        "If huge pages update a tenth more parameters, the host store would ask for them (madvise).",
    ),
}
"""What is measured, by name, and what would turn it on in the engine."""


def run(names: list[str], nbytes: int, seconds: float) -> dict[str, dict[str, object]]:
    """The rates of some experiments, each in its share of the seconds, with their notes."""
    share = seconds / max(len(names), 1)
    found: dict[str, dict[str, object]] = {}
    for name in names:
        measure, note = EXPERIMENTS[name]
        rates = measure(nbytes, share)
        found[name] = {
            "rates": rates,
            "note": note if rates else "This machine has nothing to compare: it was not measured.",
        }
    return found


def main(argv: list[str]) -> None:
    """Prints the parameters/s of one process on some processors: arguments are bytes, seconds, and a list of processors."""
    nbytes, seconds, cpus = argv
    if cpus:
        os.sched_setaffinity(0, _numbers(cpus))
    print(updates_per_second(int(nbytes), float(seconds), lambda size: torch.ones(size, dtype=torch.uint8).zero_()))


def _numbers(cpus: str) -> set[int]:
    """The numbers in a list of processors as Linux writes it: ``0-3,8``."""
    ranges = [[int(end) for end in part.split("-")] for part in cpus.split(",")]
    return {number for first, *last in ranges for number in range(first, (last or [first])[0] + 1)}


if __name__ == "__main__":
    main(sys.argv[1:])
