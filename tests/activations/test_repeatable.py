"""What forwards find that run twice, and what graphs keep of them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.kernels import Block
from tests.support.models import Module, twice, vectors
from tests.support.runs import assert_same, fit, superpipeline

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")


class Remembers(Block):
    """Keeps a tensor with its graph, which nobody goes backward through."""

    def factor(self, x: Tensor) -> float:
        self.last = self.inner(x) * 2
        return 1.0


@pytest.mark.long("graphs are looked for in all memory")
def test_no_graph_keeps_that_of_the_batch_before() -> None:
    alive: list[int] = []
    seen: weakref.WeakSet[Tensor] = weakref.WeakSet()

    class Counts(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.update(block.last for block in pl_module.net.blocks)
            gc.collect()
            alive.append(len(seen))

    fit(twice(Remembers), vectors(6), superpipeline(activations="offload"), callbacks=[Counts()], recorded="losses")
    assert alive[-1] <= alive[1]


class TakesNumbers(nn.Module):
    """Takes a number, and no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, rows: int) -> Tensor:
        return nn.functional.dropout(self.inner.weight[:rows])


class OfNumbers(Module):
    def loss(self, batch: Any) -> Tensor:
        return torch.cat([block(len(batch)) for block in self.net]).square().sum()  # type: ignore[attr-defined]


def test_torchs_checkpoint_hears_which_device_draws_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It restores the random states of the devices of its arguments."""
    seen: list[list[torch.device]] = []

    def noted(call: Any, *args: Any, **options: Any) -> Any:
        seen.append([each.device for each in args if isinstance(each, Tensor)])
        return checkpoint(call, *args, **options)

    monkeypatch.setattr("sp_lightning.capabilities.activations.recompute.checkpoint", noted)

    def make() -> Module:
        return OfNumbers(nn.ModuleList(TakesNumbers() for _ in range(4)))

    assert_same(fit(make, vectors(1), superpipeline(k=1, activations="recompute")), fit(make, vectors(1)))
    assert seen == [[torch.device("cpu")]] * 4
