"""This machine's ceilings: matrix rate, PCIe, memory, AdamW on the CPU. One row.

From the root of the repository::

    python -m examples.benchmarks.limits --seconds 20 --out rows.jsonl

``--experiments`` measures what only hardware can judge, in as many seconds again: :mod:`examples.benchmarks.experiments`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from examples.benchmarks import cli, experiments, rows
from examples.benchmarks.experiments import median_seconds
from sp_lightning.core.device.accelerator import device_for, present_device
from sp_lightning.core.device.device import Device
from sp_lightning.core.device.host_memory import PinnedMemory
from sp_lightning.tools.planner.rates import ADAMW_BYTES, DTYPES, adamw_seconds, copied_bytes, matrix_flops

TRANSFERS = ("host_to_device_bytes", "device_to_host_bytes", "duplex_bytes")
# A ceiling is measured once to warm up and then until its share of the seconds is over.
CEILINGS = 9


def measure(seconds: float) -> rows.Row:
    """All ceilings in about so many seconds; rates per second, None where there is no accelerator."""
    share = seconds / CEILINGS
    device, host = device_for(present_device()), Device(torch.device("cpu"))
    size = _buffer_bytes(share)
    return {
        "kind": "limits",
        "status": "ok",
        "matrix_flops": {name: matrix_flops(dtype, device, share) for name, dtype in DTYPES.items()},
        **transfer_bytes(device.device, share),
        "dram_bytes": copied_bytes(host, size, share),
        "device_bytes": None if device.computes_on_host else copied_bytes(device, size, share),
        **adamw_rates(share),
    }


def transfer_bytes(device: torch.device, seconds: float) -> dict[str, float | None]:
    """Bytes/s between pinned host memory and the device; ``duplex_bytes`` is each way while both are busy.

    The first three are of memory that is registered, as superpipeline's is; those ``…_allocated`` of memory that torch has
    allocated pinned, as its rivals' is.
    """
    if device.type == "cpu":
        return dict.fromkeys((*TRANSFERS, *map(_allocated, TRANSFERS)))
    size = _buffer_bytes(seconds)
    ours = [PinnedMemory(device_for(device), size, pin=True) for _ in range(2)]
    if not all(each.pinned for each in ours):
        raise RuntimeError(f"The system registers no {size / 2**20:.0f} MiB of host memory (ulimit -l).")
    theirs = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    rates = _transfer_rates(ours[0].bytes[:size], ours[1].bytes[:size], device, seconds / 2)
    allocated = _transfer_rates(theirs[0], theirs[1], device, seconds / 2)
    return {**rates, **{_allocated(name): rate for name, rate in allocated.items()}}


def _allocated(name: str) -> str:
    return f"{name}_allocated"


def _transfer_rates(there: Tensor, back: Tensor, device: torch.device, seconds: float) -> dict[str, float | None]:
    size = there.nbytes
    there.fill_(1)
    back.fill_(1)
    near, far = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def up() -> None:
        with torch.cuda.stream(streams[0]):
            near.copy_(there, non_blocking=True)

    def down() -> None:
        with torch.cuda.stream(streams[1]):
            back.copy_(far, non_blocking=True)

    def both() -> None:
        up()
        down()

    calls = zip(TRANSFERS, (up, down, both), strict=True)
    return {name: size / median_seconds(call, seconds / 3) for name, call in calls}


def adamw_rates(seconds: float) -> dict[str, float]:
    """AdamW of torch's on the CPU: fused, in bytes/s (28 per parameter in float32), and in seconds per parameter, by dtype."""
    count, share = _buffer_bytes(seconds) // 4, seconds / 4
    fused, default = (adamw_seconds(count, share, fused=way) for way in (True, None))
    halves = (torch.bfloat16, torch.float16)
    bf16, fp16 = (adamw_seconds(count, share, fused=True, dtype=dtype) for dtype in halves)
    return {
        "adamw_bytes": ADAMW_BYTES / fused,
        "adamw_seconds_per_parameter": fused,
        "bf16_adamw_seconds_per_parameter": bf16,
        "fp16_adamw_seconds_per_parameter": fp16,
        "default_adamw_seconds_per_parameter": default,
    }


def plan_arguments(row: rows.Row) -> list[str]:
    """Returns the rates of this machine as options of ``superpipeline plan``. Without an accelerator, those of the host."""
    rates = {
        "--host-bandwidth": row["dram_bytes"],
        "--pcie": row["duplex_bytes"],
        "--device-bandwidth": row["device_bytes"],
    }
    known = [(name, f"{rate / 1e9:.4g}GB/s") for name, rate in rates.items() if rate is not None]
    return ["--tflops", f"{row['matrix_flops']['bf16'] / 1e12:.4g}", *(word for pair in known for word in pair)]


def _buffer_bytes(seconds: float) -> int:
    """Between 64 and 512 MiB: beyond the caches where there is time for it."""
    return min(2**29, max(2**26, int(seconds * 2**30)))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=cli.positive, default=20, help="for all ceilings together (%(default)s)")
    parser.add_argument("--out", type=cli.rows_file, default="runs/benchmarks/rows.jsonl", help="(%(default)s)")
    parser.add_argument(
        "--experiments", nargs="*", default=(), choices=experiments.EXPERIMENTS, help="what to measure beside (nothing)"
    )
    parser.add_argument(
        "--rates", type=Path, help="a file for the ceilings, and the arguments of plan that say the same"
    )
    options = parser.parse_args(argv)
    with cli.orderly(options.out):
        row = {**rows.origin(), **measure(options.seconds)}
        if options.experiments:
            size = _buffer_bytes(options.seconds / CEILINGS)
            row["experiments"] = experiments.run(options.experiments, size, options.seconds)
        rows.append(options.out, row)
        if options.rates is not None:
            options.rates.write_text(
                json.dumps({**row, "plan": plan_arguments(row)}, indent=1) + "\n", encoding="utf-8"
            )
    rate = max(row["matrix_flops"].values())
    for name, found in row.get("experiments", {}).items():
        print(
            f"experiment {name}: {', '.join(f'{way} {rate:.4g}/s' for way, rate in found['rates'].items())} {found['note']}"
        )
    print(f"limits: up to {rate / 1e12:.2f} TFLOP/s, host memory {row['dram_bytes'] / 1e9:.1f} GB/s", flush=True)


if __name__ == "__main__":
    main()
