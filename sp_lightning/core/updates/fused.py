"""Decides which steps run fused on the CPU, and which can be divided into updates of layers.

Fused steps can be divided, and so can the steps of torchao's optimizers, which keep their state in 8 or 4 bits, or in float8.
torchao's optimizers step each parameter by itself, with one compiled function whose results are bit-identical for any number of
threads.

torch's unfused optimizers also step each parameter by itself. But their operators cut a tensor into as many parts as there are
threads, which changes the last bits. With a GPU, updates in the background run on fewer threads (``Device.background_threads``).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.core.plan.ledger import FEW_BITS
from sp_lightning.core.torch_compat.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.core.torch_compat.patched import state_of
from sp_lightning.core.torch_compat.private import fused_sgd_step, tree_leaves


def runs_fused(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], *, fuse: bool) -> bool:
    """Returns True if a group's step runs fused now. Call this before each step, because a step of sparse gradients cannot.

    A fused step passes over host memory once, and is many times faster on the CPU. The optimizer cannot be constructed again as a
    fused one: with mixed precision, Lightning does not clip for optimizers that were constructed fused, because on a GPU they
    unscale by themselves. So groups have ``fused=True`` only while torch's step runs.

    Args:
        optimizer: as its user configured it.
        group: one of its groups.
        fuse: True to run the step fused if the user has set neither ``fused`` nor ``foreach``. The optimizer's class must then
            have a fused step.
    """
    # Without dispatch, because the class of a parameter whose update is under way would wait. Updates do not change the metadata
    # that is read here.
    with torch.DisableTorchFunctionSubclass():
        if group.get("fused"):
            return True
        left_open = group.get("fused", False) is None  # optimizers without a fused step have no such setting
        return fuse and left_open and _can_be_fused(optimizer, group)


OF_EACH = ("params", "param_names")
"""The settings of a group that are lists with one entry for each parameter."""


def divide(group: dict[str, Any], stay: Container[Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides a group by place: the parameters that are not among ``stay``, and those that are.

    torch decides for all parameters of a group together whether its step runs fused, or in the form ``foreach``.
    """
    parts = []
    for stays in (False, True):
        places = [at for at, p in enumerate(group["params"]) if (p in stay) is stays]
        parts.append({**group, **{key: [group[key][at] for at in places] for key in OF_EACH if key in group}})
    return parts[0], parts[1]


def settings_on_cpu(group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns CPU copies of a group's settings that are tensors on another device, such as a learning rate on the GPU.

    torch's fused step copies them without blocking, so the CPU kernel may read them before they have arrived. These copies block.
    """
    settings = ((name, value) for name, value in group.items() if isinstance(value, Tensor))
    return {name: value.cpu() for name, value in settings if value.device.type != "cpu"}


def has_fused_step(optimizer: Any) -> bool:
    """Returns True if an optimizer's class is one of torch's with a fused step on the CPU. A subclass may step in its own way."""
    return type(optimizer) in _FUSED


PREVENT_FUSED = ("foreach", "differentiable", "capturable")
"""Settings of a group with which torch's optimizers cannot run fused."""

_FUSED = (torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""torch's optimizers that have a fused step on the CPU."""


def loses_updates(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Returns True if torch's fused step would leave weights of a group unchanged, as SGD does in 16 bits (pytorch#191763)."""
    return type(optimizer) is torch.optim.SGD and not all(
        _sgd_updates(dtype) for dtype in {p.dtype for p in group["params"] if may_get_gradients(p)}
    )


@cache
def _sgd_updates(dtype: torch.dtype) -> bool:
    """Tests whether torch's fused SGD on the CPU updates weights of a dtype.

    In torch 2.11 it skips whole vectors of 16-bit weights (pytorch#191763).
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    with no_inference_mode(), no_dispatch_modes(), torch.no_grad():
        weight = torch.zeros(256, dtype=dtype, device="cpu")
        fused_sgd_step(weight, torch.ones_like(weight))
        return bool((weight == -1).all())


def may_get_gradients(parameter: Tensor) -> bool:
    """Returns True if a parameter is trained or can be unfrozen. Optimizers never step integer parameters."""
    return parameter.is_floating_point() or parameter.is_complex()


def _can_be_fused(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Returns True if torch's fused step on the CPU works for a group's settings, weights and present gradients."""
    with_gradient = [(p, gradient) for p in group["params"] if (gradient := p.grad) is not None]
    return (
        not any(group.get(other) for other in PREVENT_FUSED)
        and not loses_updates(optimizer, group)
        and all(p.is_floating_point() and p.device.type == "cpu" for p in group["params"] if may_get_gradients(p))
        and all(gradient.layout is torch.strided for _, gradient in with_gradient)
        # torch's fused SGD fails if some parameters get their first gradient later than others.
        and not lacks_buffers(group, state_of(optimizer), [p for p, _ in with_gradient])
    )


def is_separable(optimizer: Any) -> bool:
    """Returns True if an unfused step can be divided: stepping some parameters alone gives the results of the whole step.

    A step with stochastic rounding cannot be divided: it draws random numbers in the order of the parameters, from the model's
    generator.
    """
    kind = type(optimizer)
    draws = getattr(optimizer, "bf16_stochastic_round", False)
    return (kind.__module__, kind.__qualname__) in FEW_BITS and not draws


def is_of_bitsandbytes(optimizer: Any) -> bool:
    """Returns True if an optimizer is one of bitsandbytes, whose kernels are for GPUs."""
    return type(optimizer).__module__.startswith("bitsandbytes.optim.")


def constants_of(optimizer: Any) -> frozenset[str]:
    """Returns the names of state that parameters share and no step writes: bitsandbytes' tables of quantization codes."""
    return frozenset(("qmap1", "qmap2") if is_of_bitsandbytes(optimizer) else ())


def lacks_buffers(group: Mapping[str, Any], state: dict[Any, Any], parameters: Iterable[nn.Parameter]) -> bool:
    """Returns True if some of a group's parameters have a momentum buffer and others do not yet."""
    # With several devices, methods of the state raise an error for parameters of other processes, so this uses `dict`.
    buffers = [dict.get(state, p, {}).get("momentum_buffer") is not None for p in parameters]
    return bool(group.get("momentum")) and any(buffers) and not all(buffers)


def shares_state(groups: Iterable[Mapping[str, Any]], state: dict[Any, Any], constants: Container[str]) -> bool:
    """Returns True if one tensor is the state of two parameters: its value then depends on the order of their updates.

    Args:
        groups: an optimizer's groups.
        state: its state.
        constants: names of state that no step writes.
    """
    seen = set[int]()
    for parameter in [p for group in groups for p in group["params"]]:
        values = dict(dict.get(state, parameter, {}))  # a copy, because an update in the background may add values
        written = tree_leaves([value for name, value in values.items() if name not in constants])
        places = {_place(value) for value in written if isinstance(value, Tensor)}
        if seen & places:
            return True
        seen |= places
    return False


def _place(value: Tensor) -> int:
    """Returns a tensor's address, or its identity if it has no memory of its own (sparse, for example) or is on a disk."""
    return (value.data_ptr() if type(value) is Tensor and value.layout is torch.strided else 0) or id(value)
