"""Makes the parts of the engine for training on several devices, with one process per device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sp_lightning.core.device.device import Device
from sp_lightning.core.device.layout import whole_pages
from sp_lightning.core.engine.host_source import HostSource
from sp_lightning.core.engine.placement import Placement
from sp_lightning.core.engine.step import Step
from sp_lightning.core.layers.gradients import GradientSink
from sp_lightning.core.layers.layer import StreamedLayer
from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.plan.units import human_bytes
from sp_lightning.core.store.block_memory import Allocate, Staging
from sp_lightning.core.updates.background import BackgroundUpdates
from sp_lightning.experimental.ranks.block_memory import shared_allocator
from sp_lightning.experimental.ranks.gradients import SummedGradients
from sp_lightning.experimental.ranks.owners import RankOwners, SharedSource
from sp_lightning.experimental.ranks.updates import OwnerUpdates

if TYPE_CHECKING:
    from sp_lightning.experimental.ranks.ranks import Ranks


class RankPlacement(Placement):
    """Makes the parts of the engine for one of several devices.

    Args:
        ranks: the processes.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def allocate(self, device: Device, plan: Plan) -> Allocate:
        self._ranks.compare(
            "a comparison of layers",
            {("layers", layer.name): human_bytes(layer.nbytes) for layer in plan.moving},
            "The layers were found by the memory that is free: say which they are, with layers= and gpu_memory=.",
        )
        nbytes = sum(whole_pages(layer.nbytes) for layer in (*plan.moving, plan.residents))
        return shared_allocator(self._ranks, device, nbytes)

    def gradients(
        self, device: Device, staging: Staging, layers: Sequence[StreamedLayer], in_flight: int
    ) -> GradientSink:
        self._owners = RankOwners(self._ranks, layers)
        return SummedGradients(device, self._ranks, self._owners, layers, staging, in_flight=in_flight)

    def updates(self, layers: Sequence[StreamedLayer], device: Device) -> BackgroundUpdates:
        return OwnerUpdates(layers, device, self._owners)

    @property
    def source(self) -> type[HostSource]:
        return SharedSource

    def owners(
        self, lock: threading.RLock, layers: Sequence[StreamedLayer], source: HostSource, step: Step
    ) -> RankOwners:
        self._owners.connect(lock, source, step)
        self._owners.fill()
        return self._owners
