"""The group: the processes that train one module together, as a run and a strategy see them.

On one device it is :data:`ALONE`, whose methods return at once. ``ranks`` has the group of several devices. Its methods are
collective: all processes call them in the same order. They are called when a run, a loop or a batch begins, and not per layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from sp_lightning.device.device import Device
from sp_lightning.engine.placement import Placement
from sp_lightning.engine.streamer import Streamer
from sp_lightning.observe.messages import say_once
from sp_lightning.plan.choices import Transfer
from sp_lightning.trainer.options import Options


class WholeSteps:
    """Optimizer steps that are not split by layers. On one device they stay as the user made them."""

    def attach(self, optimizers: list[Optimizer], scaler: Any) -> None:
        """Takes over the steps of optimizers.

        Args:
            optimizers: those whose steps are not split by layers.
            scaler: the gradient scaler; None without one.
        """

    def detach(self) -> None:
        """Gives the optimizers their own steps back."""

    def clipping(
        self, methods: dict[str, Callable[..., None]], plugin: Any, *, in_updates: bool
    ) -> dict[str, Callable[..., None]]:
        """Returns the methods that replace a precision plugin's in one step, by name.

        Args:
            methods: those that the step itself replaces.
            plugin: the precision plugin.
            in_updates: updates in the background clip.
        """
        return methods


class Group:
    """One process that trains alone.

    Attributes:
        alone: whether there is only this process.
        size: how many processes this node has, each with its own device.
        nodes: how many nodes there are.
        primary: whether this process updates the weights of its node.
        first: whether this process is the first of all.
    """

    alone = True
    size = 1
    nodes = 1
    primary = True
    first = True

    @property
    def closed(self) -> bool:
        """True if the group is over."""
        return False

    @property
    def failure(self) -> str:
        """This process's own error; empty if it has none."""
        return ""

    # ------------------------------------------------------------------ before work begins

    def check_model(self, module: pl.LightningModule, options: Options, plugin: Any) -> None:
        """Checks that the module and the options are supported, and the same in all processes.

        Raises:
            ValueError: they are not.
        """

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Checks that all processes have the same optimizers. The error is a ``ValueError``."""

    def check_batches(self, trainer: pl.Trainer) -> None:
        """Checks that all processes have the same number of batches. The error is a ``ValueError``."""

    def check_weights(self, module: pl.LightningModule, when: str, optimizers: Sequence[Optimizer]) -> None:
        """Checks that all nodes have the same weights, while the module has the host's parameters.

        Args:
            module: the module.
            when: the time in words, for the error.
            optimizers: those whose state is compared as well.

        Raises:
            ValueError: some node has other weights.
        """

    # ------------------------------------------------------------------ the parts of a run

    def placement(self, transfer: Transfer, device: Device, log: logging.Logger, *, trains: bool) -> Placement | None:
        """Returns the parts of the engine of several devices; None on one device, where other options choose them."""
        warn_of_one_device(transfer, log)
        return None

    def steps(self, engine: Callable[[], Streamer]) -> WholeSteps:
        """Returns the steps of optimizers that are not split by layers.

        Args:
            engine: returns the engine, which may be built anew while a run lasts.
        """
        return WholeSteps()

    # ------------------------------------------------------------------ while a run lasts

    def note_place(self, place: str) -> None:
        """Notes where this process is in the training, for errors of other processes."""

    def meet(self, what: str) -> None:
        """Waits until all processes of the node are here. ``what`` names it for errors."""

    def gather(self, number: int, what: str) -> list[int]:
        """Returns the numbers of all processes of the node. ``what`` names them for errors."""
        return [number]

    def send_buffers(self, module: pl.LightningModule) -> None:
        """Overwrites the buffers of all processes with those of the first one, as DistributedDataParallel does."""

    def fail(self, error: BaseException) -> None:
        """Announces an error of this process, so that the others stop waiting for it."""


ALONE = Group()


def warn_of_one_device(transfer: Transfer, log: logging.Logger) -> None:
    """Logs once that an option for several devices of a node has no effect on one device."""
    if transfer == "sharded":
        say_once(
            log, 'Superpipeline: transfer="sharded" changes nothing: no other device on this node could bring slices.'
        )
