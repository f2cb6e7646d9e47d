"""Measures the speed of a run for its report: the time of its batches, and the machine that it ran on."""

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

from sp_lightning.core.device.accelerator import name_of
from sp_lightning.core.device.device import Device
from sp_lightning.core.torch_compat.private import tree_leaves

_VERSIONS = ("sp_lightning", "torch", "lightning", "transformers")
_WARM_UP = 2  # optimizer steps, during which kernels are compiled and caches filled


class Reached:
    """The seconds of training batches. Each is counted from the end of the previous batch: data loading, step and callbacks.

    The first batch after validation, and the batches of a run's first two optimizer steps, do not count.
    """

    def __init__(self) -> None:
        self._begun = 0  # the number of optimizer steps before the run: above 0 if it was resumed
        self._last: tuple[float, int] | None = None  # the end of the last batch, and the number of optimizer steps then
        self._seconds: dict[bool, list[float]] = {True: [], False: []}  # by whether the batch had an optimizer step
        self._shape: list[int] = []

    def begins(self, step: int) -> None:
        """Tells that the run begins, after ``step`` optimizer steps of earlier runs."""
        self._begun = step

    def batch_ended(self, now: float, batch: Any, step: int) -> None:
        """Records a batch. Called at its end, with the number of optimizer steps so far."""
        if self._last is not None and self._last[1] - self._begun >= _WARM_UP:
            self._seconds[step > self._last[1]].append(now - self._last[0])
            self._shape = _shape_of(batch)
        self._last = now, step

    def interrupted(self) -> None:
        """Does not count the time until the end of the next batch, for example because validation runs."""
        self._last = None

    def as_dict(self, accumulate: int) -> dict[str, Any]:
        """Returns the mean and median seconds of a batch, the number of batches, and the last batch's shape.

        Empty if no counted batch had an optimizer step, or if ``accumulate`` is above 1 and each counted batch had one.

        Args:
            accumulate: batches per optimizer step: the weight of batches without a step against those with one.
        """
        stepped, others = self._seconds[True], self._seconds[False]
        if not stepped or (accumulate > 1 and not others):
            return {}
        seconds = [statistics.fmean(stepped), statistics.median(stepped)]
        if accumulate > 1:
            pairs = zip(seconds, (statistics.fmean(others), statistics.median(others)), strict=True)
            seconds = [(step + (accumulate - 1) * other) / accumulate for step, other in pairs]
        return {
            "seconds": seconds[0], "median_seconds": seconds[1], "batches": len(stepped) + len(others), "shape": self._shape,
        }  # fmt: skip


def _shape_of(batch: Any) -> list[int]:
    """Returns the shape of a batch's ``input_ids``. Without them, the shape of one of its tensors; empty if it has no tensors.

    This is the first tensor with more than one dimension. If there is none, it is the first tensor.
    """
    if isinstance(batch, Mapping) and isinstance(ids := batch.get("input_ids"), Tensor):
        return list(ids.shape)
    tensors = sorted((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), key=lambda leaf: leaf.ndim < 2)
    return list(tensors[0].shape) if tensors else []


def machine_of(device: Device) -> dict[str, Any]:
    """Returns the properties of the machine that speed depends on: accelerator, processor and versions."""
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
    """Returns the processor's name, or the machine type if the system has no ``/proc/cpuinfo`` with a model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def today() -> str:
    """Returns the current time in UTC, in ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
