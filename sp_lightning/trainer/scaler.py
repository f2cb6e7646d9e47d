"""The gradient scaler of ``16-mixed`` for gradients on the host.

A *narrow* gradient is stored in a lower dtype than its weight (float16, in which backward computed it, for a float32 weight).
The optimizer's step widens it. See ``weights.gradient_roles``.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.core.torch_compat.private import scaler_device
from sp_lightning.core.weights.gradient_roles import Factor, change, is_narrow, stored, unwidened, widen_if_changed

Found = dict[torch.device, Tensor]
"""For each device with gradients, a tensor: 1.0 if some of them are infinite or NaN, otherwise 0.0. torch's ``found_inf``."""


class HostGradScaler(torch.amp.GradScaler):
    """A ``GradScaler`` for gradients on the host.

    torch's scaler copies the scale to the CPU without blocking, and so does torch for a fused optimizer, with the scale and the
    number of infinities. So the CPU kernel may read them before they have arrived. Here these numbers are on the CPU already,
    copied by calls that block. Narrow gradients stay narrow: this class searches them for infinities and NaN, and the update
    divides them by the scale. Everything else is torch's code, including checkpoints.
    """

    @classmethod
    def like(cls, scaler: torch.amp.GradScaler) -> HostGradScaler:
        """Returns a scaler that replaces one of torch's, with the same state."""
        host = cls(device=scaler_device(scaler), enabled=scaler.is_enabled())
        host.load_state_dict(scaler.state_dict())
        return host

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> Found:
        # torch's method of this name, which its ``unscale_`` and ``step`` call.
        # It unscales all gradients of an optimizer: torch's code unscales wide gradients, and this method narrow gradients.
        inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        unscale = Factor(inv_scale)
        narrow: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for parameter in [p for group in optimizer.param_groups for p in group["params"] if stored(p) is not None]:
            widen_if_changed(parameter)  # a narrow gradient with changes of an earlier step
            (narrow if is_narrow(parameter) else others).append(parameter)
        only_others: Any = SimpleNamespace(param_groups=[{"params": others}])  # torch reads only an optimizer's groups
        found = super()._unscale_grads_(only_others, inv_scale, found_inf, allow_fp16)
        if narrow:
            infinite = found.setdefault(torch.device("cpu"), found_inf)
            # As in torch, gradients are searched before they are multiplied.
            if not _are_finite([unwidened(stored(parameter)) for parameter in narrow]):
                infinite.fill_(1.0)
            for parameter in narrow:
                is_recorded = change(parameter, unscale)  # the update will multiply the gradient by this factor
                if not is_recorded and parameter.grad is not None:
                    unscale(parameter.grad)  # another thread has read the gradient meanwhile, which has widened it
        return {device: number.cpu() for device, number in found.items()}

    def _get_scale_async(self) -> Tensor | None:
        # torch's method of this name, whose result ``step`` gives to a fused optimizer as ``grad_scale``.
        scale = super()._get_scale_async()
        return None if scale is None else scale.cpu()


def _are_finite(gradients: Sequence[Tensor]) -> bool:
    """Returns True if all elements of gradients are finite. Each gradient is read once, and nothing is written."""
    # aminmax returns NaN if an element is NaN
    return all(bool(number.isfinite()) for each in gradients if each.numel() for number in each.aminmax())
