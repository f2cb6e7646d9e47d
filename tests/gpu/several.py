"""Trains a model on several devices and saves its weights.

Usage: ``python -m tests.gpu.several FOLDER STRATEGY ACCELERATOR DEVICES``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineStrategy, rank_order_hook


class Net(pl.LightningModule):
    """Ranks leave out different layers in every third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(12))

    def training_step(self, batch: Any, index: int) -> Any:
        x = batch
        for number, layer in enumerate(self.layers):
            if index % 3 or number % (2 + self.global_rank):
                x = layer(x).relu()
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


STRATEGIES = {
    "ddp": lambda: DDPStrategy(find_unused_parameters=True, ddp_comm_hook=rank_order_hook),
    "superpipeline": lambda: SuperpipelineStrategy(k=2),
}


def main(folder: Path, strategy: str, accelerator: str, devices: int) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        strategy=STRATEGIES[strategy](), accelerator=accelerator, devices=devices, max_epochs=1, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    module = Net()
    trainer.fit(module, DataLoader(torch.randn(48 * devices, 256), batch_size=4))
    state = {name: value.cpu() for name, value in module.state_dict().items()}
    torch.save(state, folder / f"{strategy}-{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
