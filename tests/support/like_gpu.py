"""Modules and runs whose steps on the CPU are to have a GPU's bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.support.emulated_gpu import ALL, plain_gpu
from tests.support.models import Module, Stack
from tests.support.runs import Outcome, fit

BATCHES = [torch.linspace(-1, 1, 64).view(4, 16).roll(step, 1) for step in range(4)]
ON_GPU = "with the bits of its steps on this GPU"


class Stepped(Module):
    def __init__(self, make: Any, net: Any = Stack) -> None:
        super().__init__(net())
        self._make = make

    def configure_optimizers(self) -> Any:
        return self._make([p for p in self.parameters() if p.requires_grad])


OPTIMIZERS: dict[str, Any] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True),
    "Adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.1, amsgrad=True, maximize=True, betas=(0.4, 0.9)),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.1),
}


def plain(make: Any, usual: frozenset[str] = ALL, **options: Any) -> Outcome:
    """Nothing is recorded, because with hooks gradients do not stay in 16 bits."""
    with plain_gpu(usual):
        return fit(make, BATCHES, recorded="nothing", **options)


def said(outcome: Outcome) -> str:
    strategy: Any = outcome.trainer.strategy
    return str(strategy.plan)
