"""What the optimizer's side of a step needs, now that parameters and gradients are on the host."""

from __future__ import annotations

import torch
from torch import Tensor


class HostGradScaler(torch.amp.GradScaler):
    """A ``GradScaler`` for gradients on the host.

    torch's copies the scale to the CPU without blocking, and the CPU kernel may read it before it has come. Here the
    copies block; everything else, and what is checkpointed, is torch's.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return super()._unscale_grads_(optimizer, inv_scale.cpu(), found_inf.cpu(), allow_fp16)
