"""What a machine does in a second, measured once: ``python -m sp_lightning rates > rates.json``."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.registry import needed_for
from sp_lightning.tuning.machine import measure_host_seconds

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes in which a device multiplies and weights are updated, by the names that files of rates have for them."""
OF_DEVICE = ("tflops", "device_bandwidth", "pcie")
"""What is measured of the device, by the names of ``plan``'s options."""
ADAMW_BYTES = 28
"""What a step of AdamW with float32 state reads and writes for each parameter: 4 tensors in, 3 out."""
_SHARES = 10  # what is measured for seconds, each as long
_SAID = ("The drive cannot be read", "The drive cannot be written", "The file", ": name another folder with --disk")


def measure_rates(device: Device | None, seconds: float, disk: Path | None = None) -> dict[str, Any]:
    """Measures a machine, with the caller's threads.

    Args:
        device: where layers compute; None if that is not here, and :data:`OF_DEVICE` are not measured.
        seconds: how long that takes, about; the disk and Python's time come on top.
        disk: a folder on the drive; None for no drive.

    Returns:
        By the names of ``plan``'s options: ``tflops``, a dict by :data:`DTYPES`; ``host_tflops``, in bfloat16; in bytes per
        second ``pcie`` (each way while both are busy), ``device_bandwidth``, ``host_bandwidth`` (what AdamW reads and
        writes), ``disk``. ``adamw``: seconds per parameter of torch's fused step, a dict by :data:`DTYPES`.
        And ``python``: seconds for each visit and for each weight, by "training" and "inference"; ``synchronous``, whether
        everything else stands still during a copy.
    """
    share = seconds / _SHARES
    nbytes = min(2**29, max(2**26, int(share * 2**30)))  # beyond the caches where there is time for it
    host = Device(torch.device("cpu"))
    adamw = {name: adamw_seconds(nbytes // 4, share, fused=True, dtype=dtype) for name, dtype in DTYPES.items()}
    found: dict[str, Any] = {}
    if device is not None:
        found = {
            "tflops": {name: matrix_flops(dtype, device, share) / 1e12 for name, dtype in DTYPES.items()},
            "device_bandwidth": copied_bytes(device, nbytes, share),
            "pcie": link_bytes(device, nbytes, share),
        }
    return found | {
        "host_tflops": matrix_flops(torch.bfloat16, host, share) / 1e12,
        "host_bandwidth": ADAMW_BYTES / adamw["fp32"],
        "adamw": adamw,
        **({} if disk is None else {"disk": disk_bytes(disk, nbytes)}),
        "python": {
            "training": measure_host_seconds(training=True),
            "inference": measure_host_seconds(training=False),
        },
        "synchronous": device is not None and device.synchronous,
    }


def matrix_flops(dtype: torch.dtype, device: Device, seconds: float) -> float:
    """Multiplications and additions per second, of a square product of random matrices."""
    size = 512 if seconds < 1 else 1024
    size = size if device.computes_on_host else 8192
    a, b = (torch.randn(size, size, device=device.device).to(dtype) for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: torch.mm(a, b), seconds, device)


def copied_bytes(device: Device, nbytes: int, seconds: float) -> float:
    """Bytes per second that a large copy within a device's memory reads and writes."""
    source, target = (torch.ones(nbytes // 4, device=device.device) for _ in range(2))
    return 2 * nbytes / median_seconds(lambda: target.copy_(source), seconds, device)


def link_bytes(device: Device, nbytes: int, seconds: float) -> float:
    """Bytes per second between page-locked host memory and the device, each way while both are busy."""
    there, back = (device.host_empty(nbytes, pin=True)[:nbytes] for _ in range(2))
    near, far = (device.upload_target(nbytes) for _ in range(2))
    locked: list[Tensor] = []
    try:
        for memory in (there, back):
            memory.fill_(1)
            if not device.pin(memory):
                raise OSError(f"The system page-locks no {nbytes >> 20} MiB of host memory: raise `ulimit -l`.")
            locked.append(memory)

        def both() -> None:
            device.copy([near], [there], Stream.UPLOAD)
            device.copy([back], [far], Stream.DOWNLOAD)
            for stream in (Stream.UPLOAD, Stream.DOWNLOAD):
                device.synchronize(device.record(stream), Wait.CLOSE_AFTER_FETCH)

        with torch.no_grad():
            # Copies that are synchronous come one after the other.
            return (2 if device.synchronous else 1) * nbytes / median_seconds(both, seconds, device)
    finally:
        for memory in locked:
            device.unpin(memory)


def adamw_seconds(count: int, seconds: float, *, fused: bool | None, dtype: torch.dtype = torch.float32) -> float:
    """Returns the seconds per parameter of AdamW on the host.

    Args:
        count: the parameters.
        seconds: how long to measure, about.
        fused: as torch's ``AdamW(fused=…)``.
        dtype: of weights, gradients and state.
    """
    weight = nn.Parameter(torch.randn(count).to(dtype))
    weight.grad = torch.randn(count).to(dtype)
    step = torch.optim.AdamW([weight], fused=fused).step
    return median_seconds(step, seconds, Device(torch.device("cpu"))) / count


def disk_bytes(folder: Path, nbytes: int) -> float:
    """Bytes per second that a drive reads or writes, whichever is slower, past the system's cache where it allows that.

    Raises:
        OSError: nothing can be written there.
    """
    with needed_for("--disk"):
        from sp_lightning.disk.direct_file import DirectFile
    memory = Device(torch.device("cpu")).host_empty(nbytes)[:nbytes].fill_(1)
    with TemporaryFile(dir=folder) as file:
        drive = DirectFile(file.fileno(), str(folder), _SAID)
        seconds = []
        for move in (drive.write, drive.read):
            begun = perf_counter()
            move(memory, 0)
            seconds.append(perf_counter() - begun)
    return nbytes / max(seconds)


def median_seconds(call: Callable[[], object], seconds: float, device: Device) -> float:
    """Median seconds of a call, which is made until so many are over, and three times at least. The device is waited for."""

    def taken() -> float:
        begun = perf_counter()
        call()
        device.synchronize(device.record(Stream.COMPUTE), Wait.CLOSE_AFTER_FETCH)
        return perf_counter() - begun

    taken()  # kernels and caches are made
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        times.append(taken())
    return statistics.median(times)
