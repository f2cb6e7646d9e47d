"""Makes the parts of the engine for training on several devices, with one process per device."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch

from sp_lightning.core.device.device import Device, Wait
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
from sp_lightning.experimental.ranks.ranks import Ranks
from sp_lightning.experimental.ranks.reduced_gradients import ReducedGradients
from sp_lightning.experimental.ranks.shared_updates import SharedUpdates
from sp_lightning.experimental.ranks.turns import RankTurns, SharedSource


class RankPlacement(Placement):
    """Makes the parts of the engine for one of several devices.

    Args:
        ranks: the processes.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def allocate(self, device: Device, plan: Plan) -> Allocate:
        remedy = "The layers were found by the memory that is free: say which they are, with layers= and gpu_memory=."
        self._ranks.must_agree("layers", {layer.name: human_bytes(layer.nbytes) for layer in plan.moving}, remedy)
        nbytes = sum(whole_pages(layer.nbytes) for layer in (*plan.moving, plan.residents))
        return shared_allocator(self._ranks, device, nbytes)

    def gradients(
        self, device: Device, staging: Staging, layers: Sequence[StreamedLayer], in_flight: int
    ) -> GradientSink:
        self._gradients = ReducedGradients(device, self._ranks, layers, staging, in_flight=in_flight)
        return self._gradients

    def updates(self, layers: Sequence[StreamedLayer], device: Device) -> BackgroundUpdates:
        if not device.computes_on_host:  # if models compute on the CPU, other ranks need the processors
            device.background_threads = update_threads(self._ranks.size)
        return SharedUpdates(layers, device, self._ranks, self._gradients)

    @property
    def source(self) -> type[HostSource]:
        return SharedSource

    def turns(
        self, lock: threading.RLock, layers: Sequence[StreamedLayer], source: HostSource, step: Step
    ) -> RankTurns:
        assert isinstance(source, SharedSource)
        turns = RankTurns(lock, self._ranks, layers, source, step, self._gradients)
        if self._ranks.primary:
            turns.cast()  # the casts are in shared memory, so only the primary computes them
        self._ranks.barrier("the first casts", why=Wait.READ_AFTER_FILL)
        return turns


def update_threads(processes: int) -> int:
    """Returns the number of threads for the primary's updates: the threads of all ranks, less one thread per rank for Python.

    The number is at most the number of processors less one per rank, but never less than this rank's own threads less one.
    Lightning gives each process its share of the processors, and torchrun gives each process one thread.

    Args:
        processes: the number of ranks of the node.
    """
    own = max(1, torch.get_num_threads() - 1)
    return max(own, min(own * processes, len(os.sched_getaffinity(0)) - processes))
