"""The group: the processes that train one module together. This is the interface of ``ranks``, with the default for one device.

On one device the group is :data:`ALONE`, whose methods return at once. ``ranks`` has the group of several devices, most of whose
methods are collective: all processes call them in the same order. They are called when a run, a loop or a batch begins, not for
each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from sp_lightning.core.engine.placement import Placement
from sp_lightning.core.engine.streamer import Streamer
from sp_lightning.trainer.options import Options


class WholeSteps:
    """Optimizer steps that are not divided into layers. On one device this default does not change them.

    With several devices, one rank runs such a step for all ranks.
    """

    def attach(self, optimizers: list[Optimizer], scaler: Any) -> None:
        """Replaces the steps of optimizers. This default replaces nothing.

        Args:
            optimizers: the optimizers whose steps are not divided into layers.
            scaler: the gradient scaler, whose unscaling is replaced as well; None if there is no scaler.
        """

    def detach(self) -> None:
        """Restores the optimizers' own steps."""

    def clipping(
        self, methods: dict[str, Callable[..., None]], plugin: Any, *, in_updates: bool
    ) -> dict[str, Callable[..., None]]:
        """Returns, by name, the clipping methods to use during one step in place of the precision plugin's.

        Args:
            methods: the methods that clip layer by layer; empty if the plugin's own are used.
            plugin: the precision plugin.
            in_updates: True if the step is divided into layers, and its updates run in the background.
        """
        return methods


class Group:
    """The default: one process that trains alone.

    Attributes:
        alone: True if there is only this process.
        size: the number of this node's processes, each with its own device.
        nodes: the number of nodes.
        primary: True if this process updates the weights of its node.
        closed: True if the group has ended. The strategy then uses :data:`ALONE`, and behaves as on one device.
    """

    alone = True
    size = 1
    nodes = 1
    primary = True
    closed = False

    # ------------------------------------------------------------------ before work begins

    def check_model(self, module: pl.LightningModule, options: Options, plugin: Any) -> None:
        """Checks that the module and the options are supported, and that they are the same in all processes.

        Raises:
            ValueError: the module or an option is not supported, or differs between processes.
        """

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Checks that all processes have the same optimizers. The error is a ``ValueError``."""

    def check_batches(self, trainer: pl.Trainer) -> None:
        """Checks that all processes have the same number of batches. The error is a ``ValueError``."""

    def check_weights(self, module: pl.LightningModule, when: str) -> None:
        """Checks that all nodes have the same weights. The caller has put the host parameters into the module.

        Args:
            module: the module.
            when: the time in words, for the error.

        Raises:
            ValueError: a node has different weights.
        """

    # ------------------------------------------------------------------ the parts of a run

    def placement(self) -> Placement | None:
        """Returns the placement for several devices; None on one device, where other options determine the placement."""
        return None

    def steps(self, engine: Callable[[], Streamer]) -> WholeSteps:
        """Returns the object for steps that are not divided into layers.

        Args:
            engine: returns the present engine. During a run, it may be replaced by a new one.
        """
        return WholeSteps()

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
