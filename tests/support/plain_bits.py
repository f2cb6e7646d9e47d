"""Optimizers, batches and options of runs on a GPU beside the unchanged program."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.support.models import Module, Stack

GPU: dict[str, Any] = {"accelerator": "gpu", "recorded": "nothing"}
BATCHES = [torch.linspace(-1, 1, 64).view(4, 16).roll(step, 1) for step in range(6)]
OPTIMIZERS: dict[str, Any] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "AdamW, amsgrad, maximised": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True, maximize=True),
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "AdamW, far": partial(torch.optim.AdamW, lr=1e-2, betas=(0.3, 0.9)),
    "Adam, decay": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    "Adam, decay, fused": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1, fused=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
    "SGD, momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "SGD, nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.1),
}

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulated, clipped": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
}


class Stepped(Module):
    def __init__(self, make: Any) -> None:
        super().__init__(Stack())
        self._make = make

    def configure_optimizers(self) -> Any:
        return self._make(self.parameters())
