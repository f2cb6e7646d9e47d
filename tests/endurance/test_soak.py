"""A long training with validation and checkpoints leaves nothing behind, step after step.

``python -m tests.endurance.test_soak`` (or ``pytest -m long``) runs two thousand steps and prints a row of
``examples/results/README.md``.
"""

from __future__ import annotations

import gc
import logging
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from sp_lightning import SuperpipelineStrategy
from tests.support.models import Module, Stack, vectors
from tests.support.repository import result_row
from tests.support.runs import loader, trainer_for

Counts = dict[str, int]


class Watch(Callback):
    """Counts what a process holds, every so many steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.counts: list[Counts] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % self.every:
            return
        for parameter in pl_module.parameters():
            parameter.detach().sum()  # a read waits for an update in the background, which holds tensors of its own
        gc.collect()
        process = psutil.Process()
        self.counts.append(
            {
                "resident bytes": process.memory_info().rss,
                "device bytes": trainer.strategy.stats().peak_device_bytes,
                "threads": threading.active_count(),
                "open files": process.num_fds(),
                "tensors": sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
                "objects": len(gc.get_objects()),
            }
        )


def soak(steps: int, folder: Path, **options: Any) -> list[Counts]:
    """Ten counts of a training that validates and saves ten times."""
    every = steps // 10
    watch = Watch(every)
    saver = ModelCheckpoint(folder, save_last=True, every_n_train_steps=every)
    trainer = trainer_for(
        SuperpipelineStrategy(k=1, **options), max_steps=steps, max_epochs=-1, callbacks=[watch, saver],
        enable_checkpointing=True, val_check_interval=every, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Module(Stack(width=16)), loader(vectors(1) * steps), loader(vectors(2)))
    return watch.counts


def growth(counts: list[Counts]) -> dict[str, float]:
    """From the third of the ten counts to the last."""
    return {name: counts[-1][name] - counts[2][name] for name in counts[0]}


WAYS: dict[str, dict[str, Any]] = {
    "updates in the step": {},
    "updates under forward": {"optimizer_overlap": "forward"},
    "updates under backward": {"optimizer_overlap": "backward"},
    "activations recomputed": {"activations": "recompute"},
}


@pytest.mark.long("hundreds of steps")
def test_nothing_grows(tmp_path: Path) -> None:
    """Memory is left to the long run: what the allocator holds is no matter of so few steps."""
    counts = soak(200, tmp_path, optimizer_overlap="forward", activations="recompute")
    found = growth(counts)
    assert found["threads"] == found["open files"] == found["device bytes"] == found["tensors"] == 0
    objects = [each["objects"] for each in counts]
    assert min(objects[-3:]) <= max(objects[2:5])  # one that leaked at each step would be more than comes and goes


@pytest.mark.hours("two thousand steps, in four ways")
@pytest.mark.timeout(3600)
def test_two_thousand_steps() -> None:
    """Printed: what the process holds at the end of each way, and by how much that has grown since step 600."""
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    ways = []
    for way, options in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            counts = soak(2000, Path(folder), **options)
        grown = growth(counts)
        assert grown["threads"] == grown["open files"] == grown["device bytes"] == 0
        assert grown["resident bytes"] < 2**20
        ways.append(f"{way}: " + ", ".join(f"{name} {counts[-1][name]:,} ({grown[name]:+,})" for name in counts[0]))
    print(result_row("Two thousand steps", "; ".join(ways), "python -m tests.endurance.test_soak"))


if __name__ == "__main__":
    test_two_thousand_steps()
