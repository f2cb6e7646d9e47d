"""Workers of a data loader are forked after weights were page-locked: both sides must see the right bytes.

Where a kernel copies locked pages lazily, a parent that writes after the fork gets a new page, and the device goes on
reading the old one.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.support.models import Module, Stack
from tests.support.runs import LossRecorder, assert_equal, superpipeline, trainer_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class ReadsAWeight(Dataset[Tensor]):
    """Each batch holds the sum of a weight as its reader sees it."""

    def __init__(self, module: Any, workers: bool) -> None:
        self.weight = module.net.head.weight
        self.first = self.weight.detach().sum().item()
        self.workers = workers

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        # A worker has the weight as it was at the fork. Without workers it is what the steps so far have made of it.
        seen = self.weight.detach().sum().item() if self.workers else self.first
        return torch.randn(4, 512, generator=torch.Generator().manual_seed(index)) + seen


def run(workers: int, accelerator: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    pl.seed_everything(7, verbose=False)
    module, recorder = Module(Stack(width=512)), LossRecorder()
    data = DataLoader(
        ReadsAWeight(module, workers > 0),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    trainer_for(superpipeline(k=1), accelerator=accelerator, callbacks=[recorder]).fit(module, data)
    return recorder.losses, {name: value.cpu() for name, value in module.state_dict().items()}


def test_workers_and_device_see_the_right_weights() -> None:
    """The device reads what the optimizer writes after the fork; a worker reads what was there at the fork."""
    ours, expected = run(2, "gpu"), run(0, "gpu")
    assert_equal([each.cpu() for each in ours[0]], [each.cpu() for each in expected[0]], "losses")
    assert_equal(ours[1], expected[1], "state")
