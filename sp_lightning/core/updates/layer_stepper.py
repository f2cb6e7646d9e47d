"""Steps of layers on the GPU: the interface of ``gpu_steps``, with a default that leaves all layers to the CPU."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sp_lightning.core.weights.layer import StreamedLayer

FRESH = 2
"""The number of layers whose new weights stay on the GPU for their next fetch: the layers that were stepped last. The weights of
earlier layers are fetched from the host."""

Key = tuple[StreamedLayer, Optimizer]
"""A layer's state in one optimizer."""


class LayerStepper:
    """Steps layers on the GPU. This default steps no layer: the CPU steps all layers.

    Attributes:
        steps_all: True if layers step on the GPU.
        nbytes: bytes of GPU memory that steps take in addition to the slots of layers.
    """

    steps_all = False
    nbytes: int = 0

    # ------------------------------------------------------------------ steps

    def is_declared(self, optimizer: Optimizer) -> bool:
        """Returns True if an optimizer's class declares ``steps_each_parameter_alone``. Its steps are then checked."""
        return False

    def arrange(self, *, state_on_disk: bool, ahead: bool) -> None:
        """Sets how the steps of a run proceed. Called before the first step, and when the policy of updates changes.

        Args:
            state_on_disk: True if state is written to a disk between two updates, so that the GPU must not keep any state.
            ahead: True if the next forward waits for updates layer by layer. A fetch may then copy the results of a step on the
                GPU.
        """

    def step(self, key: Key, part_of: Any, step: Callable[[], Any], *, declared: bool) -> None:
        """Runs the step of a layer on the GPU.

        Args:
            key: the layer, and the user's optimizer.
            part_of: the layer's part of that optimizer, with the host parameters in its groups (see "Note: part of an
                optimizer" in ``updates/__init__``).
            step: the optimizer's own code, which steps ``part_of``.
            declared: True if the step is checked, see :meth:`is_declared`.
        """
        raise NotImplementedError

    def step_checked(self, part_of: Any, step: Callable[[], Any]) -> None:
        """Runs a step of parameters where they are, and checks it, see :meth:`is_declared`."""
        raise NotImplementedError

    def references(self, key: Key) -> Container[int]:
        """Returns the ``id`` of each tensor of a layer's state on the host to which this object has a reference."""
        return ()

    def norms(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Returns the norms of gradients as the GPU computes them: tensors without dimensions on the GPU."""
        raise NotImplementedError

    def synchronize_norms(self) -> None:
        """Waits until the GPU has read the gradients of :meth:`norms`. They may be written afterwards."""

    def close(self) -> None:
        """Frees GPU memory. State stays on the host."""
