"""When a layer has a write guard, what it remembers, and when it goes. That its rules give equal results is tested elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.device.device import Device
from sp_lightning.engine.streamer import Streamer
from sp_lightning.layers.layer import StreamedLayer
from sp_lightning.layers.states import FETCHED, HELD, HOST
from sp_lightning.layers.write_guard import WriteGuard
from tests.support.engine import step, streamed, update

X = torch.ones(2, 4)
CPU = Device(torch.device("cpu"))


class Net(nn.Module):
    """Four layers, in whose forward user code runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.user_code: Callable[[nn.Parameter], Any] = lambda weight: None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.user_code(self.layers[1].weight)
        return x


class Run:
    """A streamed net: the layer that user code touches, and one step."""

    def __init__(self, streamer: Streamer, net: Net) -> None:
        self.streamer, self.net = streamer, net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @property
    def layer(self) -> StreamedLayer:
        return next(each for each in self.streamer._layers if each.name == "layers.1")

    @property
    def guard(self) -> WriteGuard:
        assert self.layer.guard is not None
        return self.layer.guard

    @property
    def guards(self) -> list[str]:
        return [each.name for each in self.streamer._layers if each.guard is not None]

    def step(self, user_code: Callable[[nn.Parameter], Any] = lambda weight: None) -> None:
        """Trains with one batch, and updates."""
        self.net.user_code = user_code

        def run() -> Tensor:
            loss = self.net(X).square().mean()
            self.streamer.await_backward()
            self.streamer.announce_backward(loss, quiet=False)
            return loss

        step(self.streamer, run).backward()
        update(self.streamer, self.optimizer)


@contextmanager
def running(k: int = 2) -> Iterator[Run]:
    net = Net()
    with streamed(net, CPU, k=k, k_prime=1) as streamer:
        yield Run(streamer, net)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_plain_code_has_none(k: int) -> None:
    found: list[str] = []
    with running(k) as run:
        for layer in run.net.layers:
            layer.register_forward_hook(lambda *_: found.extend(run.guards))
            layer.register_full_backward_pre_hook(lambda *_: found.extend(run.guards))
        for _ in range(3):
            run.step()
            found += run.guards
        with torch.no_grad():
            run.net.layers[2].weight.zero_()  # between steps, on the host
        run.step()
        assert found + run.guards == []


def test_a_write_that_a_version_shows_leaves_none() -> None:
    def write(weight: nn.Parameter) -> None:
        with torch.no_grad():
            weight.mul_(2.0)

    with running() as run:
        before = run.net.layers[1].weight.clone()

        def forward() -> None:
            run.net.user_code = write
            with torch.inference_mode():
                run.net(X)

        step(run.streamer, forward, training=False)
        assert run.guards == []
        assert torch.equal(run.net.layers[1].weight, 2.0 * before)


def test_data_exposes_a_weight_until_its_release() -> None:
    seen: list[set[int]] = []

    def look(run: Run, weight: nn.Parameter) -> None:
        assert run.guards == []
        data = weight.data
        seen.append(set(run.guard.exposed))
        del data

    with running() as run:
        run.step(lambda weight: look(run, weight))
        assert seen == [{0}]
        assert run.guards == []


def test_a_view_that_is_kept_is_compared_with_digests_after_the_step() -> None:
    kept: list[Tensor] = []
    with running() as run:
        run.step(lambda weight: kept.append(weight.data))
        guard = run.guard
        assert run.guards == ["layers.1"]
        assert run.layer.state is HELD
        assert guard.views
        assert guard.digests is not None
        run.step()
        assert run.guard is guard  # as long as it is kept
        kept.clear()
        run.step()
        assert run.guards == []
        assert run.layer.state in (HOST, FETCHED)


def test_memory_that_a_weight_was_given_is_remembered_while_user_code_holds_it() -> None:
    other = torch.ones(4, 4)
    with running() as run:
        run.step(lambda weight: setattr(weight, "data", other))
        run.net.user_code = lambda weight: None
        run.step()
        assert run.guards == []  # the optimizer's step has ended it: the host's weight is the weight
    held: list[dict[int, Tensor]] = []

    def replace(run: Run, weight: nn.Parameter) -> None:
        weight.data = other
        run.streamer._residency.release_unpinned()
        held.append(dict(run.guard.replaced))

    with running() as run:
        run.step(lambda weight: replace(run, weight))
        assert [list(each) for each in held] == [[0]]


def test_a_weight_of_another_dtype_stays_guarded() -> None:
    with running() as run:
        run.net.user_code = lambda weight: setattr(weight, "data", weight.data.double())

        def forward() -> None:
            with torch.inference_mode():
                run.net(X)

        step(run.streamer, forward, training=False)
        run.net.user_code = lambda weight: None
        assert list(run.guard.retyped) == [0]
        assert run.net.layers[1].weight.dtype is torch.float64


# ---------------------------------------------------------------------- the record


def test_exposed_weights_may_differ_in_the_slot() -> None:
    guard = WriteGuard()
    guard.expose([2, 0])
    assert guard.exposed == guard.viewed == {0, 2}


def test_only_memory_that_user_code_holds_stays_exposed() -> None:
    guard, other = WriteGuard(), torch.ones(1)
    guard.expose(range(3))
    guard.replace({1: other})
    assert (guard.exposed, guard.viewed) == ({1}, {0, 1, 2})
    guard.drop_views()
    assert (guard.exposed, guard.viewed, guard.replaced) == ({1}, set(), {1: other})


def test_views_are_of_one_slot() -> None:
    guard: Any = WriteGuard()
    guard.views, guard.digests = True, object()
    guard.expose([0])
    guard.leave_slot()
    assert (guard.views, guard.digests, guard.exposed) == (False, None, {0})
