"""The states of layers: every change that the table lists happens in a set of runs, and no other (see ``tests/conftest.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.core import engine as engine_package
from sp_lightning.core.device.device import Device
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.weights.layer import Kind, StreamedLayer
from sp_lightning.core.weights.states import FETCHED, HOST, IN_USE, RESTING, UNPACKED, LayerState
from tests.support.engine import step, streamed, update
from tests.support.simdevice import SimDevice
from tests.support.states import TRANSITIONS, Change, checked_states

pytestmark = pytest.mark.states

X = torch.ones(2, 4)
CPU = torch.device("cpu")


class Net(nn.Module):
    """Four layers, and a weight that is a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(4))
        self.between: Callable[[Net], Any] = lambda net: None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.between(self)
        return x * self.scale


def train(engine: Engine, net: Net, optimizer: torch.optim.Optimizer) -> None:
    def run() -> Tensor:
        loss = net(X).square().mean()
        engine.await_backward()
        engine.announce_backward(loss, quiet=False)
        return loss

    step(engine, run).backward()
    update(engine, optimizer)


def predict(engine: Engine, net: Net, *, quiet: bool = False) -> None:
    def run() -> None:
        with torch.inference_mode():
            net(X)

    step(engine, run, training=False, quiet=quiet)


def _keep(kept: list[Tensor], net: Net) -> None:
    kept.append(net.layers[1].weight.data)


def layer(engine: Engine, index: int) -> StreamedLayer:
    return next(each for each in engine.layers if each.name == f"layers.{index}")


@pytest.fixture(params=["cpu", "simulated"])
def device(request: Any) -> Device:
    """A device whose copies are synchronous, and one that checks what is ordered after what."""
    return Device(CPU) if request.param == "cpu" else SimDevice(CPU)


def runs(device: Device) -> Iterator[set[Change]]:
    """Trains, predicts and keeps views. Yields the changes of each."""
    for k in (1, 2, 4):
        net = Net()
        with checked_states() as seen, streamed(net, device, k=k, k_prime=1) as engine:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(3):
                train(engine, net, optimizer)
            predict(engine, net)
            predict(engine, net, quiet=True)
            kept: list[Tensor] = []
            keep = partial(_keep, kept)
            net.between = keep
            train(engine, net, optimizer)
            net.between = lambda net: None
            train(engine, net, optimizer)
            kept.clear()
            train(engine, net, optimizer)
            net.between = keep
            predict(engine, net)
        yield seen


@pytest.mark.rest("takes tenths of a second")
def test_all_listed_changes_happen(device: Device) -> None:
    seen = {(before, after) for changes in runs(device) for _, before, after in changes}
    listed = {pair for transition in TRANSITIONS.values() for pair in transition.pairs}
    assert seen <= listed
    # Autograd has dropped what it has unpacked when a layer is released that no module call uses. A layer leaves its slot in use
    # only if a host weight is given other memory inside of a call, which then ends with an error.
    assert {(before.name, after.name) for before, after in listed - seen} <= {
        ("UNPACKED", "VIEWED"),
        *((used, "HOST") for used in ("UNPACKED", "IN_USE", "RESTING")),
    }


def test_each_state_is_reached_and_left() -> None:
    pairs = {pair for transition in TRANSITIONS.values() for pair in transition.pairs}
    assert {before for before, _ in pairs} == {after for _, after in pairs} == set(LayerState)


def test_the_diagram_has_all_states_and_transitions() -> None:
    page = engine_package.__doc__ or ""
    assert [each.name for each in LayerState if each.name not in page] == []
    assert [name for name in TRANSITIONS if name not in page] == []


def test_what_a_layer_has_agrees_with_its_state(device: Device) -> None:
    net = Net()
    seen: list[LayerState] = []

    def look(net: Net) -> None:
        for each in engine.layers:
            slot, group = each.slot, each.parameters
            views = (
                [] if slot is None else [p for p in map(group.value, range(len(group.all))) if is_in(p, slot.memory)]
            )
            assert (slot is None) == (each.state is HOST)
            assert len(views) == len(group.all) * each.state.attached
            assert slot is None or slot.locked == each.state.locked
            assert (each in engine.residency.resting) == (each.state is RESTING)
            if each.kind is not Kind.RESIDENTS:
                assert (each in engine.residency.used) == (each.state in (UNPACKED, IN_USE))
            seen.append(each.state)

    with streamed(net, device, k=2, k_prime=1) as engine:
        net.between = look
        for each in net.layers:
            each.register_forward_hook(lambda *_: look(net))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net.layers[1].register_full_backward_hook(lambda *_: look(net))
        train(engine, net, optimizer)
        look(net)
    with streamed(net, device, k=4, k_prime=1) as engine:
        for _ in range(2):
            predict(engine, net)
            look(net)
    assert {HOST, FETCHED, IN_USE, RESTING, UNPACKED} <= set(seen)


def is_in(tensor: Tensor, memory: Tensor) -> bool:
    try:
        return memory.data_ptr() <= tensor.data_ptr() < memory.data_ptr() + memory.nbytes
    except RuntimeError:  # the tensor of a stand-in has no memory
        return False


def test_a_change_that_is_not_listed_fails() -> None:
    net = Net()
    with (
        streamed(net, Device(CPU), k=1, k_prime=1) as engine,
        pytest.raises(AssertionError, match="changes the state"),
    ):
        layer(engine, 0).state = RESTING
