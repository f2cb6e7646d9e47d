"""The interface of layers of which single rows are uploaded: how they are found, and how their rows are made."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from sp_lightning.device.device import Device
from sp_lightning.model.found import Found, Layer, Place, Unit


class RowFinder:
    """Finds modules of which a batch uses only some rows. This default finds none, so every layer is uploaded whole.

    :func:`~sp_lightning.registry.row_finder` returns the finder of this installation. :func:`find_layers` asks it which
    modules have rows. When the engine has made the layers, it calls :meth:`make_rows`.
    """

    def stacked(self, module: nn.Module) -> int:
        """Returns the number of experts that a module holds in stacks, if single experts can be uploaded; otherwise 0."""
        return 0

    def callers(self, root: nn.Module) -> Mapping[nn.Module, nn.Module]:
        """Returns the modules with rows that an outer module calls with its own arguments, each with that module.

        The outer module (PEFT's adapters) reads the layer's weights before it calls the module that owns them. So the
        layer is uploaded for the call of the outer module.
        """
        return {}

    def looked_up(self, units: Sequence[Unit], places: Mapping[nn.Parameter, tuple[Place, ...]]) -> list[Unit]:
        """Returns the embeddings of which only the rows in a batch are uploaded.

        Args:
            units: the units that are streamed.
            places: all places of each parameter in the module tree.
        """
        return []

    def notes(self, units: Sequence[Unit], layers: Sequence[Layer], tables: Sequence[Layer]) -> list[str]:
        """Returns notes for the plan: which layers are uploaded by rows, and which stacks of experts cannot be."""
        return []

    def routed_share(self, module: nn.Module, args: Sequence[Any]) -> float:
        """Returns the share of a module's experts that a call with these arguments is expected to use."""
        return 1.0

    def make_rows(
        self, found: Found, layers: Sequence[Any], device: Device, log: logging.Logger | None, *, pin: bool
    ) -> dict[nn.Module, tuple[Any, ...]]:
        """Sets the :attr:`~sp_lightning.layers.layer.StreamedLayer.rows` of layers whose rows are uploaded.

        Args:
            found: what was found in the module.
            layers: the layers of the engine. Their ``rows`` are :class:`~sp_lightning.layers.layer.AllRows` until now.
            device: uploads rows.
            log: the logger for warnings; None for Lightning's.
            pin: whether host memory is page-locked.

        Returns:
            The embeddings of :attr:`Found.tables`, each with its layer.
        """
        return {}
