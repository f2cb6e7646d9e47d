"""The machine and the date of a measurement."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sp_lightning.core.device.accelerator import name_of
from sp_lightning.core.device.device import Device

_VERSIONS = ("sp_lightning", "torch", "lightning", "transformers")


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
