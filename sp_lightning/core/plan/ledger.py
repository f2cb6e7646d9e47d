"""The host's side of the plan: the memory that training uses."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from sp_lightning.core.model.wrapped import parts
from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.plan.units import human_bytes
from sp_lightning.core.torch_compat.patched import state_of
from sp_lightning.core.torch_compat.private import tree_leaves


@dataclass(frozen=True)
class Ledger:
    """Host memory of a node while training. All sizes are in bytes.

    Attributes:
        parameters: the number of weights (elements), frozen ones included.
        weights: bytes of all parameters, and of the casts that are uploaded in place of masters. Parameters that stay in the
            user's files do not count.
        gradients: bytes of ``param.grad``, of staging memory for gradients that are accumulated, and of the buffer in which
            norms of 16-bit gradients are computed. Gradients that stay on the device do not count.
        state: bytes of the optimizers' tensors; None if unknown before the first step.
        ranks: the number of processes of the node, each with a device, that share the memory.
        on_disk: bytes of the state that are on a disk and not in memory.
        staging: bytes of the memory buffers for transfers from and to the disk.
        disk_traffic: bytes read from and written to the disk per step, on average, without the first step; 0 before the second.
        weights_on_disk, gradients_on_disk: bytes of trained weights and of gradients that are on a disk.
        returning: bytes of the layers that stay on the device, with gradients and state. They take host memory when the run
            ends, as all of the module does on plain Lightning. Activations are not in host memory any more then.
    """

    parameters: int
    weights: int
    gradients: int
    state: int | None
    ranks: int = 1
    on_disk: int = 0
    staging: int = 0
    disk_traffic: float = 0.0
    weights_on_disk: int = 0
    gradients_on_disk: int = 0
    returning: int = 0

    @property
    def nbytes(self) -> int:
        """Peak bytes of host memory in training, while a checkpoint is written; without optimizer state if that is unknown."""
        return self.weights + self.gradients + (self.state or 0) - self.on_disk + self.staging

    def __str__(self) -> str:
        """Returns a line about memory, and a second line if a disk is used."""
        count = max(self.parameters, 1)
        state = "optimizer state unknown before its first step"
        if self.state is not None:
            state = f"{human_bytes(self.state - self.on_disk)} optimizer state"
        if self.staging:
            state += f", {human_bytes(self.staging)} disk buffers"
        back = f"; {human_bytes(self.returning)} more return from the GPU when the run ends" if self.returning else ""
        of = f" of the node's {self.ranks} devices together" if self.ranks > 1 else ""
        return (
            f"Superpipeline: CPU memory of training{of}: {human_bytes(self.nbytes)}, {self.nbytes / count:.3g} bytes per "
            f"parameter ({human_bytes(self.weights)} weights, {human_bytes(self.gradients)} gradients with those in flight, "
            f"{state}){back}." + self._of_disk(count)
        )

    def _of_disk(self, count: int) -> str:
        """Returns the second line of :meth:`__str__`; empty without a disk."""
        on_disk = {
            "trained weights": self.weights_on_disk, "gradients": self.gradients_on_disk, "the optimizer state": self.on_disk,
        }  # fmt: skip
        if not any(on_disk.values()):
            return ""
        so_far = f" ({self.disk_traffic / count:.3g} on average so far)" if self.disk_traffic else ""
        what = " and ".join(f"{human_bytes(nbytes)} of {name}" for name, nbytes in on_disk.items() if nbytes)
        return (
            f"\nSuperpipeline: {what} are on a disk and pass through {human_bytes(self.staging)} of memory; bytes read and "
            f"written per parameter in each step except the first: {2 * sum(on_disk.values()) / count:.3g} at least{so_far}."
        )


@dataclass(frozen=True)
class Steps:
    """The properties of a run's optimizer steps that :func:`make_ledger` needs.

    Attributes:
        early: True if layers are updated in backward and their gradients freed after that.
        accumulate: the number of micro-batches of a step.
        clips: how gradients are clipped: ``"norm"``, ``"value"``, or None if they are not.
        narrow: True if gradients of casts keep the cast's dtype until the update.
        on_device: True if layers are stepped on the device.
    """

    early: bool
    accumulate: int
    clips: str | None
    narrow: bool = False
    on_device: bool = False


def make_ledger(
    plan: Plan, optimizers: Iterable[torch.optim.Optimizer], steps: Steps, on_gpu: Container[torch.Tensor] = ()
) -> Ledger:
    """Counts the host memory for a run with the layers of a plan and the state of some optimizers.

    Args:
        plan: the layers.
        optimizers: the optimizers of the run; empty if only weights and gradients are to be counted.
        steps: the properties of the run's optimizer steps.
        on_gpu: the weights that stay on the device, whose state the host does not have.
    """
    optimizers = list(optimizers)
    once = steps.accumulate == 1
    # Sums of gradients, over micro-batches or devices, are not narrow.
    steps = replace(steps, early=steps.early and once, narrow=steps.narrow and once and plan.alone)
    state = state_bytes(optimizers, on_gpu)
    layers = (*plan.trained, *plan.masters)
    return Ledger(
        parameters=sum(math.prod(span.shape) for layer in layers for span in layer.spans),
        weights=sum(layer.nbytes for layer in layers),
        gradients=_gradient_bytes(plan, steps) + _norm_bytes(plan, steps),
        state=state,
        ranks=plan.ranks,
        returning=returning_bytes(plan, optimizers, on_gpu),
    )


def returning_bytes(plan: Plan, optimizers: Iterable[torch.optim.Optimizer], on_gpu: Container[torch.Tensor]) -> int:
    """Returns the bytes of the layers that stay on the device, with their gradients and the state of their weights.

    Unknown state counts as none before the first step. The arguments are those of :func:`make_ledger`.
    """
    if not plan.stay:
        return 0
    state = sum((state_bytes([each]) or 0) - (state_bytes([each], on_gpu) or 0) for each in optimizers)
    return state + sum(weights + gradients * plan.training for _, weights, gradients in plan.stay)


def _gradient_bytes(plan: Plan, steps: Steps) -> int:
    """Returns the host memory of gradients, in flight or complete."""
    layers, sums, narrow = plan.trained, steps.accumulate > 1, steps.narrow
    # Gradients are staged if they are accumulated or widened: the gradients of k' + 1 transfers in flight, and of one completed
    # transfer.
    staging = (layer.gradient_bytes if sums else layer.narrow_bytes * (not narrow) for layer in layers)
    # Gradients of several devices are summed before they are offloaded, in the parameters' dtypes: no staging.
    staged = (plan.k_prime + 2) * max(staging) * plan.alone
    kept = [layer.gradient_bytes - narrow * layer.narrow_bytes for layer in layers]  # until the update
    if not steps.early:
        return sum(kept) + staged
    if steps.on_device:  # gradients of layers are never offloaded
        return plan.residents.gradient_bytes + staged
    # The gradients of k' + 1 transfers in flight, of one completed transfer, and of one layer that is being updated.
    return min(sum(kept), plan.residents.gradient_bytes + (plan.k_prime + 3) * max(kept)) + staged


def _norm_bytes(plan: Plan, steps: Steps) -> int:
    """Returns the bytes of the buffer into which narrow gradients are widened, one at a time, to compute their norms."""
    if steps.clips != "norm" or not steps.narrow or steps.on_device:
        return 0
    # At most: the largest cast of a layer may be frozen.
    halves = (min(layer.narrow_bytes, max((cast.nbytes for cast in layer.casts), default=0)) for layer in plan.trained)
    return 2 * max(halves, default=0)


def state_bytes(optimizers: Iterable[torch.optim.Optimizer], on_gpu: Container[torch.Tensor] = ()) -> int | None:
    """Returns the bytes of the optimizers' state; None if an optimizer has no state yet and its class does not tell the size.

    Args:
        optimizers: the optimizers.
        on_gpu: weights whose state does not count.
    """
    total = 0
    for optimizer in optimizers:
        trained_here = [[p for p in g["params"] if p.requires_grad and p not in on_gpu] for g in optimizer.param_groups]
        groups = list(zip(optimizer.param_groups, trained_here, strict=True))
        bits = FEW_BITS.get((type(optimizer).__module__, type(optimizer).__qualname__))
        if bits is not None:
            total += sum(_few_bits(p, group, optimizer, bits) for group, trained in groups for p in trained)
        elif has_known_state(optimizer):
            for group, trained in groups:
                total += state_tensors(optimizer, group) * sum(p.numel() * p.element_size() for p in trained)
        else:
            state = state_of(optimizer)
            # A copy, because an update in the background may add state. With several devices, each process has a part.
            now = dict.copy(state) if isinstance(state, dict) else dict(state)
            leaves = tree_leaves({p: values for p, values in now.items() if p not in on_gpu})
            tensors = [part for leaf in leaves if isinstance(leaf, torch.Tensor) for _, part in parts("", leaf)]
            if not tensors:
                return None
            total += sum(each.nbytes for each in tensors if each.layout is torch.strided)
    return total


def _few_bits(parameter: torch.Tensor, group: dict[str, Any], optimizer: Any, bits: int) -> int:
    """Returns the bytes of torchao's Adam state for a parameter: codes, a scale per block, a table for 4 and 8 bits."""
    size, numel, block = parameter.element_size(), parameter.numel(), optimizer.block_size
    if numel >= 4096 and numel % block == 0:  # torchao quantises no other state
        table = 4 * 2**bits * (not type(optimizer).__qualname__.endswith("Fp8"))
        each = numel * bits // 8 + 4 * numel // block + table
    else:
        each = numel * size
    return (2 + bool(group["amsgrad"])) * each + 4  # and the number of steps


FEW_BITS = {
    ("torchao.optim.adam", f"{kind}{suffix}"): bits
    for kind in ("Adam", "AdamW")
    for suffix, bits in (("8bit", 8), ("4bit", 4), ("Fp8", 8))
}
"""The bits per element in the state of torchao's optimizers. The keys are names, because torchao may not be installed."""


def _adam(group: dict[str, Any]) -> int:
    return 2 + bool(group["amsgrad"])


# The number of state tensors of a parameter's size, given the parameter's group.
_TENSORS: dict[type, Any] = {
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SGD: lambda group: int(group["momentum"] != 0),
    torch.optim.Adagrad: lambda group: 1,
    torch.optim.RMSprop: lambda group: 1 + bool(group["momentum"]) + bool(group["centered"]),
    torch.optim.NAdam: lambda group: 2,
    torch.optim.RAdam: lambda group: 2,
    torch.optim.Adamax: lambda group: 2,
    torch.optim.Adadelta: lambda group: 2,
    torch.optim.Muon: lambda group: 1,
}


def has_known_state(optimizer: Any) -> bool:
    """Returns True for torch's optimizers that step each parameter by itself and have state tensors of the parameter's size.

    A subclass of such an optimizer may have other state, so only the exact classes count.
    """
    return type(optimizer) in _TENSORS


def state_tensors(optimizer: Any, group: dict[str, Any]) -> int:
    """Returns the number of state tensors per parameter of a group (see :func:`has_known_state`)."""
    return int(_TENSORS[type(optimizer)](group))
