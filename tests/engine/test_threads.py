"""Threads of autograd's within a step, and streams of the device."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from sp_lightning.core.device.device import Device, Stream
from sp_lightning.core.engine import backward
from sp_lightning.core.weights.gradients import Gradients
from tests.support.engine import step, streamed, three_linears
from tests.support.models import Module
from tests.support.runs import assert_equal, fit, superpipeline
from tests.support.simdevice import simulated
from tests.support.tables import Text, numbers


class Interrupted(int):
    """A number of a parameter. At its second look-up another thread makes room for the backward of another layer."""

    elsewhere: Any
    times = 0

    def __hash__(self) -> int:
        self.times += 1
        if self.times == 2:
            thread = threading.Thread(target=self.elsewhere)
            thread.start()
            thread.join(0.1)  # it may have to wait for this one
        return hash(int(self))


def test_no_gradient_is_lost_while_another_thread_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with an output on the CPU begins its backward in the caller's thread, others in that of the accelerator.

    What was left of a layer's gradients left between two lines of the arrival of its next one, which then came too late.
    """
    net, x = three_linears(), torch.ones(2, 4)
    net(x).sum().backward()
    plain = [p.grad for p in net.parameters()]
    net.zero_grad()
    arrived = Gradients.arrived
    with streamed(net, Device(torch.device("cpu")), k=1, k_prime=1) as engine:
        first, _, last, _ = engine.layers

        def arrives(self: Gradients, layer: Any, index: int, gradient: Tensor) -> bool:
            return arrived(self, layer, Interrupted(index) if layer is last else index, gradient)

        monkeypatch.setattr(Interrupted, "elsewhere", lambda _: engine.calls._pre_backward((first,), x), raising=False)
        monkeypatch.setattr(Gradients, "arrived", arrives)
        step(engine, lambda: net(x).sum().backward())
    assert_equal([p.grad for p in net.parameters()], plain, "gradients")


def test_a_thread_that_comes_late_to_a_backward_that_has_failed_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error was another thread's, whose caller has caught it and gone on."""
    net, x = three_linears(), torch.ones(2, 4)
    failed: list[int] = []

    def fail(gradient: Tensor) -> None:
        failed.append(backward.current_graph_task())
        raise KeyError

    with streamed(net, Device(torch.device("cpu")), k=1, k_prime=1) as engine:

        def run() -> None:
            y = net[1](net[0](x))
            y.register_hook(fail)
            with pytest.raises(KeyError):
                net[2](y).sum().backward()
            with monkeypatch.context() as late:
                late.setattr(backward, "current_graph_task", failed.pop)
                with pytest.raises(RuntimeError, match="Call backward in one thread at a time"):
                    engine.calls._pre_backward(engine.layers[:1], x)
            assert not engine.backward.tasks

        step(engine, run)


def call(net: Any, x: Tensor) -> Any:
    return net.blocks[0](x)


def operation(net: Any, x: Tensor) -> Any:
    return linear(x, net.blocks[0].inner.weight)


def look_up(net: Any, x: Tensor) -> Any:
    return net.table(torch.tensor([[3]]))


def read_data(net: Any, x: Tensor) -> Any:
    return net.blocks[0].inner.weight.data


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("use", "name"),
    [
        (call, "net.blocks.0"),
        (operation, "net.blocks.0.inner.weight"),
        (look_up, "net.table"),
        (read_data, "net.blocks.0.inner.weight"),
    ],
)
def test_uses_in_one_step_on_two_streams_are_refused(use: Any, name: str, precision: Any) -> None:
    """The second stream waited for no upload, and the slot was free before it had read the weights."""

    class OnTwo(Module):
        def loss(self, batch: Tensor) -> Tensor:
            first = self.net(batch)
            with devices[0].on(Stream.REDUCE):
                use(self.net, first)
            return first.square().mean()

    with simulated() as devices, pytest.raises(RuntimeError, match=f"'{name}' is used on another CUDA stream"):
        fit(lambda: OnTwo(Text()), numbers(1), superpipeline(k=1), precision=precision)


def test_each_step_may_be_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    net, (batch,) = Text(), numbers(1)
    stream = 0
    monkeypatch.setattr(Device, "compute_stream", lambda device: stream)
    with streamed(net, Device(torch.device("cpu")), k=1, k_prime=1) as engine:
        for use in [call, operation, look_up, read_data] * 2:
            stream += 1
            step(engine, partial(use, net, torch.ones(1, 16)))
            stream += 1
            step(engine, lambda: net(batch).sum().backward())
