"""Steps of layers on the GPU: the interface of ``gpu_steps``, with a default that leaves all layers to the CPU."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.core.layers.layer import StreamedLayer
from sp_lightning.core.plan.plan import Plan

FRESH = 2
"""The number of layers whose new weights stay on the GPU for their next fetch: the layers that were stepped last. The weights of
earlier layers are fetched from the host."""

Key = tuple[StreamedLayer, Optimizer]
"""A layer's state in one optimizer."""


class LayerStepper:
    """Steps layers on the GPU. This default steps no layer: the CPU steps all layers.

    A layer that stays on the GPU has its own slot (``layer.own_slot``). While ``layer.kept`` is true, the GPU's copy of such a
    layer is the valid one, and the host's is out of date. To *land* the layer is to download it, with its state.

    Attributes:
        steps_all: True if all layers step on the GPU, and not only those that stay there.
        steps_some: True if some layers may step on the GPU.
        nbytes: bytes of GPU memory that steps take in addition to the slots of layers.
        moved_bytes: bytes of weights, gradients and state that were uploaded for steps, and that were downloaded after them.
    """

    steps_all = False
    steps_some = False
    nbytes: int = 0
    moved_bytes: tuple[int, int] = (0, 0)

    def reserve(self, plan: Plan) -> None:
        """Makes sure that the GPU has memory for the steps of a plan, before a choice of the plan has an effect.

        Raises:
            torch.OutOfMemoryError: the GPU has too little memory.
        """

    # ------------------------------------------------------------------ steps

    def steps(self, layer: StreamedLayer) -> bool:
        """Returns True if a layer steps on the GPU."""
        return False

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

    def step_layer(self, key: Key, part_of: Any, step: Callable[[], Any], *, stays: bool, declared: bool) -> None:
        """Runs the step of a layer for which :meth:`steps` is true.

        Args:
            key: the layer, and the user's optimizer.
            part_of: the layer's part of that optimizer, with the host parameters in its groups (see "Note: part of an
                optimizer" in ``updates/__init__``).
            step: the optimizer's own code, which steps ``part_of``.
            stays: True if the layer may be stepped in its own slot.
            declared: True if the step is checked, see :meth:`is_declared`.
        """
        raise NotImplementedError

    def has_state(self, layer: StreamedLayer, optimizer: Optimizer, parameter: nn.Parameter) -> bool:
        """Returns True if the optimizer's state of a host parameter is on the GPU alone."""
        return False

    def step_on_host(self, part_of: Any, step: Callable[[], Any]) -> None:
        """Runs the step of a layer for which :meth:`steps` is false, and checks it, see :meth:`is_declared`."""
        raise NotImplementedError

    def references(self, key: Key) -> Container[int]:
        """Returns the ``id`` of each tensor of a layer's state on the host to which this object has a reference."""
        return ()

    def norms(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Returns the norms of gradients as the GPU computes them: tensors without dimensions on the GPU."""
        raise NotImplementedError

    def synchronize_norms(self) -> None:
        """Waits until the GPU has read the gradients of :meth:`norms`. They may be written afterwards."""

    # ------------------------------------------------------------------ layers that stay

    def bring(self, layer: StreamedLayer) -> None:
        """Uploads a frozen layer that stays. From now on the GPU's copy is the valid one."""

    def hide(self, layer: StreamedLayer) -> None:
        """Called after the update of a layer that stays. From now on, code that reads its parameters lands the layer first."""

    def land(self, layer: StreamedLayer) -> None:
        """Downloads the weights of a layer and its state. The GPU's copy is still valid, too."""

    def make_host_valid(self, layer: StreamedLayer) -> None:
        """Called after :meth:`land`: from now on the host's copy is the valid one, and may be written."""

    def forget_slots(self, layers: Iterable[StreamedLayer]) -> None:
        """Called when the own slots of layers are freed. The host's copies of these layers are valid."""

    def close(self) -> None:
        """Frees GPU memory. State stays on the host."""
