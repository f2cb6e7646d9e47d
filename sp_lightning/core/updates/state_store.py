"""The place of optimizer state between two updates of a layer: host memory, or a place that a capability provides."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from sp_lightning.core.plan.ledger import Ledger
from sp_lightning.core.weights.layer import StreamedLayer

if TYPE_CHECKING:
    from sp_lightning.core.engine.placement import Placement

Key = tuple[StreamedLayer, Optimizer]
"""A layer, and the optimizer whose state of that layer is meant: several optimizers may update parameters of one layer."""


class StateStore:
    """Keeps the state of a run's optimizers in host memory. Subclasses keep it elsewhere between two updates.

    Attributes:
        elsewhere: True if the state of some layers is not in host memory between updates. Then layers are updated one by one, in
            the order in which the updates are submitted, and each tensor of the state has separate memory.
        option: the user's option that needs separate updates of layers, for errors; empty if there is none.
        remark: a sentence for the user; empty if there is none.
    """

    elsewhere = False
    option = remark = ""

    def load(self, key: Key, part: Any) -> None:
        """Loads the state of a layer into host memory before its update.

        Args:
            key: the layer and the user's optimizer.
            part: the layer's part of that optimizer, with the optimizer's state.

        Raises:
            OSError: the state could not be read.
        """

    def store(self, key: Key, part: Any) -> None:
        """Stores the state of a layer after its update. The arguments are those of :meth:`load`."""

    def complete_pending(self) -> None:
        """Waits until all writes of state are complete.

        Raises:
            OSError: a write failed.
        """

    def absorb(self, optimizers: Iterable[Optimizer], layer_of: Callable[[nn.Parameter], StreamedLayer | None]) -> None:
        """Takes state that no update has made: the state of a checkpoint, or of an optimizer's own set-up.

        Args:
            optimizers: all optimizers of the run. No update is running.
            layer_of: the layer that a parameter is updated with.
        """

    def loaded(self, optimizers: Iterable[Optimizer]) -> None:
        """Called after :meth:`absorb` if the state is from a checkpoint. The state may still be in the checkpoint's file."""

    def step_begins(self, placement: Placement) -> None:
        """Called when an optimizer begins a step. ``placement``: the placement of the run."""

    def count(self, ledger: Ledger, placement: Placement) -> Ledger:
        """Returns a ledger of a run's host memory with the memory that this store takes. ``ledger`` has all state in memory."""
        return ledger


IN_MEMORY = StateStore()
