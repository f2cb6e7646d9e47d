"""Leaving the modes of the user's code while the engine runs operators of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sp_lightning.device.torch_private import count_dispatch_modes, disable_dispatch_modes


def no_inference_mode() -> AbstractContextManager[None]:
    """Outside inference mode, whose tensors could not be saved for a later backward. Costs nothing where that is so."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def no_dispatch_modes() -> AbstractContextManager[Any]:
    """The engine's operators are none of the model's: dispatch modes (selective checkpoints, counters) do not see them."""
    return disable_dispatch_modes() if count_dispatch_modes() else nullcontext()
