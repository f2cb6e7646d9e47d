"""Several GPUs of one node over NCCL. The script runs on CPUs as well, in a test of the third tier."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch


def compare(folder: Path, accelerator: str, devices: int) -> None:
    """Trains with this strategy and with ``ddp``, each in processes of its own, and compares the weights of each rank."""
    for strategy in ("superpipeline", "ddp"):
        command = [sys.executable, "-m", "tests.gpu.several", str(folder), strategy, accelerator, str(devices)]
        subprocess.run(command, check=True, timeout=300)
    for rank in range(devices):
        ours, plain = (torch.load(folder / f"{each}-{rank}.pt") for each in ("superpipeline", "ddp"))
        # On GPUs one optimizer steps on the CPU, the other on the GPU. In each of 12 steps AdamW moves a weight by up to 1e-3.
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-3 if accelerator == "gpu" else 0)


@pytest.mark.gpu("processes over NCCL")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_several_gpus_give_the_weights_of_ddp(tmp_path: Path) -> None:
    compare(tmp_path, "gpu", torch.cuda.device_count())


@pytest.mark.long("four processes that start from nothing")
def test_the_script_itself_on_cpus(tmp_path: Path) -> None:
    compare(tmp_path, "cpu", 2)
