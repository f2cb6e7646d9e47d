"""Averages of a model's weights that are kept in buffers, as latent diffusion's ``LitEma`` keeps them.

They stay on the host, where the weights are between steps: ``average.type_as(weight)`` makes a copy where the two are
apart, and what is then written to it is lost. Called within a step, such a module finds the host's weights, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

# Other modules have as many buffers as a small module has weights, too.
_FEW = 2


def find_averages(root: nn.Module) -> list[nn.Module]:
    """The modules without parameters whose buffers have the shapes of all weights, or all trained ones, of a module."""
    bare = [module for module in root.modules() if not any(True for _ in module.parameters())]
    weights = {tuple(p.shape for p in module.parameters()) for module in root.modules()}
    weights |= {tuple(p.shape for p in module.parameters() if p.requires_grad) for module in root.modules()}
    copies = {module: tuple(buffer.shape for buffer in module.buffers() if buffer.dim()) for module in bare}
    return [module for module, shapes in copies.items() if len(shapes) > _FEW and shapes in weights]


class OnTheHost:
    """A gate's keeper: what a module does in its call, it does as code from outside does, with the host's weights."""

    def __init__(self, reading: Callable[[], AbstractContextManager[None]]) -> None:
        self._reading = reading
        self._under_way: list[AbstractContextManager[None]] = []

    def enter(self, visits: Sequence[int], inputs: Any) -> Sequence[int]:
        """The module is called."""
        reading = self._reading()
        reading.__enter__()
        self._under_way.append(reading)
        return visits

    def leave(self, visits: Sequence[int], output: Any) -> None:
        """The call has returned, or raised."""
        self._under_way.pop().__exit__(None, None, None)
