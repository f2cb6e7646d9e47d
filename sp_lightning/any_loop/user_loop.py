"""The facts about a loop that the user has written: they stand in for a Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.optim import Optimizer


class UserLoop:
    """The attributes of a Trainer that a :class:`~sp_lightning.trainer.run.Run` reads, for a loop without a Trainer.

    The loop's code may read and write weights and gradients at any time, as in Lightning's manual optimization.

    Args:
        module: the root.
        optimizers: the optimizers that the loop steps.
        device: the device on which layers compute.
        only_steps_write: True if the user promises that only optimizers' steps write weights between two training steps.
    """

    gradient_clip_val = gradient_clip_algorithm = datamodule = None
    accumulate_grad_batches = 1
    global_step = 0
    callbacks: Sequence[Any] = ()
    checkpoint_callbacks: Sequence[Any] = ()
    fit_loop = SimpleNamespace(_skip_backward=False)

    def __init__(
        self, module: nn.Module, optimizers: Sequence[Optimizer], device: torch.device, *, only_steps_write: bool
    ) -> None:
        self.lightning_module = SimpleNamespace(automatic_optimization=False, parameters=module.parameters)
        self.optimizers = list(optimizers)
        self.strategy = SimpleNamespace(root_device=device)
        self.precision_plugin = Precision()
        self.only_steps_write = only_steps_write

    def code_at(self, point: str) -> list[str]:
        """Returns a name for the code that may run at a point of :data:`~sp_lightning.trainer.user_hooks._HOOKS`.

        Code between forward and backward belongs to the step, as in manual optimization: it finds device parameters.
        """
        absent = {"zero_grad", "train"} if self.only_steps_write else {"zero_grad"}
        return [] if point in absent else ["your loop"]

    def refuse_other(self, optimizer: Optimizer) -> None:
        """Called when an optimizer steps weights of the module. Raises a RuntimeError if the stream was not given it."""
        if not any(optimizer is each for each in self.optimizers):
            raise RuntimeError(
                f"{type(optimizer).__name__} steps weights of a stream, and was not given to it. Expected all optimizers of "
                "these weights: sp_lightning.stream(model, [optimizer, other])."
            )
