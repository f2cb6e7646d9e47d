"""Several processes, of which one fails: everybody ends soon, with the first one's own error, and nothing is left."""

from __future__ import annotations

import os
import signal
from time import monotonic, sleep
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sp_lightning import SuperpipelineStrategy
from tests.support.ranks import rank, start

SECONDS = 10
"""How long the others may take to end."""


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def training_step(self, batch: Any, index: int) -> Any:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Fails(Callback):
    """Does something on one rank in the second batch, at one of Lightning's hooks."""

    def __init__(self, who: int, where: str, how: str) -> None:
        self.who, self.how = who, how
        setattr(self, where, self._hook)

    def _hook(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step < 1 or rank() != self.who:
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "leave":
            os._exit(3)
        raise {"raise": ValueError, "memory": torch.OutOfMemoryError}[self.how]("what the user's code says")


def train(who: int, where: str, how: str, folder: str) -> None:
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=SuperpipelineStrategy(), max_epochs=2, logger=False,
        callbacks=[Fails(who, where, how)], enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(32, 16)), batch_size=4))


WHERE = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


@pytest.mark.parametrize("how", ["raise", "kill", "leave", "memory"])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("who", [0, 1])
def test_everybody_ends_with_the_first_error(who: int, where: str, how: str, tmp_path: Any) -> None:
    started = start(2, train, who, where, how, str(tmp_path))
    began = monotonic()
    errors = [error for error, _ in started.outcomes()]
    took = monotonic() - began
    other = errors[1 - who]
    assert other is not None
    assert "RankError" in other
    if how in ("raise", "memory"):
        assert "what the user's code says" in str(errors[who])
        assert "what the user's code says" in other
    else:
        assert "has ended" in other or "has lost" in other
    assert took < SECONDS + 8, f"it took {took:.0f} seconds, with the start"
    assert not shared_memory(), "memory is left"


def shared_memory() -> list[str]:
    """Shared memory of ours that this machine's processes have mapped."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/maps") as maps:
                found += [line for line in maps if "memfd:superpipeline" in line]
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue
    sleep(0)
    return found
