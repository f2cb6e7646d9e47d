"""What a module has beside parameters goes to the device as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sp_lightning.model.found import Found
from sp_lightning.trainer.compat import note_device


def move_to_device(module: nn.Module, found: Found, averages: Sequence[nn.Module], device: torch.device) -> None:
    """Moves buffers, metrics, and modules that keep their parameters to themselves.

    Args:
        module: the root.
        found: its layers; its parameters stay where they are.
        averages: modules whose buffers, and the modules in them, stay on the host.
        device: where the rest goes.
    """
    for _, aside in found.aside:
        aside.to(device)
    bare = {child for child in module.modules() if not any(True for _ in child.parameters())}
    stay = {inner for average in averages for inner in average.modules()}
    for child in module.modules():
        note_device(child, device)
        if child in stay:
            continue
        if child in bare and not stay.intersection(child.modules()):
            child.to(device)  # metrics have states that are no buffers
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.device != device:
                child._buffers[name] = buffer.to(device)
