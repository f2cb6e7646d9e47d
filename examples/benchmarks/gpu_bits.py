"""Which formulas of optimizers' steps and of norms this GPU confirms, and what their kernels take on the CPU.

A minute on a machine with a GPU settles whether steps on the CPU have the bits of plain Lightning's. From the root of the
repository::

    python -m examples.benchmarks.gpu_bits --out rows.jsonl

Without a GPU, ``--emulated`` takes the tests' emulator for one: then times are meant, not bits.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from examples.benchmarks import cli, rows
from sp_lightning.capabilities.kernels import gpu_norms, update
from sp_lightning.capabilities.kernels.gpu import find_confirmed, gpu_recipes
from sp_lightning.capabilities.kernels.norms import norms_of
from sp_lightning.capabilities.kernels.update import update_in_one_pass
from sp_lightning.capabilities.kernels.variants import OPEN, Like, Variant
from sp_lightning.core.device.host_kernels import HALVES, Operands

DTYPES = (torch.float32, *HALVES)
SETTINGS: dict[str, Any] = {
    "lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "weight_decay": 1e-2, "eps": 1e-8, "amsgrad": False, "maximize": False,
}  # fmt: skip


def plain_variants(device: torch.device, dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[Variant]:
    """All updates whose formulas are written, without casts and changes of gradients."""
    for (kind, form), dtype, maximize, decays in product(OPEN, dtypes, (False, True), (False, True)):
        own: list[dict[str, Any]] = [{}]
        if kind in ("adam", "adamw"):
            own = [{"amsgrad": amsgrad, "near": near} for amsgrad, near in product((False, True), repeat=2)]
        elif kind == "sgd":
            ways = ((False, False, False), (True, False, False), (True, True, False), (True, False, True))
            own = [{"momentum": momentum, "first": first, "nesterov": nesterov} for momentum, first, nesterov in ways]
        made = Variant(kind, dtype, None, 0, maximize, decays, weight=dtype, like=Like(device, form))
        yield from (replace(made, **each) for each in own)


def confirmed(device: torch.device, seconds: float) -> rows.Row:
    """Compares each optimizer, form and dtype with the GPU until the time is over. Returns how the GPU's operators round."""
    found: dict[str, Counter[str]] = {}
    end = time.perf_counter() + seconds
    left = 0
    for variant in plain_variants(device):
        assert variant.like is not None
        if time.perf_counter() > end:
            left += 1
            continue
        what = f"{variant.kind}, {variant.like.form}, {str(variant.weight).removeprefix('torch.')}"
        result = find_confirmed(variant, update._run_plain)
        unusual = "none" if result is None else ", ".join(sorted(gpu_recipes(variant)[0].usual - result[1].usual))
        found.setdefault(what, Counter())[unusual or "as usual"] += 1
    norms = {
        str(dtype).removeprefix("torch."): "equal" if gpu_norms._confirmed(device, dtype) else "differ"
        for dtype in DTYPES
    }
    if device.type != "cpu" and norms["float32"] == "equal":
        norms["of many chunks"] = "equal" if gpu_norms._adds_up_many(device) else "differ"
    return {"formulas": {what: dict(each) for what, each in found.items()}, "norms": norms, "not_compared": left}


def times(device: torch.device, parameters: int, rounds: int) -> rows.Row:
    """Nanoseconds per parameter of AdamW and of norms, with the bits of the CPU and of the GPU: the least, in turns."""
    operands = _operands(parameters)
    gradient = operands.gradient

    def step(like: Like | None) -> Callable[[], Any]:
        def run() -> None:
            assert update_in_one_pass(torch._fused_adamw_, SETTINGS, operands, [0.5], like)

        return run

    ways: dict[str, Callable[[], Any]] = {
        "step, the CPU's bits": step(None),
        "step, foreach": step(Like(device, "foreach")),
        "step, fused": step(Like(device, "fused")),
        "norm, the CPU's bits": lambda: norms_of([gradient]),
        "norm, the GPU's bits": lambda: gpu_norms.norms_like(device, [gradient]),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, run in ways.items():
            begun = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - begun)
    nanoseconds = {name: 1e9 * min(each[1:]) / parameters for name, each in taken.items()}
    return {"parameters": parameters, "threads": torch.get_num_threads(), "nanoseconds_per_parameter": nanoseconds}


def _operands(parameters: int) -> Operands:
    generator = torch.Generator().manual_seed(0)
    weight, average, squares = (torch.randn(parameters, generator=generator) for _ in range(3))
    cast = torch.empty(parameters, dtype=torch.bfloat16)
    return Operands(weight, weight.bfloat16(), cast, [average, squares.abs_(), None, torch.tensor(5.0)])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--millions", type=cli.positive, default=50, help="parameters whose step is timed (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=25, help="of timing (%(default)s)")
    parser.add_argument("--seconds", type=cli.positive, default=60, help="for comparing formulas (%(default)s)")
    parser.add_argument("--emulated", action="store_true", help="take the tests' emulator for the GPU")
    parser.add_argument("--out", type=cli.rows_file, default="runs/benchmarks/rows.jsonl", help="(%(default)s)")
    options = parser.parse_args(argv)
    if not (options.emulated or torch.cuda.is_available()):
        parser.error("no CUDA GPU was found. Expected one. To time kernels without: --emulated")
    device = torch.device("cpu") if options.emulated else torch.device("cuda", torch.cuda.current_device())
    # The kernel with the CPU's bits is compared with torch's own operator, before that is emulated.
    assert update_in_one_pass(torch._fused_adamw_, SETTINGS, _operands(1 << 16), [0.5])
    emulated: Any = nullcontext()
    if options.emulated:
        from tests.support.emulated_gpu import EmulatedGpu

        emulated = EmulatedGpu()
    with cli.orderly(options.out), emulated:
        row = {**rows.origin(), "kind": "gpu-bits", "status": "ok", "emulated": options.emulated}
        row |= confirmed(device, options.seconds)
        row |= times(device, int(options.millions * 1e6), options.rounds)
        for what, each in row["formulas"].items():
            print(f"{what}: {'; '.join(f'{how} ({count})' for how, count in each.items())}")
        print("norms:", ", ".join(f"{dtype} {how}" for dtype, how in row["norms"].items()))
        for name, each in row["nanoseconds_per_parameter"].items():
            print(f"{name}: {each:.3f} ns per parameter")
        rows.append(options.out, row)


if __name__ == "__main__":
    main()
