"""Measures the speed of a machine: ``superpipeline rates > rates.json``."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.registry import needed_for
from sp_lightning.tools.planner.prediction.machine import measure_host_seconds

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The measured dtypes of matrix products, by their names in a file of rates."""
OF_DEVICE = ("tflops", "device_bandwidth", "pcie")
"""The measurements of the device, by the names of ``plan``'s options."""
ADAMW_BYTES = 28
"""Bytes that a step of AdamW with float32 state reads (4 tensors) and writes (3) for each parameter."""
_SHARES = 7  # each timed measurement (at most six) gets this fraction of the seconds


def measure_rates(device: Device | None, seconds: float, disk: Path | None = None) -> dict[str, Any]:
    """Measures a machine, with the number of threads of the caller.

    Args:
        device: the device of the layers. None if this machine does not have it: then :data:`OF_DEVICE` are not measured.
        seconds: the approximate time, without the measurements of the disk and of Python.
        disk: a folder on the drive; None for no drive.

    Returns:
        The measurements by the names of ``plan``'s options:

        - ``tflops``: a dict by :data:`DTYPES`.
        - ``pcie`` (each way while both are busy), ``device_bandwidth``, ``host_bandwidth`` (reads and writes of AdamW), ``disk``:
          bytes per second.

        and other measurements:

        - ``python``: seconds for each layer call and for each weight, a dict with the keys "training" and "inference".
        - ``synchronous``: True if nothing else runs during a copy.
    """
    share = seconds / _SHARES
    nbytes = min(2**29, max(2**26, int(share * 2**30)))  # larger than caches, if the time allows it
    found: dict[str, Any] = {}
    if device is not None:
        found = {
            "tflops": {name: matrix_flops(dtype, device, share) / 1e12 for name, dtype in DTYPES.items()},
            "device_bandwidth": copied_bytes(device, nbytes, share),
            "pcie": link_bytes(device, nbytes, share),
        }
    return found | {
        "host_bandwidth": ADAMW_BYTES / adamw_seconds(nbytes // 4, share, fused=True),
        **({} if disk is None else {"disk": disk_bytes(disk, nbytes)}),
        "python": {
            "training": measure_host_seconds(training=True),
            "inference": measure_host_seconds(training=False),
        },
        "synchronous": device is not None and device.synchronous,
    }


def matrix_flops(dtype: torch.dtype, device: Device, seconds: float) -> float:
    """Returns the floating-point operations per second of a product of random square matrices."""
    size = 8192
    if device.computes_on_host:
        size = 512 if seconds < 1 else 1024
    a, b = (torch.randn(size, size, device=device.device).to(dtype) for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: torch.mm(a, b), seconds, device)


def copied_bytes(device: Device, nbytes: int, seconds: float) -> float:
    """Returns the bytes per second that a large copy within a device's memory reads and writes."""
    source, target = (torch.ones(nbytes // 4, device=device.device) for _ in range(2))
    return 2 * nbytes / median_seconds(lambda: target.copy_(source), seconds, device)


def link_bytes(device: Device, nbytes: int, seconds: float) -> float:
    """Returns the bytes per second between pinned host memory and the device, each way, while copies run in both directions.

    Raises:
        OSError: the system cannot page-lock the host memory.
    """
    uploaded, downloaded = (device.host_empty(nbytes, pin=True)[:nbytes] for _ in range(2))
    target, source = (device.upload_target(nbytes) for _ in range(2))
    locked: list[Tensor] = []
    try:
        for memory in (uploaded, downloaded):
            memory.fill_(1)
            if not device.pin(memory):
                raise OSError(f"The system cannot page-lock {nbytes >> 20} MiB of host memory: raise `ulimit -l`.")
            locked.append(memory)

        def both() -> None:
            device.copy([target], [uploaded], Stream.UPLOAD)
            device.copy([downloaded], [source], Stream.DOWNLOAD)
            for stream in (Stream.UPLOAD, Stream.DOWNLOAD):
                device.synchronize(device.record(stream), Wait.CLOSE_AFTER_FETCH)

        with torch.no_grad():
            # Synchronous copies run one after the other, each in half of the time.
            return (2 if device.synchronous else 1) * nbytes / median_seconds(both, seconds, device)
    finally:
        for memory in locked:
            device.unpin(memory)


def adamw_seconds(count: int, seconds: float, *, fused: bool | None, dtype: torch.dtype = torch.float32) -> float:
    """Returns the seconds per parameter of AdamW on the host.

    Args:
        count: the number of parameters.
        seconds: the approximate time of the measurement.
        fused: as torch's ``AdamW(fused=…)``.
        dtype: the dtype of weights, gradients and state.
    """
    weight = nn.Parameter(torch.randn(count, device="cpu").to(dtype))
    weight.grad = torch.randn(count, device="cpu").to(dtype)
    step = torch.optim.AdamW([weight], fused=fused).step
    return median_seconds(step, seconds, Device(torch.device("cpu"))) / count


def disk_bytes(folder: Path, nbytes: int) -> float:
    """Returns the bytes per second with which a run writes mapped memory to a drive, or reads it back, whichever is slower.

    Raises:
        OSError: the folder can have no mapped file, or the drive failed.
    """
    with needed_for("--disk"):
        from sp_lightning.capabilities.disk.mapped_file import MappedFile
    file = MappedFile(folder)
    memory = file.allocate(nbytes, pin=False)
    memory.renew()
    memory.common.fill_(1)
    seconds = []
    for move in (file.leave, memory.use):
        begun = perf_counter()
        move()
        seconds.append(perf_counter() - begun)
    return nbytes / max(seconds)


def median_seconds(call: Callable[[], object], seconds: float, device: Device) -> float:
    """Returns the median seconds of a call and its work on the device.

    The call is repeated until ``seconds`` have passed, and at least three times.
    """

    def taken() -> float:
        begun = perf_counter()
        call()
        device.synchronize(device.record(Stream.COMPUTE), Wait.CLOSE_AFTER_FETCH)
        return perf_counter() - begun

    taken()  # compiles kernels and fills caches
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        times.append(taken())
    return statistics.median(times)
