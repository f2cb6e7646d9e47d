"""What a run has reached, for ``plan --from``: how long its batches took, and with what."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sp_lightning.device.accelerator import name_of
from sp_lightning.device.device import Device
from sp_lightning.torch_compat.private import tree_leaves

_VERSIONS = ("sp_lightning", "torch", "lightning", "transformers")
_WARM_UP = 2  # optimizer steps, in which kernels and caches are made


class Reached:
    """The seconds of training batches, each from the end of the one before it, with its data, its step and its callbacks.

    Batches after validation, and those of the first two steps, do not count.
    """

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None  # when the last batch ended, and after how many optimizer steps
        # Of batches with an optimizer step, and of others.
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._shape: list[int] = []

    def batch_ended(self, now: float, batch: Any, step: int) -> None:
        """To be called at a batch's end, with the number of optimizer steps so far."""
        if self._last is not None and self._last[1] >= _WARM_UP:
            self._seconds[step > self._last[1]].append(now - self._last[0])
            self._shape = _shape_of(batch)
        self._last = now, step

    def interrupted(self) -> None:
        """What follows, such as validation, belongs to no batch."""
        self._last = None

    def as_dict(self, accumulate: int) -> dict[str, Any]:
        """Seconds of a batch on average and in the middle, how many, and the shape of the last one's first tensor; or nothing.

        Args:
            accumulate: one of so many batches has an optimizer step, however many of each kind were measured.
        """
        stepped, others = self._seconds[True], self._seconds[False]
        if not stepped or (accumulate > 1 and not others):
            return {}
        seconds = [statistics.fmean(stepped), statistics.median(stepped)]
        if accumulate > 1:
            ways = zip(seconds, (statistics.fmean(others), statistics.median(others)), strict=True)
            seconds = [(step + (accumulate - 1) * other) / accumulate for step, other in ways]
        return {
            "seconds": seconds[0], "median_seconds": seconds[1], "batches": len(stepped) + len(others), "shape": self._shape,
        }  # fmt: skip


def _shape_of(batch: Any) -> list[int]:
    """The shape of a batch's tokens, or of its first tensor with several numbers for each sample."""
    if isinstance(batch, Mapping) and isinstance(ids := batch.get("input_ids"), Tensor):
        return list(ids.shape)
    tensors = sorted((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), key=lambda leaf: leaf.ndim < 2)
    return list(tensors[0].shape) if tensors else []


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
