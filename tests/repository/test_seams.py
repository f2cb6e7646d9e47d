"""Each seam of the engine takes another implementation than today's, which it was not written for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sp_lightning import SuperpipelineStrategy
from sp_lightning.device.device import Device, Stream
from sp_lightning.device.layout import part, versions
from sp_lightning.engine.host_source import HostSource
from sp_lightning.layers.gradients import Gradients
from sp_lightning.layers.layer import NoCasts, StreamedLayer
from sp_lightning.layers.slots import Staged
from sp_lightning.store.block import HostBlock
from sp_lightning.updates.background import BackgroundUpdates
from tests.support.models import Module, Stack, vectors
from tests.support.runs import assert_equal, assert_same, fit, fused, loader, superpipeline, trainer_for
from tests.support.tables import Text, numbers

# ---------------------------------------------------------------------- BlockSource


class FromFiles:
    """A disk tier, in small: what is staged was written to a file and read from it. Never ready before it is asked for."""

    folder: Path
    staged: list[str]

    def __init__(self, *args: Any) -> None:
        self._host = HostSource(*args)
        self.synchronize = self._host.synchronize
        self.invalidate = self._host.invalidate
        self.wait = self._host.wait

    def ready(self, layer: StreamedLayer) -> bool:
        return False

    def stage(self, layer: StreamedLayer) -> Staged:
        weights, event = self._host.stage(layer)
        file = self.folder / str(layer.index)
        file.write_bytes(weights.numpy().tobytes())
        self.staged.append(layer.name)
        return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8), event


def test_layers_come_from_another_source(tmp_path: Path) -> None:
    staged: list[str] = []
    source = type("FromHere", (FromFiles,), {"folder": tmp_path, "staged": staged})
    with mock.patch("sp_lightning.engine.placement.HostSource", source):
        ours = fit(lambda: Module(Stack()), vectors(), superpipeline(k=1))
    assert_same(ours, fit(lambda: Module(Stack()), vectors()))
    assert set(staged) >= {f"net.blocks.{i}" for i in range(4)}


class OfZeros(FromFiles):
    """Gives zeros, whatever the host has."""

    def stage(self, layer: StreamedLayer) -> Staged:
        weights, event = self._host.stage(layer)
        self.staged.append(layer.name)
        return torch.zeros_like(weights), event


def test_nothing_goes_round_the_source() -> None:
    """Layers, residents and the rows of a table are what the source gives, and not what the host has."""
    staged: list[str] = []
    source = type("OfZerosHere", (OfZeros,), {"staged": staged})
    module = Module(Text())
    with mock.patch("sp_lightning.engine.placement.HostSource", source):
        found = trainer_for(superpipeline(k=1)).predict(module, loader(numbers(1)))
    assert found is not None
    assert (found[0] == 0).all()
    assert {"net.table", "net.blocks.0"} <= set(staged)


# ---------------------------------------------------------------------- casts


class CastsByVersion(NoCasts):
    """The same casts as today's, known to be current by their masters' versions alone."""

    made = 0

    def __init__(self, block: HostBlock, masters: StreamedLayer, device: Device) -> None:
        self._block = block
        self._layer = masters
        self._masters = masters.block
        self._seen: list[int] = []

    @property
    def current(self) -> bool:  # type: ignore[override]
        return self._seen == versions(self._masters.parameters)

    def invalidate(self) -> None:
        self._seen = []

    def refresh(self, by: Stream | None = None, *, but: Collection[int] = ()) -> None:
        if not self.current:
            type(self).made += 1
            self._seen = versions(self._masters.parameters)
            with torch.no_grad():
                for cast, master in zip(self._block.planned.casts, self._masters.planned.spans, strict=True):
                    part(self._block.weights, cast).copy_(part(self._masters.weights, master))

    def offer(self, views: Sequence[Tensor]) -> None:
        self._layer.parameters.casts = views


def test_something_else_travels() -> None:
    CastsByVersion.made = 0
    with mock.patch("sp_lightning.engine.assembly.Casts", CastsByVersion):
        ours = fit(lambda: Module(Stack()), vectors(), superpipeline(k=1), precision="bf16-mixed")
    assert_same(ours, fit(lambda: Module(Stack()), vectors(), precision="bf16-mixed"))
    assert CastsByVersion.made >= 4


# ---------------------------------------------------------------------- GradientSink


class OfTwo(Gradients):
    """As if another process had found the same gradients: both are summed before they leave."""

    def arrived(self, layer: StreamedLayer, index: int, gradient: Tensor) -> bool:
        return super().arrived(layer, index, gradient + gradient)


class Doubled(Module):
    def loss(self, batch: Any) -> Tensor:
        return 2 * super().loss(batch)


def test_gradients_go_to_another_sink() -> None:
    with mock.patch("sp_lightning.engine.placement.Gradients", OfTwo):
        ours = fit(lambda: Module(Stack()), vectors(), superpipeline(k=1))
    plain = fit(lambda: Doubled(Stack()), vectors())
    assert_equal(ours.gradients, plain.gradients, "gradients")
    assert_equal(ours.state, plain.state, "state")


# ---------------------------------------------------------------------- the update of a layer


class AtOnce(BackgroundUpdates):
    """Each layer is updated where it is submitted."""

    order: list[int]

    def submit(self, layer: StreamedLayer, work: Callable[[], None], then: Callable[[], None] | None = None) -> None:
        self.order.append(layer.index)
        with torch.no_grad():
            work()
        if then is not None:
            then()


def test_updates_of_layers_are_done_by_somebody_else() -> None:
    order: list[int] = []
    with mock.patch("sp_lightning.engine.placement.BackgroundUpdates", type("AtOnceHere", (AtOnce,), {"order": order})):
        strategy = SuperpipelineStrategy(k=1, optimizer_overlap="backward")
        ours = fit(fused(lambda: Module(Stack())), vectors(), strategy, recorded="losses")
    assert_same(ours, fit(fused(lambda: Module(Stack())), vectors(), recorded="losses"))
    blocks = order[: len(strategy.plan.layers)]
    assert blocks == sorted(blocks, reverse=True)  # backward completes the last layer first
