"""The reference of ``activations="recompute"``: plain Lightning with torch's checkpoint around each unit."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from sp_lightning.capabilities.activations.policy import resolve
from sp_lightning.core.model.find import find_layers
from sp_lightning.tools.comparison.reference import add_checkpoints


def checkpointed(module: pl.LightningModule, choice: Any, layers: Any = None) -> pl.LightningModule:
    """Puts torch's checkpoint around the forward of each unit that ``activations=choice`` recomputes."""
    modes = resolve(choice, module, find_layers(module, layers=layers).units)
    add_checkpoints(module, [name for name, mode in modes.items() if mode == "recompute"])
    return module
