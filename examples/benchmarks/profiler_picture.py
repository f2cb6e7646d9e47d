"""A picture of the ranges in torch's profiler: the third batch of a small training on the CPU, one row for each thread.

``python -m examples.benchmarks.profiler_picture profiler.png``
"""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from matplotlib import pyplot
from torch import nn
from torch.profiler import _ExperimentalConfig, profile

from sp_lightning import SuperpipelineStrategy

COLOURS = {"upload": "#0b6e99", "gradient offloading": "#7a4fa3", "optimizer step": "#3f8f4f"}


class Stack(pl.LightningModule):
    """Four blocks, trained with AdamW. The third batch is profiled, with the forward of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4)))
        self.profiler = profile(experimental_config=_ExperimentalConfig(profile_all_threads=True))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if index == 2:
            self.profiler.start()
        loss: torch.Tensor = self.blocks(batch).square().mean()
        if index == 3:
            self.profiler.stop()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    module, strategy = Stack(), SuperpipelineStrategy(k=2, optimizer_overlap="forward")
    batches: Any = torch.utils.data.DataLoader(torch.randn(4, 64, 1024), batch_size=None)  # type: ignore[arg-type]
    pl.Trainer(strategy=strategy, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False).fit(
        module, batches
    )
    figure, axes = pyplot.subplots(figsize=(11, 3), layout="constrained")
    ranges = [
        (*each.name.split(": "), each) for each in module.profiler.events() if each.name.split(": ")[0] in COLOURS
    ]
    begin = min(each.time_range.start for _, _, each in ranges)
    for kind, layer, each in ranges:
        row, left = kind == "optimizer step", (each.time_range.start - begin) / 1000
        axes.barh(row, each.time_range.elapsed_us() / 1000, left=left, color=COLOURS[kind], height=0.5)
        axes.text(left, row + 0.3, layer.removeprefix("blocks."), fontsize=7)
    for kind, colour in COLOURS.items():
        axes.barh(0, 0, color=colour, label=kind)
    axes.set(yticks=(0, 1), yticklabels=("main thread", "background thread"), ylim=(-0.5, 1.6), xlabel="ms")
    figure.legend(loc="outside right", frameon=False)
    figure.savefig(sys.argv[1], dpi=100)
