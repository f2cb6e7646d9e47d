"""The interface of optimizer steps on the CPU whose results have the bits of the same steps on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from sp_lightning.core.layers.narrow_gradient import Norms
from sp_lightning.core.updates.pieces import UpdateOne


class StepsLikeGpu(Protocol):
    """Steps of one optimizer on the CPU that have the bits of its steps on the GPU."""

    @property
    def norms(self) -> Callable[[], Norms] | None:
        """Makes the object that computes a step's norms with the GPU's bits. None: norms have the CPU's bits."""
        ...

    def against_group(self, group: Mapping[str, Any], known: set[int]) -> str:
        """Returns why the next step of a group has other bits than the GPU's; empty if its bits are the GPU's.

        Called before each step, because user code may have changed settings of the group since :meth:`GpuBits.decide`.

        Args:
            group: the group.
            known: the ``id`` of parameters that were checked in an earlier step. This call adds those that it checks.
        """
        ...

    def of(self, group: Mapping[str, Any]) -> UpdateOne:
        """Returns the function that updates one parameter of a group in place of torch's operator."""
        ...


class GpuBits:
    """Decides which optimizers step on the CPU with the bits of their steps on the GPU. By this default, no optimizer does.

    :func:`~sp_lightning.registry.gpu_bits` makes the object. With the capability ``kernels`` it is one of a subclass.

    Args:
        device: the GPU on which plain Lightning steps; None if it steps on the CPU.

    Attributes:
        stepping: for each optimizer whose steps have the GPU's bits, the object that runs them.
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
        """Decides from the optimizers' present settings, and sets :attr:`stepping`. Called when the policy of updates is made.

        Args:
            optimizers: the trainer's optimizers.
            module: the module that they train.
            against: a reason why no optimizer's steps have the GPU's bits; empty if there is none.
            fuse: True if a group runs fused when the user has set neither ``fused`` nor ``foreach``.
            scaled: True if gradients are scaled (``16-mixed``).
            clips: True if norms of gradients may be needed, for clipping.
        """
        self._why = against or "sp_lightning/capabilities/kernels, which has the formulas, is not installed"

    @property
    def whole(self) -> bool:
        """True if all steps, and all norms that may be needed, are bit-identical to the GPU's."""
        return False

    def sentences(self, *, automatic: bool, mixed: bool = False) -> list[str]:
        """Returns what users should know of the bits of their steps, in sentences; an empty list without a GPU.

        Args:
            automatic: True if Lightning clips (automatic optimization).
            mixed: True if some layers stay on the GPU and are stepped there.
        """
        return [] if self._gpu is None else self._against_cpu(self._why, mixed=mixed)

    def _against_cpu(self, why: str, *, mixed: bool) -> list[str]:
        """Returns the sentences for steps with the CPU's bits; an empty list if ``why`` is empty."""
        if not why:
            return []
        sentences = [f"CPU optimizer steps differ from the GPU's in the last bits: {why}."]
        if mixed:
            sentences.append("Layers that stay on the GPU step there: weights are those of neither place.")
        return sentences
