"""Turns: which process may change the weights, and when."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import nn


class Turns:
    """The turns of a single process: no other process uses the weights, so the process may change them at any time.

    A subclass lets several processes, which share the weights, take turns.

    Attributes:
        several: True if other processes share the weights. Then all processes call these methods in the same order.
    """

    several = False

    def gather(self, what: Callable[[], str]) -> None:
        """Called before the optimizer step of the first layer. Afterwards all processes have the same weights and gradients.

        Args:
            what: returns the name of the step, for errors.
        """

    def loading(self, module: nn.Module) -> AbstractContextManager[None]:
        """Returns a context for loading a state into a module. Afterwards all processes have the same weights."""
        return nullcontext()
