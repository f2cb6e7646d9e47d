"""The gradient scaler of ``16-mixed`` for gradients that are on the host, narrow ones included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.layers.narrow_gradient import Factor, change, is_narrow, stored, unwidened, widen_if_changed
from sp_lightning.registry import host_kernels
from sp_lightning.torch_compat.private import scaler_device

Found = dict[torch.device, Tensor]
"""For each device with gradients, 1.0 if some of them are not finite."""


class HostGradScaler(torch.amp.GradScaler):
    """A ``GradScaler`` for gradients on the host.

    torch's scaler copies the scale to the CPU without blocking, so the CPU kernel may read it before it has arrived. Here the
    copies block. Narrow gradients stay narrow: they are searched for infinities and NaN here, and divided in the update. All else
    is torch's code, including checkpoints.

    Attributes:
        together: runs the unscaling once for gradients that all ranks share. It is called with the function that unscales, and
            returns that function's result of the rank that ran it; None on one device.
    """

    together: Callable[[Callable[[], Found]], Found] | None = None

    @classmethod
    def like(cls, scaler: torch.amp.GradScaler) -> HostGradScaler:
        """Returns a scaler with the state of one of torch's, which it replaces."""
        host = cls(device=scaler_device(scaler), enabled=scaler.is_enabled())
        host.load_state_dict(scaler.state_dict())
        return host

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> Found:
        unscale = partial(self._unscale_here, optimizer, inv_scale, found_inf, allow_fp16)
        return unscale() if self.together is None else self.together(unscale)

    def _unscale_here(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> Found:
        inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        unscale = Factor(inv_scale)
        narrow, others = list[nn.Parameter](), list[nn.Parameter]()
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            widen_if_changed(parameter)
            (narrow if is_narrow(parameter) else others).append(parameter)
        rest: Any = SimpleNamespace(param_groups=[{"params": others}])
        found = super()._unscale_grads_(rest, inv_scale, found_inf, allow_fp16)
        if narrow:
            infinite = found.setdefault(torch.device("cpu"), found_inf)
            # torch also tests gradients before it multiplies them.
            if not _are_finite([unwidened(stored(parameter)) for parameter in narrow]):
                infinite.fill_(1.0)
            for parameter in narrow:
                if not change(parameter, unscale) and parameter.grad is not None:
                    unscale(parameter.grad)  # another thread has read it, which has widened it
        return found


def _are_finite(gradients: Sequence[Tensor]) -> bool:
    """Returns True if gradients have neither infinities nor NaN. Each is read once, and nothing is written."""
    # In other dtypes squares may be infinite although the numbers are finite.
    norms = host_kernels().norms([each for each in gradients if each.dtype is torch.float16])
    found = ([norms[id(each)]] if id(each) in norms else each.aminmax() for each in gradients if each.numel())
    return all(bool(number.isfinite()) for numbers in found for number in numbers)  # aminmax keeps NaN
