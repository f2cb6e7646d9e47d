"""Owners: which process steps which layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.core.weights.layer import StreamedLayer


class Owners:
    """The owners in a run of one process, which steps all layers. ``ranks`` has a subclass for several processes.

    Attributes:
        several: True if other processes step some layers. Then all processes call these methods in the same order.
    """

    several = False

    def owns(self, layer: StreamedLayer) -> bool:
        """Returns True if this process steps a layer and its masters."""
        return True

    def gather(self, optimizer: Optimizer, what: Callable[[], str]) -> None:
        """Called before an optimizer steps its first layer. All processes have arrived afterwards, with the same weights.

        Args:
            optimizer: the optimizer.
            what: returns the name of the step, for errors.
        """

    def may_begin(self, layer: StreamedLayer) -> bool:
        """Returns True if nothing in this process is against an update of a layer in the running backward.

        The layer's owner begins the update if the result is True in all processes. In other processes, later uses of the layer in
        this backward are then errors.
        """
        return True

    def follow(self) -> None:
        """Called when the updates of a step are submitted. From now on, uses of other processes' layers wait for their owners.

        If user code holds memory of such a layer, this method waits for the owner.
        """

    def begin_whole(self, optimizer: Optimizer, what: Callable[[], str]) -> None:
        """Called before an optimizer's own code steps all layers. Until :meth:`end_whole`, it has only owned parameters."""

    def end_whole(self, *, well: bool) -> None:
        """Ends the last :meth:`begin_whole`, if there is one. ``well``: False after an error."""

    def refuse_closure(self) -> None:
        """Raises a RuntimeError if an optimizer calls its closure after it may have written weights."""

    def norms(self, parameters: Sequence[nn.Parameter], own: Mapping[nn.Parameter, Tensor]) -> list[Tensor]:
        """Returns the norms of all gradients of an optimizer, in the order of its parameters.

        Args:
            parameters: the optimizer's parameters.
            own: the norms, or gradients, of the parameters that this process steps.
        """
        return list(own.values())

    def loading(self, module: nn.Module) -> AbstractContextManager[None]:
        """Returns a context for loading a state into a module. Afterwards all processes have the same weights."""
        return nullcontext()
