"""Several threads that compute with one model's weights within a step: the user's, and autograd's."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from sp_lightning.core.device.device import Device, Stream
from sp_lightning.core.engine import graph
from sp_lightning.core.engine.step import Step
from sp_lightning.core.layers.gradients import Gradients
from sp_lightning.core.torch_compat.patched import scope
from tests.support.engine import step, streamed
from tests.support.models import Module, Stack, vectors
from tests.support.runs import Outcome, assert_equal, fit, superpipeline
from tests.support.simdevice import simulated
from tests.support.tables import Text, numbers
from tests.support.tiers import first


class Threads(Module):
    """Each row in its own thread; the learning rate is zero, as the order in which gradients are added is anybody's guess."""

    def __init__(self, *, calls: bool) -> None:
        super().__init__(Stack())
        self.calls = calls
        for block in self.net.blocks:  # type: ignore[union-attr]
            block.drop.p = 0.0  # random numbers come in any order, too

    def row(self, x: Tensor) -> Tensor:
        net: Any = self.net
        if self.calls:
            return net(x)
        x = linear(x, net.stem.weight, net.stem.bias)
        for block in net.blocks:
            x = x + torch.tanh(linear(x, block.inner.weight[:16], block.inner.bias[:16]))
        return linear(x, net.head.weight, net.head.bias)

    def loss(self, batch: Tensor) -> Tensor:
        rows: list[Any] = [None] * len(batch)

        def work(index: int) -> None:
            rows[index] = self.row(batch[index : index + 1])

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(batch))]
        for thread in threads:
            thread.start()
        meanwhile = self.row(batch)
        for thread in threads:
            thread.join()
        return torch.cat([*rows, meanwhile]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0)


@pytest.mark.long("takes a second or more")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("device", first(["cpu", "simulated"], "cpu", why="the same on a device of clocks"))
@pytest.mark.parametrize("precision", first(["32-true", "bf16-mixed"], "bf16-mixed", why="the same in one precision"))
@pytest.mark.parametrize("calls", [False, True], ids=["weights", "modules"])
def test_threads_see_whole_weights(calls: bool, precision: Any, device: str) -> None:
    def run(strategy: Any) -> Outcome:
        return fit(lambda: Threads(calls=calls), vectors(20), strategy, precision=precision)

    plain = run("auto")
    with simulated() if device == "simulated" else nullcontext():
        ours = run(superpipeline(k=1))
    assert_equal(ours.losses, plain.losses, "losses")
    for mine, theirs in zip(ours.gradients, plain.gradients, strict=True):
        for name, gradient in theirs.items():
            torch.testing.assert_close(mine[name], gradient, msg=name, rtol=1e-2, atol=1e-5)


@pytest.mark.rest("takes tenths of a second")
def test_the_next_step_is_one_thread_s_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each use comes through a door, which is slow, only as long as it has to."""
    seen: list[list[bool]] = []
    share, end = Step.share, Step.end

    def noted(self: Step, shared: bool) -> None:
        share(self, shared)
        seen.append([layer.parameters.shared for layer in self.layers[:-1]])

    def ended(self: Step, **options: Any) -> None:
        end(self, **options)
        assert not self.shared

    monkeypatch.setattr(Step, "share", noted)
    monkeypatch.setattr(Step, "end", ended)
    fit(lambda: Threads(calls=True), vectors(2), superpipeline(k=1))
    assert seen[:2] == [[True] * len(seen[0]), [False] * len(seen[0])]
    assert len(seen) == 2 * len(vectors(2))


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
    net, x = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))), torch.ones(2, 4)
    net(x).sum().backward()
    plain = [p.grad for p in net.parameters()]
    net.zero_grad()
    arrived = Gradients.arrived
    with streamed(net, Device(torch.device("cpu")), k=1, k_prime=1) as streamer:
        first, _, last, _ = streamer._layers

        def arrives(self: Gradients, layer: Any, index: int, gradient: Tensor) -> bool:
            return arrived(self, layer, Interrupted(index) if layer is last else index, gradient)

        monkeypatch.setattr(
            Interrupted, "elsewhere", lambda _: streamer._calls._pre_backward((first,), x), raising=False
        )
        monkeypatch.setattr(Gradients, "arrived", arrives)
        step(streamer, lambda: net(x).sum().backward())
    assert_equal([p.grad for p in net.parameters()], plain, "gradients")


def test_a_thread_that_comes_late_to_a_backward_that_has_failed_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error was another thread's, whose caller has caught it and gone on."""
    net, x = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))), torch.ones(2, 4)
    failed: list[int] = []

    def fail(gradient: Tensor) -> None:
        failed.append(graph.current_graph_task())
        raise KeyError

    with streamed(net, Device(torch.device("cpu")), k=1, k_prime=1) as streamer:

        def run() -> None:
            y = net[1](net[0](x))
            y.register_hook(fail)
            with pytest.raises(KeyError):
                net[2](y).sum().backward()
            with monkeypatch.context() as late:
                late.setattr(graph, "current_graph_task", failed.pop)
                with pytest.raises(RuntimeError, match="Call backward in one thread at a time"):
                    streamer._calls._pre_backward(streamer._layers[:1], x)
            assert not streamer._backward.tasks

        step(streamer, run)


def test_another_runs_thread_waits_for_no_lock_of_this_one() -> None:
    """Of several trainings at once, one holds its lock while another one has its turn, which may look at its weights."""
    helped: list[bool] = []
    token = scope.set("this run")
    try:
        with streamed(Stack(), Device(torch.device("cpu")), k=1, k_prime=1) as streamer:

            def look() -> None:
                scope.set("another run")
                with streamer._uses.helping() as helps:
                    helped.append(helps)

            other = threading.Thread(target=look, daemon=True)
            with streamer._lock:
                other.start()
                other.join(5)
                assert helped == [False]
    finally:
        scope.reset(token)


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
    with streamed(net, Device(torch.device("cpu")), k=1, k_prime=1) as streamer:
        for use in [call, operation, look_up, read_data] * 2:
            stream += 1
            step(streamer, partial(use, net, torch.ones(1, 16)))
            stream += 1
            step(streamer, lambda: net(batch).sum().backward())
