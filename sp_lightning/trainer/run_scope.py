"""The scope of a run: rules for runs in several threads of the process at the same time.

By default there is one run at a time, and the scope of all runs is :class:`RunScope`, whose methods allow everything. ``sharing``
gives the thread of each trial a scope of its own, and replaces the scope of all other threads (:func:`set_outside`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import lightning.pytorch as pl
import torch

from sp_lightning.core.engine.placement import Placement
from sp_lightning.core.model.found import Found
from sp_lightning.core.torch_compat.patched import scope
from sp_lightning.trainer.options import Options


class RunScope:
    """The scope of runs that share nothing. The methods are in the order of their calls.

    Attributes:
        shares_base: True if the run is a trial of a ``SharedBase``. Other runs then use the device's memory as well.
        placement: makes the parts of the engine that depend on where weights are stored; None if the scope does not require one.
    """

    shares_base: bool = False
    placement: Placement | None = None

    def check_devices(self) -> None:
        """Called when a strategy gets several devices. Raises a ValueError if this scope does not support them."""

    def check_strategy(self, made_in: Any) -> None:
        """Called when a strategy is connected to a module.

        Args:
            made_in: the value of ``torch_compat.patched.scope`` when the strategy was made.

        Raises:
            RuntimeError: the strategy was made in another scope.
        """

    def take_trainer(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Records a trainer. Called when the trainer has got its module, before the strategy changes either of them.

        Raises:
            RuntimeError: the trainer, the module or one of their parts belongs to another run that is under way.
        """
        TRAINERS.add(trainer)

    def begin(self, run: Any, options: Options, device: torch.device) -> int | float | None:
        """Called when a run begins. Returns the run's ``gpu_memory``.

        Args:
            run: the :class:`~sp_lightning.trainer.run.Run`. It has its module, but no engine yet.
            options: the user's options.
            device: the device on which the layers compute.

        Raises:
            ValueError: an option is not supported in this scope.
        """
        return options.gpu_memory

    def finds(self, module: pl.LightningModule, find: Callable[..., Found]) -> Callable[..., Found]:
        """Returns the function that finds the layers of a module. It may replace or wrap ``find``."""
        return find

    def step_begins(self) -> None:
        """Called when a step of a loop begins."""


TRAINERS = WeakSet[Any]()
"""The trainers that were connected in threads without a scope of their own. ``sharing`` refuses trials while one of them runs."""
_outside = RunScope()


def current() -> RunScope:
    """Returns the scope of this thread's runs."""
    found: RunScope | None = scope.get()
    return _outside if found is None else found


def set_outside(instead: RunScope) -> None:
    """Sets the scope of threads that have none of their own."""
    global _outside
    _outside = instead
