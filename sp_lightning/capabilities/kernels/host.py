"""The kernels of this folder for the CPU, behind the interface of the core."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from sp_lightning.capabilities.kernels.jit import is_installed
from sp_lightning.capabilities.kernels.norms import norms_of
from sp_lightning.capabilities.kernels.update import update_in_one_pass
from sp_lightning.core.device.host_kernels import HostKernels, Operands


class CompiledKernels(HostKernels):
    """Kernels that llvmlite compiles for this processor. Without llvmlite, no method has a kernel, and torch does the work."""

    @property
    def missing(self) -> str:
        return "" if is_installed() else "llvmlite"

    def update(
        self,
        operator: Callable[..., Any],
        settings: Mapping[str, Any],
        operands: Operands,
        factors: Sequence[float],
    ) -> bool:
        return update_in_one_pass(operator, settings, operands, factors)

    def norms(self, gradients: Sequence[Tensor]) -> dict[int, Tensor]:
        return norms_of(gradients)
