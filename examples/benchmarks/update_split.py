"""One process that updates for all with all threads, beside processes that each update a slice with their part of the threads.

Fused AdamW in float32 on tensors in shared memory, layer by layer, by turns; all processes meet after each step, as ranks do.
Every number is updated by the same formula from the same values, so both ways leave the same bits, which is checked.

From the root of the repository::

    python -m examples.benchmarks.update_split --millions 100 --processes 2
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

LAYERS = 16
SLICE = 128
"""Numbers of float32 that a slice's begin is a multiple of: 512 bytes."""


def tensors(parameters: int) -> list[list[Tensor]]:
    """For each layer weights, gradients, and AdamW's two averages, all of them in shared memory."""
    each = parameters // LAYERS // SLICE * SLICE
    generator = torch.Generator().manual_seed(0)

    def made() -> list[Tensor]:
        weight, gradient = (torch.randn(each, generator=generator) for _ in range(2))
        return [tensor.share_memory_() for tensor in (weight, gradient, torch.zeros(each), torch.zeros(each))]

    return [made() for _ in range(LAYERS)]


def update(layers: list[list[Tensor]], part: int, parts: int, step: Tensor) -> None:
    """One step of AdamW of a part of each layer."""
    torch._foreach_add_([step], 1)
    for layer in layers:
        size = -(-layer[0].numel() // parts // SLICE) * SLICE
        weight, gradient, mean, square = (tensor[part * size : (part + 1) * size] for tensor in layer)
        torch._fused_adamw_(
            [weight], [gradient], [mean], [square], [], [step], amsgrad=False, lr=1e-4, beta1=0.9, beta2=0.999,
            weight_decay=1e-2, eps=1e-8, maximize=False,
        )  # fmt: skip


def work(rank: int, processes: int, rounds: int, both: list[list[list[Tensor]]], barrier: Any, queue: Any) -> None:
    """Takes turns: the first process updates all of the first tensors, then all processes a slice each of the second ones."""
    threads = len(os.sched_getaffinity(0))
    seconds: list[list[float]] = [[], []]
    steps = [torch.zeros(()) for _ in both]
    with torch.no_grad():
        for _ in range(rounds + 1):
            for way, layers in enumerate(both):
                torch.set_num_threads(max(1, threads // processes) if way else threads)
                barrier.wait()
                begun = time.perf_counter()
                if way or not rank:
                    update(layers, rank if way else 0, processes if way else 1, steps[way])
                barrier.wait()
                seconds[way].append(time.perf_counter() - begun)
    if not rank:
        queue.put([statistics.median(each[1:]) for each in seconds])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--millions", type=int, default=100, help="of parameters (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="that are measured; one more is left out (%(default)s)")
    asked = parser.parse_args()
    both = [tensors(asked.millions * 10**6) for _ in range(2)]
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    arguments = (asked.processes, asked.rounds, both, context.Barrier(asked.processes), queue)
    mp.start_processes(work, arguments, nprocs=asked.processes, start_method="spawn")
    one, split = queue.get()
    assert all(torch.equal(a, b) for pair in zip(*both, strict=True) for a, b in zip(*pair, strict=True)), "other bits"
    print(f"torch {torch.__version__}, {asked.millions} M parameters, {len(os.sched_getaffinity(0))} cores")
    print(f"one process   {one:.4f} s, {28e-3 * asked.millions / one:.1f} GB/s")
    print(f"{asked.processes} processes   {split:.4f} s, {split / one:.2f} of it")


if __name__ == "__main__":
    main()
