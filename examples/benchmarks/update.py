"""The optimizer's step on the host: torch's AdamW alone, an update in three walks over memory, and in pieces of several sizes.

Same tensors, one process, taking turns; with one thread, and with all that torch takes. Under bf16-mixed the gradients come
in bfloat16 and new weights are cast for the next fetch, so AdamW alone, on float32 gradients that are there already, is
what memory allows at best.

From the root of the repository::

    python -m examples.benchmarks.update --millions 100 --out rows.jsonl
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from examples.benchmarks import cli, rows
from sp_lightning.core.layers.narrow_gradient import Change, Factor, Norms, change, keep_narrow, stored
from sp_lightning.core.updates.pieces import InPieces, piece_size

LAYERS = 16
MAX_NORM = 1e-3  # so small that every step clips
Step = Callable[[], None]
FUSED: dict[str, Any] = {
    "amsgrad": False, "lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "weight_decay": 1e-2, "eps": 1e-8, "maximize": False
}  # fmt: skip
adamw: Callable[..., None] = torch._fused_adamw_
CASES = {
    "bf16-mixed": (torch.float32, True, False),
    "bf16-mixed, clipped by norm": (torch.float32, True, True),
    "32-true": (torch.float32, False, False),
    "32-true, clipped by norm": (torch.float32, False, True),
    "bf16-true": (torch.bfloat16, False, False),
    "16-true": (torch.float16, False, False),
}
"""The dtype of weights and state, whether gradients and weights travel in bfloat16, and whether gradients are clipped."""


class Layers:
    """Weights that are updated layer by layer.

    Args:
        parameters: how many numbers the weights are together.
        dtype: theirs, and that of their state.
    """

    def __init__(self, parameters: int, dtype: torch.dtype) -> None:
        each = max(parameters // LAYERS // 4096, 1) * 4096
        torch.manual_seed(0)
        self.weights = [nn.Parameter(torch.randn(each).to(dtype)) for _ in range(LAYERS)]
        self.came = [torch.randn(each).bfloat16() for _ in range(LAYERS)]
        self.casts = [torch.empty_like(came) for came in self.came]
        self.wide = [came.to(dtype) for came in self.came]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-4, fused=True)
        self.norms = Norms()
        self.parameters = each * LAYERS

    def step(self, index: int) -> None:
        """Runs torch's step for one layer, as the strategy does."""
        part = object.__new__(torch.optim.AdamW)
        groups = [{**self.optimizer.param_groups[0], "params": [self.weights[index]]}]
        vars(part).update(vars(self.optimizer), param_groups=groups)
        torch.optim.AdamW.step.__wrapped__(part)  # type: ignore[attr-defined]

    def alone(self) -> None:
        """The optimizer alone, on gradients that are there."""
        for index, weight in enumerate(self.weights):
            weight.grad = self.wide[index]
            self.step(index)

    def walks(self, *, half: bool, clips: bool) -> None:
        """Each layer is widened as its gradient comes; clipping, step and cast walk over memory once more each."""
        for index, weight in enumerate(self.weights):
            weight.grad = self.wide[index].copy_(self.came[index]) if half else self.wide[index]
        total = get_total_norm(self.wide) if clips else None
        for index, weight in enumerate(self.weights):
            if total is not None:
                clip_grads_with_norm_([weight], MAX_NORM, total)
            self.step(index)
            if half:
                self.casts[index].copy_(weight.detach())

    def operators(self) -> None:
        """What torch's operators take on the pieces, in a loop that does nothing else: the least that pieces can take."""
        size = piece_size(torch.get_num_threads())
        wide = torch.empty(size)
        with torch.no_grad():
            for index, weight in enumerate(self.weights):
                state = self.optimizer.state[weight]
                whole = (weight.detach(), self.came[index], self.casts[index], state["exp_avg"], state["exp_avg_sq"])
                for part, came, cast, mean, square in zip(*(each.split(size) for each in whole), strict=True):
                    gradient = wide[: len(part)].copy_(came)
                    adamw([part], [gradient], [mean], [square], [], [state["step"]], **FUSED)
                    cast.copy_(part)

    def pieces(self, *, half: bool, clips: bool, elements: int | None = None) -> None:
        """As :class:`~sp_lightning.core.engine.layerwise.LayerwiseStep` does."""
        for weight, came, widened in zip(self.weights, self.came, self.wide, strict=True):
            weight.grad = None if half else widened
            if half:
                keep_narrow(weight, came, looked_at=lambda: None)
        clip: Change | None = None
        if clips:
            total = get_total_norm([self.norms.of(g) for weight in self.weights if (g := stored(weight)) is not None])
            coefficient = torch.clamp(MAX_NORM / (total + 1e-6), max=1.0)
            clip = Factor(coefficient)
        for index, weight in enumerate(self.weights):
            wide = {id(weight): clip} if clip is not None and not change(weight, clip) else {}
            casts = {id(weight): self.casts[index]} if half else {}
            with InPieces(casts, wide, elements=elements), torch.DisableTorchFunctionSubclass():
                self.step(index)


def measure(parameters: int, rounds: int, counts: Sequence[int] | None = None) -> rows.Row:
    """Median seconds of each way, for each case and number of threads.

    Args:
        parameters: how many numbers the weights are.
        rounds: how often each way is measured; one more is left out.
        counts: the numbers of threads; None for one, and for what torch takes.
    """
    before = torch.get_num_threads()
    counts = counts or list(dict.fromkeys((1, before)))
    found: dict[str, Any] = {
        str(threads): {"elements_of_a_piece": piece_size(threads), "cases": {}} for threads in counts
    }
    try:
        for dtype in dict.fromkeys(dtype for dtype, *_ in CASES.values()):
            layers = Layers(parameters, dtype)
            for threads in counts:
                torch.set_num_threads(threads)
                for name, (its, half, clips) in CASES.items():
                    if its is dtype:
                        found[str(threads)]["cases"][name] = _compare(layers, rounds, half=half, clips=clips)
    finally:
        torch.set_num_threads(before)
    return {"kind": "update", "status": "ok", "parameters": layers.parameters, "threads": found}


def _compare(layers: Layers, rounds: int, *, half: bool, clips: bool) -> dict[str, float]:
    ways: dict[str, Step] = {
        "alone": layers.alone,
        "walks": lambda: layers.walks(half=half, clips=clips),
        "pieces": lambda: layers.pieces(half=half, clips=clips),
    }
    if half:
        size = piece_size(torch.get_num_threads())
        ways |= {
            f"pieces of {n} ki": partial(layers.pieces, half=half, clips=clips, elements=n << 10) for n in _sizes(size)
        }
    if half and not clips:
        ways["operators"] = layers.operators
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, step in ways.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def _sizes(usual: int) -> list[int]:
    """Sizes of pieces around the usual one, in units of 1,024 elements."""
    return [max(1, (usual >> 10) * numerator // 8) for numerator in (1, 2, 4, 16, 32)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--millions", type=cli.positive, default=100, help="of parameters (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="that are measured (%(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", help="(default: 1 and torch's own number)")
    parser.add_argument("--out", type=cli.rows_file, default="runs/benchmarks/rows.jsonl", help="(%(default)s)")
    options = parser.parse_args(argv)
    with cli.orderly(options.out):
        load = os.getloadavg()[0]  # of the last minute, before the measurement
        row = {**rows.origin(), "load": load, **measure(int(options.millions * 1e6), options.rounds, options.threads)}
        print(f"load before {load:.1f}, after {os.getloadavg()[0]:.1f}, on {os.cpu_count()} CPUs")
        rows.append(options.out, row)
    for threads, found in row["threads"].items():
        for case, seconds in found["cases"].items():
            each = {way: f"{1e9 * value / row['parameters']:.3f}" for way, value in seconds.items()}
            ratio = seconds["pieces"] / seconds["alone"]
            print(f"{threads} threads, {case}: ns per parameter {each}; pieces ÷ alone {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
