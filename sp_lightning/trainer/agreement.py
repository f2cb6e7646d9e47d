"""What must be the same on all ranks, compared before work begins. Otherwise they would wait for each other, or part."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sp_lightning.device.ranks import Ranks
from sp_lightning.trainer.options import Options


def compare_models(ranks: Ranks, module: nn.Module, options: Options) -> None:
    """Compares modules, options and versions. Collective.

    Raises:
        ValueError: some rank has others than rank 0.
    """
    parameters = {name: f"{_shape(p)}{'' if p.requires_grad else ', frozen'}" for name, p in module.named_parameters()}
    remedy = (
        "Build the same module in every process: what it depends on (arguments, files) must not depend on the rank."
    )
    ranks.must_agree("parameters", parameters, remedy)
    buffers = {name: _shape(buffer) for name, buffer in module.named_buffers()}
    ranks.must_agree("buffers", buffers, remedy)
    chosen = {name: _said(value) for name, value in vars(options).items()}
    ranks.must_agree("options", chosen, "Make the strategy with the same options in every process.")
    kernels = {"torch": torch.__version__, "CPU capability": torch.backends.cpu.get_cpu_capability()}
    ranks.must_agree("kernels", kernels, "Use the same versions and the same kind of CPU for all processes.")


def compare_batches(ranks: Ranks, trainer: Any) -> None:
    """Compares how many batches the ranks will train and validate on. Collective.

    Raises:
        ValueError: some rank has fewer or more than rank 0.
    """
    counts = {"training": trainer.num_training_batches, "validation": tuple(trainer.num_val_batches)}
    ranks.must_agree(
        "numbers of batches",
        {f"{name} batches": count for name, count in counts.items()},
        "Give every rank the same number of batches: with use_distributed_sampler=True Lightning does so for data sets that have "
        "a length; otherwise cut them (limit_train_batches, drop_last=True).",
    )


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _said(value: Any) -> str:
    return type(value).__name__ if callable(value) else repr(value)
