"""The group: the processes that train one module together. This is the interface of ``ranks``, with the default for one device.

On one device the group is :data:`ALONE`, whose methods return at once. ``ranks`` has the group of several devices, most of whose
methods are collective: all processes call them in the same order. They are called when a run, a loop or a batch begins, not for
each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.engine.placement import Placement
from sp_lightning.trainer.options import Options


class OwnedSteps:
    """Changes of several devices to optimizers, gradient scaler and clipping. This default, for one device, changes nothing."""

    def attach(self, optimizers: list[Optimizer], scaler: Any, plugin: Any) -> None:
        """Assigns each layer to a process, and changes the objects so that each process steps its layers.

        Args:
            optimizers: the optimizers.
            scaler: the gradient scaler; None if there is no scaler.
            plugin: the precision plugin, which clips.
        """

    def detach(self) -> None:
        """Restores scaler and plugin. An optimizer's state stays divided."""

    def owned(self, optimizers: list[Optimizer]) -> AbstractContextManager[None]:
        """Returns a context in which optimizers have only the parameters that this process steps."""
        return nullcontext()


class Group:
    """The default: one process that trains alone.

    Attributes:
        alone: True if there is only this process.
        size: the number of this node's processes, each with its own device.
        nodes: the number of nodes.
        closed: True if the group has ended. The strategy then uses :data:`ALONE`, and behaves as on one device.
    """

    alone = True
    size = 1
    nodes = 1
    closed = False

    # ------------------------------------------------------------------ before work begins

    def check_model(self, module: pl.LightningModule, options: Options, plugin: Any) -> None:
        """Checks that the module and the options are supported, and that they are the same in all processes.

        Raises:
            ValueError: the module or an option is not supported, or differs between processes.
        """

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Checks that all processes have the same optimizers. The error is a ``ValueError``."""

    # ------------------------------------------------------------------ the parts of a run

    def placement(self) -> Placement | None:
        """Returns the placement for several devices; None on one device, where other options determine the placement."""
        return None

    def steps(self, engine: Callable[[], Engine]) -> OwnedSteps:
        """Returns the object for optimizer steps. ``engine`` returns the present engine, which may be replaced during a run."""
        return OwnedSteps()

    def owned_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Returns this process's part of an optimizer's state dictionary."""
        return state

    # ------------------------------------------------------------------ during a run

    def note_place(self, place: str) -> None:
        """Records how far this process is in the training.

        Args:
            place: the point in words. If other processes wait for this process in vain, their errors name the point.
        """

    def barrier(self, what: str) -> object:
        """Waits until all processes of all nodes have called this method. ``what`` names the barrier in errors."""

    def gather(self, number: int, what: str) -> list[int]:
        """Returns the numbers that all processes of the node pass. ``what`` names the collective in errors."""
        return [number]

    def send_buffers(self, module: pl.LightningModule) -> None:
        """Copies the first process's buffers to all processes, as DistributedDataParallel does."""

    def fail(self, error: BaseException) -> None:
        """Reports an error of this process to the other processes, so that they stop waiting for this one."""


ALONE = Group()
"""The group of a strategy on one device."""
