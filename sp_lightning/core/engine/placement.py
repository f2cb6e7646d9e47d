"""Placement: makes the parts of the engine that differ with the place of the weights and with the number of devices.

``Run._place`` (``trainer/run.py``) chooses: ``RankPlacement`` (``ranks``) for several devices, the placement of a ``SharedBase``
(``sharing``), ``FilePlacement`` or ``ScratchPlacement`` (``disk``) for weights in files, and otherwise :data:`ONE_DEVICE`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from sp_lightning.core.device.device import Device
from sp_lightning.core.engine.host_source import HostSource
from sp_lightning.core.engine.owners import Owners
from sp_lightning.core.engine.step import Step
from sp_lightning.core.layers.gradients import Gradients, GradientSink
from sp_lightning.core.layers.layer import StreamedLayer
from sp_lightning.core.layers.ring import Uploads
from sp_lightning.core.model.found import Layer
from sp_lightning.core.plan.ledger import Ledger
from sp_lightning.core.plan.plan import Plan, PlannedLayer
from sp_lightning.core.store.block import HostBlock
from sp_lightning.core.store.block_memory import Allocate, BlockMemory, Staging
from sp_lightning.core.updates.background import BackgroundUpdates


class Placement:
    """Makes the parts of the engine for weights in host memory, and for one device. Subclasses make other parts.

    Attributes:
        remark: a sentence for the user; empty if there is none.
        pages: True if trained weights or gradients of some layers leave host memory between their uses. Then optimizers step
            layer by layer.
        pages_gradients: True if gradients of some layers leave host memory. Then gradients are clipped and stepped one layer at a
            time, in float32.
    """

    remark = ""
    pages = pages_gradients = False

    def __init__(self, remark: str = "") -> None:
        self.remark = remark

    def count(self, ledger: Ledger) -> Ledger:
        """Returns a ledger of the weights and gradients that are in host memory. ``ledger`` counts all weights and gradients."""
        return ledger

    def leave(self) -> None:
        """Evicts weights from host memory that are also stored elsewhere. Called after training."""

    def complete_pending(self) -> None:
        """Waits until all writes of weights and gradients are complete.

        Raises:
            OSError: a write failed.
        """

    def allocate(self, device: Device, plan: Plan) -> Allocate:
        """Returns the function that allocates host memory for the plan's layers. It is called in the order of the layers."""
        return partial(BlockMemory, device)

    def block(self, layer: Layer, planned: PlannedLayer, *args: Any, **options: Any) -> HostBlock:
        """Makes the host block of a layer, with the arguments of :class:`~sp_lightning.core.store.block.HostBlock`."""
        return HostBlock(layer, planned, *args, **options)

    def uploads(self, device: Device, log: logging.Logger | None) -> Uploads:
        """Returns the part that copies layers to slots."""
        return Uploads(device)

    def gradients(
        self, device: Device, staging: Staging, layers: Sequence[StreamedLayer], in_flight: int
    ) -> GradientSink:
        """Returns the part that takes gradients. ``in_flight``: the number of layers whose gradients may be on the device."""
        return Gradients(device, staging, in_flight=in_flight)

    def updates(self, layers: Sequence[StreamedLayer], device: Device) -> BackgroundUpdates:
        """Returns the part that runs updates in the background."""
        return BackgroundUpdates(layers, device)

    @property
    def source(self) -> type[HostSource]:
        """The class of the part that provides the layers' bytes."""
        return HostSource

    def owners(self, lock: threading.RLock, layers: Sequence[StreamedLayer], source: HostSource, step: Step) -> Owners:
        """Returns the part that knows which process steps which layer. It is made last."""
        return Owners()


ONE_DEVICE = Placement()
