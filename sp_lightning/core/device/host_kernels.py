"""The interface of kernels for the CPU. They update a weight, or compute norms of gradients, in a single pass over memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)


@dataclass
class Operands:
    """Tensors that the update of one parameter reads and writes, all of them on the host.

    Attributes:
        weight: the values, which are updated in place.
        gradient: in the weight's dtype or a lower one.
        cast: receives the new values in its own dtype; None if there is no cast.
        state: the operator's arguments that follow the gradients: optimizer state of the weight's shape, which is updated in
            place, and the step number. None for state that the optimizer does not have.
    """

    weight: Tensor
    gradient: Tensor
    cast: Tensor | None
    state: Sequence[Tensor | None]

    def columns(self, begin: int) -> list[list[Tensor]]:
        """Returns the operator's arguments for the elements from ``begin`` on, which the kernel does not update.

        Each argument is in a list, as foreach operators expect.
        """
        size = self.weight.shape
        parts = (
            each if each is None or each.shape != size else each.view(-1)[begin:]
            for each in (self.weight, self.gradient, *self.state)
        )
        return [[] if each is None else [each] for each in parts]

    @cached_property
    def moments(self) -> list[Tensor]:
        """The state that is as large as the weight."""
        return [each for each in self.state if each is not None and each.shape == self.weight.shape]


def _no_update(
    operator: Callable[..., Any], settings: Mapping[str, Any], operands: Operands, factors: Sequence[float]
) -> bool:
    return False


def _no_norms(gradients: Sequence[Tensor]) -> dict[int, Tensor]:
    return {}


@dataclass(frozen=True)
class HostKernels:
    """Kernels for the CPU. By default there are none: torch's operators compute the same results with more passes over memory.

    :func:`host_kernels` returns the kernels of this installation.

    Attributes:
        update: updates a weight as a fused operator of torch does: widens and multiplies its gradient first, and casts it
            afterwards. Arguments: torch's fused operator for Adam, AdamW, SGD or Adagrad; its keyword arguments; contiguous
            operands; factors by which the gradient is multiplied, one after the other. Returns True if the update is done. If
            False, nothing was done, and torch's operators must do it.
        norms: computes norms of gradients on the host, in float32. Returns by the ``id`` of each gradient that a kernel can read
            its norm: a float32 tensor without dimensions.
        missing: the package to install to get kernels, for advice to users; empty if no installation helps.
    """

    update: Callable[[Callable[..., Any], Mapping[str, Any], Operands, Sequence[float]], bool] = _no_update
    norms: Callable[[Sequence[Tensor]], dict[int, Tensor]] = _no_norms
    missing: str = ""


_make: Callable[[], HostKernels] = HostKernels


def install(make: Callable[[], HostKernels]) -> None:
    """Sets the function that returns the kernels of this installation."""
    global _make
    _make = make


def host_kernels() -> HostKernels:
    """Returns the kernels of this installation for updates and norms on the CPU."""
    return _make()
