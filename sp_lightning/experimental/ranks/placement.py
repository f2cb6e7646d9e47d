"""Makes the parts of the engine for training on several devices, with one process per device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sp_lightning.core.device.layout import whole_pages
from sp_lightning.core.engine.host_source import HostSource
from sp_lightning.core.engine.placement import Placement
from sp_lightning.core.plan.units import human_bytes
from sp_lightning.core.store.block_memory import Allocate
from sp_lightning.core.updates.background import BackgroundUpdates
from sp_lightning.core.weights.gradients import GradientSink
from sp_lightning.experimental.ranks.block_memory import shared_allocator
from sp_lightning.experimental.ranks.gradients import SummedGradients
from sp_lightning.experimental.ranks.owners import RankOwners, SharedSource
from sp_lightning.experimental.ranks.updates import OwnerUpdates

if TYPE_CHECKING:
    from sp_lightning.core.engine.engine import Engine
    from sp_lightning.experimental.ranks.ranks import Ranks


class RankPlacement(Placement):
    """Makes the parts of the engine for one of several devices.

    Args:
        ranks: the processes.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def allocate(self, engine: Engine) -> Allocate:
        plan = engine.plan
        self._ranks.compare(
            "a comparison of layers",
            {("layers", layer.name): human_bytes(layer.nbytes) for layer in plan.moving},
            "The layers were found by the memory that is free: say which they are, with layers= and gpu_memory=.",
        )
        nbytes = sum(whole_pages(layer.nbytes) for layer in (*plan.moving, plan.residents))
        return shared_allocator(self._ranks, engine.device, nbytes)

    def gradients(self, engine: Engine) -> GradientSink:
        engine.device.check = self._ranks.check
        self._owners = owners = RankOwners(self._ranks, engine)
        return SummedGradients(engine, self._ranks, owners)

    def updates(self, engine: Engine) -> BackgroundUpdates:
        return OwnerUpdates(engine, self._owners)

    @property
    def source(self) -> type[HostSource]:
        return SharedSource

    def owners(self, engine: Engine) -> RankOwners:
        self._owners.fill()
        return self._owners
