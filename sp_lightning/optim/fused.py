"""What the optimizer's side of a step needs, now that parameters and gradients are on the host."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from sp_lightning.device.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.device.torch_private import fused_sgd_step, run_first_after_step, scaler_device


class HostGradScaler(torch.amp.GradScaler):
    """A ``GradScaler`` for gradients on the host.

    torch's copies the scale to the CPU without blocking, and the CPU kernel may read it before it has come. Here the
    copies block; everything else, and what is checkpointed, is torch's.
    """

    @classmethod
    def like(cls, scaler: torch.amp.GradScaler) -> HostGradScaler:
        """Returns one with the state of a ``GradScaler`` of torch's, to stand in its place."""
        host = cls(device=scaler_device(scaler), enabled=scaler.is_enabled())
        host.load_state_dict(scaler.state_dict())
        return host

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return super()._unscale_grads_(optimizer, inv_scale.cpu(), found_inf.cpu(), allow_fp16)


class FusedStep:
    """Runs an optimizer's steps fused while the strategy has it: one pass over host memory, many times faster on the CPU.

    Only torch's own optimizers, and only groups whose user left ``fused`` and ``foreach`` open. It is switched on in the
    parameter groups and not by constructing the optimizer anew: Lightning refuses to clip one that was constructed
    fused under mixed precision, because it takes it for one that unscales by itself. What is saved, and what is seen
    outside of a step, has the user's value.

    Args:
        optimizer: as the user configured it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._fused: list[dict[str, Any]] = []  # the groups that are fused here; their users had None
        self._hooks = [
            optimizer.register_step_pre_hook(self._look),
            hide := optimizer.register_step_post_hook(self.hide),
            optimizer.register_state_dict_post_hook(self._as_users),
            optimizer.register_load_state_dict_post_hook(lambda *_: self._fused.clear()),  # all groups are new ones
        ]
        run_first_after_step(optimizer, hide)  # before the user's own

    @staticmethod
    def suits(optimizer: Any) -> bool:
        """Whether it is one of torch's that have a fused step on the CPU; a subclass may step in its own way."""
        return type(optimizer) in _FUSED_ON_CPU

    def switch_on(self) -> bool:
        """Fuse every group that can be now; gradients may have become sparse, groups may have been added.

        Returns whether any runs fused that was not to.
        """
        self._look()
        return any(group is ours for ours in self._fused for group in self._optimizer.param_groups)

    def close(self) -> None:
        """The optimizer is as the user configured it."""
        for hook in self._hooks:
            hook.remove()
        self.hide()

    def hide(self, *_: Any) -> None:
        """The step is over: the groups show the user's value again."""
        for group in self._fused:
            if group["fused"] is True:  # otherwise the user has chosen since
                group["fused"] = None
        self._fused.clear()

    def _look(self, *_: Any) -> None:
        with torch.DisableTorchFunctionSubclass():  # updates may be under way, and need not be waited for
            self._look_at(self._optimizer.param_groups)

    def _look_at(self, groups: list[dict[str, Any]]) -> None:
        self._fused = [group for group in self._fused if group["fused"] is True]  # otherwise the user has chosen since
        for group in groups:
            ours = any(group is each for each in self._fused)
            if ours and not _can_be_fused(self._optimizer, group):
                group["fused"] = None
                self._fused = [each for each in self._fused if each is not group]
            elif not ours and group.get("fused", False) is None and _can_be_fused(self._optimizer, group):
                group["fused"] = True
                self._fused.append(group)

    def _as_users(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
            if any(group is each for each in self._fused):
                saved["fused"] = None


BARS_FUSED = ("foreach", "differentiable", "capturable")
"""Settings with which torch's optimizers do not run fused."""

_FUSED_ON_CPU = {torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD}


def loses_updates(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether torch's fused step would leave weights of a group as they are: SGD those of 16 bits (pytorch#191763)."""
    return type(optimizer) is torch.optim.SGD and not all(
        _sgd_updates(dtype) for dtype in {p.dtype for p in group["params"]}
    )


@cache
def _sgd_updates(dtype: torch.dtype) -> bool:
    """What torch's fused SGD on the CPU does, tried: that of 2.11 skips whole vectors of 16-bit weights."""
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    with no_inference_mode(), no_dispatch_modes(), torch.no_grad():
        weight = torch.zeros(256, dtype=dtype, device="cpu")
        fused_sgd_step(weight, torch.ones_like(weight))
        return bool((weight == -1).all())


def _can_be_fused(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    with_gradient = [(p, gradient) for p in group["params"] if (gradient := p.grad) is not None]
    # torch's fused SGD fails where some parameters have a momentum buffer and others get their first gradient.
    state = vars(optimizer)["state"]  # as it is: updates may be under way, and need not be waited for
    buffers = [state.get(p, {}).get("momentum_buffer") is not None for p, _ in with_gradient]
    return (
        not any(group.get(other) for other in BARS_FUSED)
        and not loses_updates(optimizer, group)
        and all(p.is_floating_point() and p.device.type == "cpu" for p in group["params"])
        and all(gradient.layout is torch.strided for _, gradient in with_gradient)
        and (not group.get("momentum") or all(buffers) or not any(buffers))
    )
