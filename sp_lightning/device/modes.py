"""Contexts in which the engine runs operators of its own, outside of the modes that the user's code is in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sp_lightning.device.torch_private import count_dispatch_modes, disable_dispatch_modes

_NOTHING: AbstractContextManager[None] = nullcontext()  # it may be entered again and again


def no_inference_mode() -> AbstractContextManager[None]:
    """Leaves inference mode, whose tensors cannot be saved for a backward. Outside of inference mode it does nothing."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING


def no_dispatch_modes() -> AbstractContextManager[Any]:
    """Hides operators from dispatch modes (selective checkpoints, counters of FLOPs), which are to see the model's alone."""
    return disable_dispatch_modes() if count_dispatch_modes() else _NOTHING
