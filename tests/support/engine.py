"""The engine without Lightning: a module streamed over any device, and a record of what happens when.

Tests import the engine's classes that they patch from here, so that a move of a class changes one file of tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from sp_lightning.core.device.device import Device
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.engine.schedule import Trace as Trace
from sp_lightning.core.engine.uses import Calls, Visits
from sp_lightning.core.engine.uses import ModuleCall as ModuleCall
from sp_lightning.core.engine.uses import Uses as Uses
from sp_lightning.core.engine.uses import listen as listen
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan
from sp_lightning.core.updates.background import BackgroundUpdates
from sp_lightning.core.weights.gradients import Gradients
from sp_lightning.core.weights.layer import Kind, Slot, StreamedLayer
from sp_lightning.core.weights.ring import Slots
from sp_lightning.core.weights.ring import Uploads as Uploads


def engine_of(strategy: Any) -> Any:
    """The engine of a strategy's run; None outside of one, and for other strategies."""
    run = getattr(strategy, "_run", None)
    return None if run is None else run.engine_or_none


def choose(strategy: Any, **options: Any) -> None:
    """Gives a strategy that exists already other options, for its next run."""
    strategy._options = replace(strategy._options, **options)


@contextmanager
def streamed(
    module: nn.Module, device: Device, *, k: int, k_prime: int, autocast: torch.dtype | None = None
) -> Iterator[Engine]:
    """Stream a module; host parameters are back in it afterwards."""
    found = find_layers(module, autocast=autocast)
    engine = Engine(module, found, make_plan(found, k=k, k_prime=k_prime), device, pin=False)
    try:
        yield engine
    finally:
        engine.close()


def three_linears() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def step(engine: Engine, run: Callable[[], Any], *, training: bool = True, quiet: bool = False) -> Any:
    """One step, as the strategy does it in manual optimization."""
    engine.begin("train" if training else "predict", training=training, manual=training, quiet=quiet)
    with engine.saving():
        result = run()
    engine.end()
    return result


def update(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer's step, as the strategy's hooks on it do."""
    engine.updating.before(deferred=False)
    optimizer.step()
    engine.invalidate()


@contextmanager
def events() -> Iterator[list[str]]:
    """What happens to which layer, in order: one word and the layer's index, ``R`` for the residents."""
    happened: list[str] = []
    fetch, use, release = Slots.fetch, Slots.lock, Slots.release
    drain, apply, hold = Gradients.drain, Gradients._apply_drain, Calls.enter

    def name(layer: StreamedLayer) -> str:
        return "R" if layer.kind is Kind.RESIDENTS else str(layer.index)

    def note_fetch(self: Slots, transfer: Any) -> None:
        happened.append("fetch " + "+".join(str(layer.index) for layer, *_ in transfer))
        fetch(self, transfer)

    def note_use(self: Slots, layer: StreamedLayer, **more: Any) -> Slot:
        happened.append(f"use {layer.index}")
        return use(self, layer, **more)

    def note_release(self: Slots, layer: StreamedLayer, slot: Slot) -> bool:
        happened.append(f"release {layer.index}")
        return release(self, layer, slot)

    def note_enter(self: Calls, visits: Visits, inputs: Any) -> Visits:
        visits = hold(self, visits, inputs)
        happened.extend(f"forward {layer.index}" for layer in visits)
        return visits

    def note_drain(self: Gradients, layer: StreamedLayer) -> None:
        received = self._received.get(layer.owner)
        if received is not None and received.gradients:
            happened.append(f"drain {name(layer)}")
        drain(self, layer)

    def note_apply(self: Gradients, landed: Any) -> None:
        happened.append(f"apply {name(landed[0])}")
        apply(self, landed)

    with (
        mock.patch.object(Slots, "fetch", note_fetch),
        mock.patch.object(Slots, "lock", note_use),
        mock.patch.object(Slots, "release", note_release),
        mock.patch.object(Calls, "enter", note_enter),
        mock.patch.object(Gradients, "drain", note_drain),
        mock.patch.object(Gradients, "_apply_drain", note_apply),
    ):
        yield happened


@contextmanager
def taken_apart() -> Iterator[list[int]]:
    """The layers that are updated by themselves, in order."""
    layers: list[int] = []
    submit = BackgroundUpdates.submit

    def noted(self: BackgroundUpdates, layer: StreamedLayer, work: Callable[[], None], *then: Any) -> None:
        layers.append(layer.index)
        submit(self, layer, work, *then)

    with mock.patch.object(BackgroundUpdates, "submit", noted):
        yield layers


def at_once(self: Device, work: Callable[[], None], urgency: int | None = None) -> Future[None]:
    """In place of the background thread."""
    future: Future[None] = Future()
    work()
    future.set_result(None)
    return future
