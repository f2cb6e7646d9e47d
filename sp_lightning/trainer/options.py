"""The strategy's options, checked, as one object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sp_lightning.model.patterns import LayerChoice
from sp_lightning.plan.activation_policy import Activations
from sp_lightning.plan.options import (
    Count,
    Fused,
    Overlap,
    Transfer,
    checked_activations,
    checked_budget,
    checked_count,
    checked_fused,
    checked_layers,
    checked_overlap,
    checked_path,
    checked_patterns,
    checked_switch,
    checked_transfer,
)

_CHECKS: dict[str, Callable[[Any], Any]] = {
    "activations": checked_activations,
    "k": partial(checked_count, "k"),
    "k_prime": partial(checked_count, "k_prime"),
    "memory_budget": partial(checked_budget, "memory_budget"),
    "layers": checked_layers,
    "resident": partial(checked_patterns, "resident"),
    "pin_memory": partial(checked_switch, "pin_memory"),
    "fused_optimizer": checked_fused,
    "optimizer_overlap": checked_overlap,
    "transfer": checked_transfer,
    "save_frozen": partial(checked_switch, "save_frozen"),
    "save_distributed_checkpoint": partial(checked_switch, "save_distributed_checkpoint"),
    "check_writes": partial(checked_switch, "check_writes"),
    "weights": partial(checked_path, "weights", "a file or a folder", "model"),
    "disk": partial(checked_path, "disk", "a folder on a fast drive", "/scratch"),
    "host_memory": partial(checked_budget, "host_memory"),
    "callback": partial(checked_switch, "callback"),
}


@dataclass(frozen=True)
class Options:
    """What a user has chosen. :class:`~sp_lightning.SuperpipelineStrategy` documents each option.

    ``memory_budget`` and ``host_memory`` are numbers of bytes here, or shares of the free memory.
    """

    activations: Activations
    k: Count
    k_prime: Count
    memory_budget: int | float | None
    layers: LayerChoice
    resident: tuple[str, ...]
    pin_memory: bool
    fused_optimizer: Fused
    optimizer_overlap: Overlap
    transfer: Transfer
    save_frozen: bool
    save_distributed_checkpoint: bool
    check_writes: bool
    weights: Path | None
    disk: Path | None
    host_memory: int | float | None
    callback: bool

    @classmethod
    def checked(cls, **given: Any) -> Options:
        """Returns the options as the strategy was given them.

        Raises:
            ValueError, TypeError: an option that cannot be, or two that exclude each other.
        """
        options = cls(**{name: check(given[name]) for name, check in _CHECKS.items()})
        if options.check_writes and options.optimizer_overlap == "backward":
            raise ValueError(
                'check_writes=True compares weights over a backward; optimizer_overlap="backward" updates them in it. Use '
                'optimizer_overlap="off" while you look.'
            )
        if options.host_memory is not None and options.disk is None:
            raise ValueError(
                "host_memory= says how much host memory to take before a disk is used, and there is none. Name a folder on "
                'a fast drive, too: SuperpipelineStrategy(disk="/scratch", host_memory=…).'
            )
        if options.save_distributed_checkpoint and options.disk is not None:
            raise ValueError(
                "With disk= rank 0 writes checkpoints, to a file and tensor by tensor. Leave "
                "save_distributed_checkpoint out."
            )
        return options
