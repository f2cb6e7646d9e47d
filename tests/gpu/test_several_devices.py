"""Several GPUs of one node over NCCL. The script runs on CPUs as well, in a test of the third tier."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch


def compare(folder: Path, accelerator: str, devices: int) -> None:
    """Trains with whole and with sliced uploads, each in processes of its own, and compares the weights of each rank."""
    for transfer in ("full", "sharded"):
        command = [sys.executable, "-m", "tests.gpu.several", str(folder), transfer, accelerator, str(devices)]
        subprocess.run(command, check=True, timeout=300)
    for rank in range(devices):
        whole, sliced = (torch.load(folder / f"{each}-{rank}.pt") for each in ("full", "sharded"))
        assert sliced["gathered"] > 0
        assert whole["gathered"] == 0
        assert all(torch.equal(sliced["state"][name], value) for name, value in whole["state"].items())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_sliced_uploads_give_the_same_weights(tmp_path: Path) -> None:
    compare(tmp_path, "gpu", torch.cuda.device_count())


@pytest.mark.long("four processes that start from nothing")
def test_the_script_itself_on_cpus(tmp_path: Path) -> None:
    compare(tmp_path, "cpu", 2)
