"""What a run has reached, for ``plan --from``: how long its batches took, and with what."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sp_lightning.device.accelerator import name_of
from sp_lightning.device.device import Device
from sp_lightning.device.torch_private import tree_leaves

_VERSIONS = ("sp_lightning", "torch", "lightning", "transformers")
_WARM_UP = 2  # optimizer steps, in which kernels and caches are made


class Reached:
    """The seconds of training batches, each from the end of the one before it, with its data, its step and its callbacks.

    Batches after validation, and those of the first two steps, do not count.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._seconds: list[float] = []
        self._shape: list[int] = []

    def batch_ended(self, now: float, batch: Any, step: int) -> None:
        """To be called at a batch's end, with the number of optimizer steps so far."""
        if self._last is not None and step > _WARM_UP:
            self._seconds.append(now - self._last)
            tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
            self._shape = list(tensors[0].shape) if tensors else []
        self._last = now

    def interrupted(self) -> None:
        """What follows, such as validation, belongs to no batch."""
        self._last = None

    def as_dict(self) -> dict[str, Any]:
        """Seconds of a batch on average and in the middle, how many, and the shape of the last one's first tensor; or nothing."""
        if not self._seconds:
            return {}
        return {
            "seconds": statistics.fmean(self._seconds),
            "median_seconds": statistics.median(self._seconds),
            "batches": len(self._seconds),
            "shape": self._shape,
        }


def machine_of(device: Device) -> dict[str, Any]:
    """What figures depend on: accelerator, processor, and versions."""
    found = {}
    for name in _VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "accelerator": name_of(device),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": found,
    }


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def today() -> str:
    """The time, as ISO 8601 has it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
