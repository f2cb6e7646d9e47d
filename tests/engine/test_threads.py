"""Several threads within a step: the user's, which only read weights, and autograd's."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from sp_lightning.core.device.device import Device, Stream
from sp_lightning.core.engine import graph
from sp_lightning.core.layers.gradients import Gradients
from tests.support.engine import step, streamed
from tests.support.models import Module, Stack, vectors
from tests.support.readers import elsewhere
from tests.support.runs import assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.simdevice import simulated
from tests.support.tables import Text, numbers


class Pool(Module):
    """A thread computes with the weights of a layer inside the forward, in one of several ways."""

    def __init__(self, use: Callable[[Any, Tensor], Any], *, freezes: bool = False) -> None:
        super().__init__(Stack())
        self.use = use
        self.net.stem.requires_grad_(not freezes)  # type: ignore[union-attr]

    def loss(self, batch: Tensor) -> Tensor:
        found = elsewhere(lambda: self.use(self.net, batch))
        if isinstance(found, Exception):
            raise found
        return super().loss(batch) + found.square().mean()


def _computes(net: Any, x: Tensor) -> Tensor:
    return linear(x, net.stem.weight, net.stem.bias)


def _calls(net: Any, x: Tensor) -> Any:
    return net.stem(x)


def _writes(net: Any, x: Tensor) -> Any:
    with torch.no_grad():
        return net.stem.weight.mul_(1.01)


def _writes_out(net: Any, x: Tensor) -> Any:
    with torch.no_grad():
        return torch.mul(x[0, 0], 2, out=net.stem.bias)


def _gives_memory(net: Any, x: Tensor) -> Any:
    net.stem.weight.data = net.stem.weight.detach().clone()


def _differentiates(net: Any, x: Tensor) -> Any:
    return torch.autograd.grad(x.sum() * 1, list(net.parameters()), allow_unused=True)


ONLY = r".* in another thread than that of trainer\.fit.*copy\.deepcopy\(module\)"
REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "computes": (_computes, r"Backward reached what was computed with 'net\.stem\.(weight|bias)'"),
    "calls": (_calls, r"'net\.stem' was called"),
    "writes": (_writes, r"'net\.stem\.weight' was to be written"),
    "out": (_writes_out, r"'net\.stem\.bias' was to be written"),
    "data": (_gives_memory, r"'net\.stem\.weight' was to be written"),
    "grad": (_differentiates, r"The gradient of 'net\.stem\.weight' was asked for"),
}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("use", REFUSED)
def test_a_thread_that_does_more_than_read_is_refused(use: str, precision: Any) -> None:
    does, what = REFUSED[use]
    module = Pool(does)
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(RuntimeError, match=what + ONLY):
        trainer_for(superpipeline(k=1), precision=precision).fit(module, loader(vectors()))
    assert_equal([p.detach() for p in module.parameters()], before, "no weight is written")


def _averages(net: Any, x: Tensor) -> Tensor:
    """As NeMo's ``EMAOptimizer`` does: its function writes averages, and reads weights."""
    averages = [torch.zeros_like(p, device="cpu") for p in net.parameters()]
    torch._foreach_add_(averages, list(net.parameters()), alpha=0.1)
    return averages[0]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("use", [_computes, _averages])
@pytest.mark.parametrize("freezes", [False, True])
def test_a_thread_may_compute_with_what_has_no_gradient(freezes: bool, use: Any) -> None:
    def without_gradients(net: Any, x: Tensor) -> Any:
        with torch.set_grad_enabled(freezes and use is _computes):
            return use(net, x)

    assert_same(
        fit(lambda: Pool(without_gradients, freezes=freezes), vectors(), superpipeline(k=1)),
        fit(lambda: Pool(without_gradients, freezes=freezes), vectors()),
    )


def test_a_thread_computes_with_a_copy() -> None:
    """What the error advises."""

    def use(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = copy.deepcopy(net.stem)(x)
        return found

    assert_same(fit(lambda: Pool(use), vectors(), superpipeline(k=1)), fit(lambda: Pool(use), vectors()))


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
