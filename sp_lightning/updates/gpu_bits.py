"""The interface of optimizer steps on the CPU whose results have the bits of the same steps on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from sp_lightning.layers.narrow_gradient import Norms
from sp_lightning.updates.pieces import UpdateOne


class StepsLikeGpu(Protocol):
    """Steps of one optimizer on the CPU that have the bits of its steps on the GPU."""

    @property
    def norms(self) -> Callable[[], Norms] | None:
        """Makes what computes norms with the GPU's bits. None: norms have the CPU's bits."""
        ...

    def against_group(self, group: Mapping[str, Any], known: set[int]) -> str:
        """Returns why the next step of a group has other bits, because its settings have changed; empty if it has not.

        Args:
            group: the group.
            known: the ``id`` of parameters that need not be looked at again. Others are added.
        """
        ...

    def of(self, group: Mapping[str, Any]) -> UpdateOne:
        """Returns what updates one parameter of a group in place of torch's operator."""
        ...


class GpuBits:
    """Decides which optimizers step on the CPU with the bits of their steps on the GPU. By default none do.

    :func:`~sp_lightning.registry.gpu_bits` makes the one of this installation.

    Args:
        device: the GPU on which plain Lightning steps; None if it steps on the CPU.

    Attributes:
        stepping: the optimizers whose steps have the GPU's bits, with these steps.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._gpu = device
        self._why = ""  # the reason for the first optimizer that has other bits
        self.stepping: Mapping[Optimizer, StepsLikeGpu] = {}

    def decide(
        self,
        optimizers: Iterable[Optimizer],
        module: nn.Module,
        against: str,
        *,
        fuse: bool,
        scaled: bool,
        clips: bool,
    ) -> None:
        """Decides, from the optimizers' present settings.

        Args:
            optimizers: the trainer's.
            module: the module that they train.
            against: a reason that holds for all of them; empty if there is none.
            fuse: whether groups step fused for which their user has left that open.
            scaled: whether gradients are scaled (``16-mixed``).
            clips: whether norms may be needed.
        """
        self._why = against or "sp_lightning/kernels, which has the formulas, is not installed"

    @property
    def whole(self) -> bool:
        """True if all steps have the GPU's bits, and all norms that may be needed."""
        return False

    def sentences(self, *, automatic: bool, mixed: bool = False) -> list[str]:
        """Returns sentences for the user; none without a GPU.

        Args:
            automatic: whether Lightning clips (automatic optimization).
            mixed: whether some layers stay on the GPU and are stepped there.
        """
        return [] if self._gpu is None else self._against_cpu(self._why, mixed=mixed)

    def _against_cpu(self, why: str, *, mixed: bool) -> list[str]:
        if not why:
            return []
        differ = f"CPU optimizer steps differ from the GPU's in the last bits: {why}."
        return [differ, "Layers that stay on the GPU step there: weights are those of neither place."][: 1 + mixed]
