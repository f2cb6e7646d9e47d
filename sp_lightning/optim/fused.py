"""Which steps run fused on the CPU, and which can be taken apart by layers: fused ones, and those of some other optimizers.

torchao's optimizers keep their state in 8 or 4 bits, or in float8. They step each parameter by itself, with one compiled
function, which gives the same bits on any number of threads. torch's own unfused optimizers step each parameter by itself,
too, but where their operators cut a tensor depends on the number of threads, and the background has one less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.device.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.device.patched import state_of
from sp_lightning.device.torch_private import fused_sgd_step, run_first_after_step
from sp_lightning.plan.ledger import FEW_BITS


class FusedStep:
    """Runs an optimizer's steps fused as long as the strategy has it.

    A fused step passes over host memory once, and is many times faster on the CPU. This concerns torch's own optimizers
    alone, and of them the groups in which the user has set neither ``fused`` nor ``foreach``.

    The setting is changed in the parameter groups for the time of a step. To construct the optimizer anew is no way:
    under mixed precision Lightning refuses to clip an optimizer that was constructed fused, because it takes it for one
    that unscales by itself. What is saved, and what is seen outside of a step, has the user's value.

    Args:
        optimizer: the optimizer as the user configured it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._fused: list[
            dict[str, Any]
        ] = []  # the groups that are fused here; the user's value is None in all of them
        self._hooks = [
            optimizer.register_step_pre_hook(self._look),
            hide := optimizer.register_step_post_hook(self.hide),
            optimizer.register_state_dict_post_hook(self._as_users),
            # Loading a state replaces all groups.
            optimizer.register_load_state_dict_post_hook(lambda *_: self._fused.clear()),
        ]
        run_first_after_step(optimizer, hide)  # the user's own hooks after the step are to see the user's value

    @staticmethod
    def suits(optimizer: Any) -> bool:
        """Whether an optimizer is of a class of torch's that has a fused step on the CPU.

        A subclass may step in a way of its own, so none is taken.
        """
        return type(optimizer) in _FUSED_ON_CPU

    def switch_on(self) -> bool:
        """Fuses every group that can be fused now, and no other: gradients may have become sparse since the last step.

        Returns:
            Whether any of the optimizer's groups runs fused because of this.
        """
        self._look()
        return any(group is ours for ours in self._fused for group in self._optimizer.param_groups)

    def close(self) -> None:
        """Leaves the optimizer as the user configured it."""
        for hook in self._hooks:
            hook.remove()
        self.hide()

    def hide(self, *_: Any) -> None:
        """Lets the groups show the user's value again, after a step."""
        for group in self._fused:
            if group["fused"] is True:  # otherwise the user has set it since
                group["fused"] = None
        self._fused.clear()

    def _look(self, *_: Any) -> None:
        self._fused = [group for group in self._fused if group["fused"] is True]  # otherwise the user has set it since
        # Updates may be under way. What is read here does not depend on them, so nothing is to wait for them.
        with torch.DisableTorchFunctionSubclass():
            for group in self._optimizer.param_groups:
                ours = any(group is fused for fused in self._fused)
                if ours and not _can_be_fused(self._optimizer, group):
                    group["fused"] = None
                    self._fused = [fused for fused in self._fused if fused is not group]
                elif not ours and group.get("fused", False) is None and _can_be_fused(self._optimizer, group):
                    group["fused"] = True
                    self._fused.append(group)

    def _as_users(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Puts the user's value into a state dict that was made during a step."""
        for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
            if any(group is fused for fused in self._fused):
                saved["fused"] = None


BARS_FUSED = ("foreach", "differentiable", "capturable")
"""Settings of a group with which torch's optimizers cannot run fused."""

_FUSED_ON_CPU = {torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD}


def loses_updates(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether torch's fused step would leave weights of a group unchanged, as SGD does with 16 bits (pytorch#191763)."""
    return type(optimizer) is torch.optim.SGD and not all(
        _sgd_updates(dtype) for dtype in {p.dtype for p in group["params"]}
    )


@cache
def _sgd_updates(dtype: torch.dtype) -> bool:
    """Tries whether torch's fused SGD on the CPU updates weights of a dtype.

    That of torch 2.11 skips whole vectors of 16-bit weights (pytorch#191763).
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    with no_inference_mode(), no_dispatch_modes(), torch.no_grad():
        weight = torch.zeros(256, dtype=dtype, device="cpu")
        fused_sgd_step(weight, torch.ones_like(weight))
        return bool((weight == -1).all())


def _can_be_fused(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    with_gradient = [(p, gradient) for p in group["params"] if (gradient := p.grad) is not None]
    return (
        not any(group.get(other) for other in BARS_FUSED)
        and not loses_updates(optimizer, group)
        and all(p.is_floating_point() and p.device.type == "cpu" for p in group["params"])
        and all(gradient.layout is torch.strided for _, gradient in with_gradient)
        # torch's fused SGD fails if some parameters get their first gradient later than others.
        and not lacks_buffers(group, state_of(optimizer), [p for p, _ in with_gradient])
    )


def is_separable(optimizer: Any) -> bool:
    """Whether the step of some parameters alone is what the whole step does to them.

    Stochastic rounding draws random numbers, in the order of the parameters and from the generator that the model uses.
    """
    kind = type(optimizer)
    rounds = getattr(optimizer, "bf16_stochastic_round", False)
    return (kind.__module__, kind.__qualname__) in FEW_BITS and not rounds


def lacks_buffers(group: Mapping[str, Any], state: dict[Any, Any], parameters: Iterable[nn.Parameter]) -> bool:
    """Whether some of a group's parameters have a momentum buffer and others have none yet.

    One rank alone has state, and refuses looks at it elsewhere; what is found there does not count.
    """
    buffers = [dict.get(state, p, {}).get("momentum_buffer") is not None for p in parameters]
    return bool(group.get("momentum")) and any(buffers) and not all(buffers)


def shares_state(groups: Iterable[Mapping[str, Any]], state: Mapping[Any, Any]) -> bool:
    """Whether one tensor is the state of two parameters: what it becomes depends on the order in which they are updated."""
    # Copies of the values are asked, because an update in the background may add some.
    values = [value for group in groups for p in group["params"] for value in list(state.get(p, {}).values())]
    places = [_place(value) for value in values if isinstance(value, Tensor)]
    return len(set(places)) < len(places)


def _place(value: Tensor) -> int:
    """Its address, or, for one that has none or is on a disk, its identity."""
    return (value.data_ptr() if type(value) is Tensor else 0) or id(value)
