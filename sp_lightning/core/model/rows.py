"""The interface for layers of which single rows are uploaded: finds the layers, and makes the objects that upload their rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from sp_lightning.core.device.device import Device
from sp_lightning.core.model.found import Found, Layer, Place, Unit


class RowFinder:
    """Finds modules of which a batch uses only some rows. This default finds none, so every layer is uploaded whole.

    :func:`row_finder` returns the finder of this installation. ``find_layers`` calls the finder to learn which modules have
    rows. The engine calls :meth:`make_rows` after it has made the layers.
    """

    def stacked(self, module: nn.Module) -> int:
        """Returns the number of experts that a module holds in stacks. Returns 0 if single experts cannot be uploaded."""
        return 0

    def callers(self, root: nn.Module) -> Mapping[nn.Module, nn.Module]:
        """Returns the modules with rows that an outer module calls with its own arguments, each with its outer module.

        The outer module (for example an adapter of PEFT) reads the layer's weights before it calls the module that owns them. So
        the layer is uploaded for the call of the outer module.
        """
        return {}

    def tables_in(self, units: Sequence[Unit], places: Mapping[nn.Parameter, tuple[Place, ...]]) -> list[Unit]:
        """Takes embeddings of which only the rows in a batch are uploaded out of the units of larger modules.

        Args:
            units: the units that do not stay on the device. They lose the weights of these embeddings.
            places: all places of each parameter in the module tree.

        Returns:
            The units of these embeddings.
        """
        return []

    def looked_up(self, units: Sequence[Unit], places: Mapping[nn.Parameter, tuple[Place, ...]]) -> list[Unit]:
        """Returns the embeddings of which only the rows in a batch are uploaded.

        Args:
            units: the units that do not stay on the device.
            places: all places of each parameter in the module tree.
        """
        return []

    def notes(self, units: Sequence[Unit], layers: Sequence[Layer], tables: Sequence[Layer]) -> list[str]:
        """Returns notes for the plan: the layers that are uploaded by rows, and the stacks of experts that cannot be.

        Args:
            units: all units.
            layers: the layers, without tables.
            tables: the embeddings that are uploaded by rows.
        """
        return []

    def advice(self, root: nn.Module, streamed: Sequence[Unit]) -> str:
        """Returns a sentence on experts that are uploaded together and could be uploaded one by one; "" if there are none.

        Args:
            root: the module.
            streamed: the units that are layers.
        """
        return ""

    def routed_share(self, module: nn.Module, args: Sequence[Any]) -> float:
        """Returns the share of a module's experts that a call with these arguments is expected to use; 1 if it is not known."""
        return 1.0

    def make_rows(
        self, found: Found, layers: Sequence[Any], device: Device, log: logging.Logger | None, *, pin: bool
    ) -> dict[nn.Module, tuple[Any, ...]]:
        """Sets the :attr:`~sp_lightning.core.weights.layer.StreamedLayer.rows` of layers whose rows are uploaded.

        Args:
            found: what was found in the module.
            layers: the engine's layers. Before the call, their ``rows`` are :class:`~sp_lightning.core.weights.layer.AllRows`.
            device: uploads rows.
            log: the logger for warnings; None for Lightning's logger.
            pin: True to page-lock host memory.

        Returns:
            The embedding modules of :attr:`Found.tables`, each with its layer as the only element of a tuple.
        """
        return {}


_make: Callable[[], RowFinder] = RowFinder


def install(make: Callable[[], RowFinder]) -> None:
    """Sets the function that returns the finder of this installation."""
    global _make
    _make = make


def row_finder() -> RowFinder:
    """Returns the finder of this installation."""
    return _make()
