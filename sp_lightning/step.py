"""What the optimizer's side of a step needs, now that parameters and gradients are on the host."""

from __future__ import annotations

from typing import Any

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


class FusedStep:
    """Runs an optimizer fused while the strategy has it: one pass over host memory, many times faster on the CPU.

    Only torch's own optimizers, and only groups whose user left ``fused`` and ``foreach`` open. It is switched on in the
    parameter groups and not by constructing the optimizer anew: Lightning refuses to clip one that was constructed
    fused under mixed precision, because it takes it for one that unscales by itself. What is saved has the user's value.

    Args:
        optimizer: as the user configured it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._users: list[bool | None] = []  # of each group that was fused here: what the user had
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._as_users),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ]
        self.switch_on()

    def switch_on(self) -> bool:
        """Fuse every group that can be now; gradients may have become sparse, groups may have been added.

        Returns whether any is.
        """
        groups = self._optimizer.param_groups
        self._users += [group.get("fused") for group in groups[len(self._users) :]]
        for group, users in zip(groups, self._users, strict=False):
            if users is None and "fused" in group:
                group["fused"] = True if _can_be_fused(self._optimizer, group) else None
        return any(group.get("fused") for group in groups)

    def close(self) -> None:
        """The optimizer is as the user configured it."""
        for hook in self._hooks:
            hook.remove()
        self._as_users(self._optimizer, {"param_groups": self._optimizer.param_groups})

    def _as_users(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        for group, users in zip(state["param_groups"], self._users, strict=False):
            if "fused" in group:
                group["fused"] = users

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        self._users.clear()  # what was saved is the user's own; the next step looks again


_FUSED_ON_CPU = {torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD}


def _can_be_fused(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    return (
        type(optimizer) in _FUSED_ON_CPU
        and not any(group.get(other) for other in ("foreach", "differentiable", "capturable"))
        and all(p.is_floating_point() and p.device.type == "cpu" for p in group["params"])
        and not any(p.grad is not None and p.grad.layout is not torch.strided for p in group["params"])
    )
