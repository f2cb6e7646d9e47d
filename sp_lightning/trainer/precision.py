"""Precision plugins: which of them cannot be, and what the others say."""

from __future__ import annotations

import torch
from lightning.pytorch.plugins.precision import (
    BitsandbytesPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
)

from sp_lightning.optim.scaler import HostGradScaler
from sp_lightning.trainer.compat import is_a

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def prepare(plugin: Precision | None) -> None:
    """Gives the plugin of ``16-mixed`` a gradient scaler for gradients on the host.

    Raises:
        ValueError: the plugin replaces layers, and the weights of its own cannot be streamed.
    """
    if is_a(plugin, TransformerEnginePrecision) or is_a(plugin, BitsandbytesPrecision):
        raise ValueError(
            f"superpipeline cannot work with {type(plugin).__name__}: it replaces layers by ones whose weights cannot "
            'be streamed. Use precision="bf16-mixed" or "bf16-true".'
        )
    if is_a(plugin, MixedPrecision) and type(plugin.scaler) is torch.amp.GradScaler:
        plugin.scaler = HostGradScaler.like(plugin.scaler)


def autocast_dtype(plugin: Precision) -> torch.dtype | None:
    """Returns the dtype that autocast casts to; None without autocast."""
    return _AUTOCAST.get(plugin.precision) if is_a(plugin, MixedPrecision) else None
