"""Steps of layers on the GPU: the interface of ``gpu_steps``, with a default that leaves all layers to the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.layers.layer import StreamedLayer

FRESH = 2
"""Layers whose casts are there until the second one after them is stepped on the GPU: then the host has them, too."""

Key = tuple[StreamedLayer, Optimizer]
"""A layer's state in one optimizer."""


class LayerStepper:
    """Steps layers on the GPU. This default steps none of them: the CPU steps all layers.

    Layers that stay on the GPU have a slot of their own (``layer.own_slot``). While the GPU's copy of such a layer counts
    (``layer.kept``), the CPU's is out of date.

    Attributes:
        steps_all: whether all layers step on the GPU, and not only those that stay there.
        steps_some: whether some layers may.
        nbytes: bytes of GPU memory that steps take beside the slots of layers.
        moved_bytes: bytes of weights, gradients and state that were uploaded for steps, and downloaded after them.
    """

    steps_all = False
    steps_some = False
    nbytes: int = 0
    moved_bytes: tuple[int, int] = (0, 0)

    # ------------------------------------------------------------------ steps

    def steps(self, layer: StreamedLayer) -> bool:
        """Returns True if a layer steps on the GPU."""
        return False

    def is_declared(self, optimizer: Optimizer) -> bool:
        """Returns True if only the user's class says that an optimizer steps each parameter by itself: its steps are checked."""
        return False

    def arrange(self, *, loose: bool, ahead: bool) -> None:
        """Sets how the steps of a run go.

        Args:
            loose: whether state goes to a disk between two updates.
            ahead: whether the next forward waits for updates layer by layer. It may then fetch a layer from what its step made.
        """

    def step_layer(self, key: Key, part_of: Any, step: Callable[[], Any], *, stays: bool, declared: bool) -> None:
        """Runs the step of a layer for which :meth:`steps` is true.

        Args:
            key: the layer, and the user's optimizer.
            part_of: the layer's part of that optimizer, with the host's parameters in its groups.
            step: the optimizer's own code, which steps ``part_of``.
            stays: whether the layer may be stepped in its own slot.
            declared: whether the step is checked, see :meth:`is_declared`.
        """
        raise NotImplementedError

    def has_state(self, layer: StreamedLayer, optimizer: Optimizer, parameter: nn.Parameter) -> bool:
        """Returns True if the optimizer's state of a host parameter is on the GPU alone."""
        return False

    def forget(self, key: Key) -> None:
        """Called if the user's optimizer alone holds a layer's state on the host."""

    def norms(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Returns the norms of gradients as the GPU computes them, each a tensor without dimensions there."""
        raise NotImplementedError

    def read(self) -> None:
        """Waits until the GPU has read the gradients of :meth:`norms`, which may be written from now on."""

    # ------------------------------------------------------------------ layers that stay

    def bring(self, layer: StreamedLayer) -> None:
        """Uploads a layer that stays and has nothing to step. The GPU's copy counts from now on."""

    def hide(self, layer: StreamedLayer) -> None:
        """Called after the update of a layer whose GPU copy counts: user code that reads its parameters has to land it."""

    def land(self, layer: StreamedLayer) -> None:
        """Downloads the weights of a layer and its state. The GPU's copy still counts."""

    def leave(self, layer: StreamedLayer) -> None:
        """Called after :meth:`land`: the host's values of a layer count from now on."""

    def forget_slots(self, layers: Iterable[StreamedLayer]) -> None:
        """Called if the slots of layers are freed, in which nothing counts."""

    def close(self) -> None:
        """Frees GPU memory. State stays on the host."""
