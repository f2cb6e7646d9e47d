"""The scope of a run: rules for runs of other threads of the process that are under way at the same time.

By default runs come one after the other, and the scope of all of them is :class:`RunScope`, whose methods allow everything and
change nothing. ``sharing`` gives the threads of its trials a scope each, and replaces the one of all other threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import lightning.pytorch as pl
import torch

from sp_lightning.engine.placement import Placement
from sp_lightning.model.found import Found
from sp_lightning.torch_compat.patched import scope
from sp_lightning.trainer.options import Options


class RunScope:
    """The scope of runs that share nothing. The methods are in the order of their calls.

    Attributes:
        shares_base: whether the run is a trial of a ``SharedBase``: other runs use the device's memory as well.
        placement: makes the engine's parts; None if the scope has none of its own.
    """

    shares_base: bool = False
    placement: Placement | None = None

    def check_devices(self) -> None:
        """Is called when a strategy is given several devices. Raises a ValueError if they are not supported."""

    def check_strategy(self, made_in: Any) -> None:
        """Is called when a strategy is connected to a module.

        Args:
            made_in: the value of ``torch_compat.patched.scope`` when the strategy was made.

        Raises:
            RuntimeError: it was made in another scope.
        """

    def take_trainer(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Is called when a trainer has a module, before anything else is done with the two.

        Raises:
            RuntimeError: an object of them belongs to another run that is under way.
        """
        TRAINERS.add(trainer)

    def begin(self, run: Any, options: Options, device: torch.device) -> int | float | None:
        """Begins a run, and returns its ``gpu_memory``.

        Args:
            run: the :class:`~sp_lightning.trainer.run.Run`, which has its module, and nothing else yet.
            options: the user's.
            device: where layers compute.

        Raises:
            ValueError: an option is not supported in this scope.
        """
        return options.gpu_memory

    def finds(self, module: pl.LightningModule, find: Callable[..., Found]) -> Callable[..., Found]:
        """Returns the function that finds the layers of a module, instead of the one that is given."""
        return find

    def step_begins(self) -> None:
        """Is called when a step of a loop begins."""


TRAINERS = WeakSet[Any]()
"""The trainers that were connected outside of all scopes of single threads."""
_outside = RunScope()


def current() -> RunScope:
    """Returns the scope of this thread's runs."""
    found: RunScope | None = scope.get()
    return _outside if found is None else found


def set_outside(instead: RunScope) -> None:
    """Sets the scope of threads that have none of their own."""
    global _outside
    _outside = instead
