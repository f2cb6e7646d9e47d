"""The strategy's options as one checked object, and the checks of the precision plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from lightning.fabric.plugins import BitsandbytesPrecision, TransformerEnginePrecision
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from sp_lightning import registry
from sp_lightning.core.model.patterns import LayerChoice
from sp_lightning.core.plan.choices import ActivationChoice, Count, Overlap, Place, Share
from sp_lightning.trainer import option_checks as checks
from sp_lightning.trainer.compat import is_a
from sp_lightning.trainer.host_memory import MACHINE, HostBudget
from sp_lightning.trainer.scaler import HostGradScaler


def _by(check: Callable[..., Any], *arguments: Any) -> dict[str, Callable[[Any], Any]]:
    """Returns the metadata of a field: the function that checks its value. ``arguments`` precede the value."""
    return {"check": partial(check, *arguments)}


@dataclass(frozen=True)
class Options:
    """The user's options. :class:`~sp_lightning.SuperpipelineStrategy` documents each of them.

    ``gpu_memory`` and ``host_memory`` are numbers of bytes, or shares of the free memory.
    """

    activations: ActivationChoice = field(metadata=_by(checks.checked_activations))
    k: Count = field(metadata=_by(checks.checked_count, "k"))
    k_prime: Count = field(metadata=_by(checks.checked_count, "k_prime"))
    gpu_memory: int | float | None = field(metadata=_by(checks.checked_budget, "gpu_memory"))
    layers: LayerChoice = field(metadata=_by(checks.checked_layers))
    keep_on_gpu: tuple[str, ...] = field(metadata=_by(checks.checked_patterns, "keep_on_gpu"))
    pin_memory: bool = field(metadata=_by(checks.checked_switch, "pin_memory"))
    optimizer_overlap: Overlap = field(metadata=_by(checks.checked_choice, "optimizer_overlap", get_args(Overlap)))
    optimizer_on: Place = field(metadata=_by(checks.checked_choice, "optimizer_on", get_args(Place)))
    gpu_layers: Share = field(metadata=_by(checks.checked_share, "gpu_layers"))
    save_frozen: bool = field(metadata=_by(checks.checked_switch, "save_frozen"))
    load_weights_from: Path | None = field(
        metadata=_by(checks.checked_path, "load_weights_from", "a file or a folder", "model")
    )
    disk: Path | None = field(metadata=_by(checks.checked_path, "disk", "a folder on a fast drive", "/scratch"))
    host_memory: int | float | None = field(metadata=_by(checks.checked_budget, "host_memory"))
    callback: bool = field(metadata=_by(checks.checked_switch, "callback"))

    @property
    def host_budget(self) -> HostBudget:
        """The limit of host memory. With a disk it is all free memory: the disk stores the data beyond ``host_memory``."""
        return MACHINE if self.host_memory is None or self.disk is not None else registry.host_budget(self.host_memory)

    def but(self, option: str, value: Any) -> Options:
        """Returns these options with another value of one of them, which is checked."""
        check = next(each.metadata["check"] for each in fields(self) if each.name == option)
        return replace(self, **{option: check(value)})

    @classmethod
    def checked(cls, **given: Any) -> Options:
        """Checks the arguments of the strategy and returns them as options.

        Raises:
            ValueError, TypeError: an option has a value that is not possible, or two options exclude each other.
            MissingCapabilityError: ``disk=`` is given, and its folder is missing.
        """
        options = cls(**{each.name: each.metadata["check"](given[each.name]) for each in fields(cls)})
        if options.disk is not None:
            registry.require_disk(f"disk={str(options.disk)!r}")
        if options.gpu_layers and options.disk is not None:
            raise ValueError(
                f"gpu_layers={options.gpu_layers} keeps optimizer state in GPU memory, and disk= keeps it on a disk. "
                "Use one of them."
            )
        return options


# ---------------------------------------------------------------------- precision plugins

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def prepare_precision(plugin: Precision | None) -> None:
    """Replaces the plugin's gradient scaler, which ``16-mixed`` has, by one for gradients on the host.

    Raises:
        ValueError: the plugin replaces layers by its own, whose weights cannot be streamed.
    """
    if is_a(plugin, TransformerEnginePrecision) or is_a(plugin, BitsandbytesPrecision):
        raise ValueError(
            f"superpipeline cannot work with {type(plugin).__name__}: it replaces layers by ones whose weights cannot "
            'be streamed. Use precision="bf16-mixed" or "bf16-true".'
        )
    # The exact class: a user's own scaler, for example of a subclass, may scale in another way, so it is not replaced.
    if is_a(plugin, MixedPrecision) and type(plugin.scaler) is torch.amp.GradScaler:
        plugin.scaler = HostGradScaler.like(plugin.scaler)


def autocast_dtype(plugin: Precision) -> torch.dtype | None:
    """Returns the dtype that autocast casts to; None without autocast."""
    return AUTOCAST.get(plugin.precision) if is_a(plugin, MixedPrecision) else None
