"""A checkpoint with its optimizer's state: one file, and a folder that all ranks write, beside what the disk takes.

From the root of the repository::

    python -m examples.benchmarks.checkpoints --folder /scratch --devices 1
    python -m examples.benchmarks.checkpoints --folder /scratch --devices 2
    python -m examples.benchmarks.checkpoints --folder /scratch --devices 2 --resume

Each kind is a run of its own, and so is what resumes, of which each rank's peak memory is said. Seconds are from the call to its
return, files on the disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineStrategy
from sp_lightning.plan.units import human_bytes

WIDTH = 2048


class Net(pl.LightningModule):
    """Linear layers, which are ready at once."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


class Saves(pl.Callback):
    """Saves after the only batch, as often as it is told."""

    def __init__(self, file: Path, times: int) -> None:
        self.file = file
        self.times = times
        self.seconds: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        for _number in range(self.times):
            if trainer.is_global_zero:
                _remove(self.file)
            trainer.strategy.barrier()
            begun = time.perf_counter()
            trainer.save_checkpoint(self.file)
            self.seconds.append(time.perf_counter() - begun)


def size_of(path: Path) -> int:
    """Bytes of a file, or of a folder's files."""
    return sum(each.stat().st_size for each in path.iterdir()) if path.is_dir() else path.stat().st_size


def disk_seconds(file: Path, nbytes: int) -> float:
    """What a plain write takes, with unbuffered calls from memory that is there."""
    memory = memoryview(bytearray(2**26))
    begun = time.perf_counter()
    with file.open("wb", buffering=0) as stream:
        for _ in range(nbytes // len(memory)):
            stream.write(memory)
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - begun
    file.unlink()
    return seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Measure; ``argv`` as on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks"), help="on the disk (%(default)s)")
    parser.add_argument("--layers", type=int, default=32, help="of 4.2 M parameters each (%(default)s)")
    parser.add_argument("--devices", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--times", type=int, default=3, help="that each is written (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="resume from each, and say the peak memory of each rank")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=("file", "folder"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.kind is None:  # each in processes of its own
        print(f"torch {torch.__version__}, {options.devices} devices on the CPU, {os.cpu_count()} cores")
        for kind in ("file", "folder"):
            arguments = sys.argv[1:] if argv is None else list(argv)
            command = [sys.executable, "-m", "examples.benchmarks.checkpoints", *arguments, "--kind", kind]
            subprocess.run(command, check=True)
            if options.resume:
                file = options.folder / f"checkpoint-{kind}"
                subprocess.run([*command, "--load", str(file)], check=True)
                _remove(file)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / f"checkpoint-{options.kind}"
    saves = Saves(file, options.times)
    strategy = SuperpipelineStrategy(k=1, save_distributed_checkpoint=options.kind == "folder")
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=options.devices, max_epochs=2 if options.load else 1, logger=False,
        callbacks=[] if options.load else [saves], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    data: Any = [torch.ones(WIDTH)] * options.devices
    trainer.fit(Net(options.layers), DataLoader(data), ckpt_path=options.load)
    if options.load:
        peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        mebibytes = int(peak.split()[1]) / 1024
        print(f"resumed from a {options.kind}: rank {trainer.global_rank} {mebibytes:,.0f} MiB", flush=True)
        return
    if trainer.is_global_zero:
        nbytes = size_of(file)
        if not options.resume:
            _remove(file)
        limit = statistics.median(disk_seconds(options.folder / "plain", nbytes) for _ in range(options.times))
        seconds = statistics.median(saves.seconds)
        each = ", ".join(f"{one:.2f}" for one in saves.seconds)
        print(
            f"{options.kind:<7} {human_bytes(nbytes):>9}  {seconds:6.2f} s ({each})  {nbytes / seconds / 1e9:5.2f} GB/s   "
            f"a plain write: {limit:.2f} s, {nbytes / limit / 1e9:.2f} GB/s",
            flush=True,
        )


def _remove(file: Path) -> None:
    if file.is_dir():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
