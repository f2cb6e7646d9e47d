"""Layers for each of which there is a slot rest between their calls while a model predicts: nothing is released or fetched."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from sp_lightning.core.device.device import Device
from sp_lightning.core.engine.streamer import Streamer
from tests.support.engine import events, step, streamed
from tests.support.simdevice import SimDevice

X = torch.ones(2, 4)


class Three(nn.Module):
    """Three layers, of which ``between`` may use one without calling it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.between: Callable[[], Any] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x))
        self.between()
        return self.c(x)


class Scaled(nn.Linear):
    """Autograd saves the bias itself, where it is frozen, and not a view of it."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) * self.bias


def sim() -> Device:
    """A device that checks what is ordered after what."""
    return SimDevice(torch.device("cpu"))


def predict(streamer: Streamer, module: Three, *, quiet: bool = True) -> Tensor:
    """One batch."""

    def run() -> Tensor:
        with torch.inference_mode():
            return module(X).clone()

    return step(streamer, run, training=False, quiet=quiet)


def resting(streamer: Streamer) -> list[str]:
    """The names of the layers that rest."""
    return [layer.name for layer in streamer._residency.resting]


def test_layers_rest_from_batch_to_batch() -> None:
    module = Three()
    plain = module(X).detach()
    with streamed(module, sim(), k=3, k_prime=1) as streamer:
        predict(streamer, module, quiet=False)
        assert resting(streamer) == ["a", "b", "c"]
        with events() as happened:
            assert torch.equal(predict(streamer, module), plain)
        assert not [event for event in happened if event.startswith(("fetch", "use", "release"))]


def test_layers_that_make_room_for_others_do_not_rest() -> None:
    module = Three()
    with streamed(module, sim(), k=1, k_prime=1) as streamer:
        predict(streamer, module, quiet=False)
        predict(streamer, module)
        assert not resting(streamer)


@pytest.mark.parametrize("where", ["between batches", "in a batch", "in a batch, read without a call"])
def test_a_write_on_the_host_is_seen(where: str) -> None:
    """``host`` is what user code may have kept from before the step."""

    def outputs(streamer: Streamer | None, module: Three) -> list[Tensor]:
        host, seen = module.b.weight, []

        def write() -> None:
            with torch.no_grad():
                host.add_(1)

        def write_and_read() -> None:
            write()
            seen.append(nn.functional.linear(X, module.b.weight))

        run = (lambda: predict(streamer, module)) if streamer else (lambda: module(X))
        results = [run()]
        if where == "between batches":
            write()
        else:
            module.between = write if where == "in a batch" else write_and_read
        results += [run()]
        module.between = lambda: None
        return [*results, run(), *seen]

    module = Three()
    with torch.no_grad():
        plain = outputs(None, Three())
    with streamed(module, sim(), k=3, k_prime=1) as streamer:
        ours = outputs(streamer, module)
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
    assert not torch.equal(plain[0], plain[2])


@pytest.mark.parametrize("when", ["at once", "after its call, through a view", "between batches, through a view"])
def test_a_write_on_the_device_reaches_the_host(when: str) -> None:
    module = Three()
    before = module.b.bias.detach().clone()
    kept: list[Tensor] = []

    def write() -> None:
        with torch.no_grad():
            kept[0].add_(1)

    def keep() -> None:
        with torch.no_grad():
            kept.append(module.b.bias[:])
        if when == "at once":
            write()

    with streamed(module, sim(), k=3, k_prime=1) as streamer:
        predict(streamer, module, quiet=False)
        module.between = keep
        predict(streamer, module)
        module.between = write if when.startswith("after") else lambda: None
        if when.startswith("between"):
            write()
        predict(streamer, module)
        assert torch.equal(module.b.bias, before + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_memory_that_a_weight_was_given_reaches_the_host(dtype: torch.dtype) -> None:
    module = Three()
    module.c = Scaled(4, 4)

    def give() -> None:
        module.c.bias.data = torch.full((4,), 7.0, dtype=dtype)

    with streamed(module, sim(), k=3, k_prime=1) as streamer:
        predict(streamer, module, quiet=False)
        module.between = give
        predict(streamer, module)
        module.between = lambda: None
        assert torch.equal(module.c.bias, torch.full((4,), 7.0, dtype=dtype))
        with torch.inference_mode():
            plain = module(X)
        assert torch.equal(predict(streamer, module), plain)


def test_training_after_it_is_as_ever() -> None:
    def gradients(around: Callable[[Three], Any]) -> list[Any]:
        module = Three()
        around(module)
        return [parameter.grad for parameter in module.parameters()]

    def ours(module: Three) -> None:
        with streamed(module, sim(), k=3, k_prime=1) as streamer:
            predict(streamer, module, quiet=False)

            def train() -> None:
                loss = module(X).sum()
                assert not resting(streamer)
                loss.backward()

            step(streamer, train, quiet=True)
            assert not resting(streamer)
            predict(streamer, module, quiet=False)
            assert resting(streamer)

    plain = gradients(lambda module: module(X).sum().backward())
    assert all(torch.equal(one, other) for one, other in zip(gradients(ours), plain, strict=True))


@pytest.mark.parametrize("kept", [False, True], ids=["", "by hooks that keep weights"])
def test_a_graph_of_a_batch_is_differentiated(kept: bool) -> None:
    """A step of prediction may build graphs, too: what it saves is found wherever its layer is."""

    def run(module: Three) -> Any:
        keep = saved_tensors_hooks(lambda saved: saved, lambda saved: saved) if kept else nullcontext()
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        with torch.enable_grad(), keep:
            x = X.clone().requires_grad_()
            y = module(x)
        module(X)
        module.b.weight.data.numel()  # whoever has this may write it, so the layer does not rest any more
        module(X)
        return torch.autograd.grad(y.sum(), [x, *weights])

    module = Three()
    module.b = Scaled(4, 4)
    module.b.bias.requires_grad_(False)
    plain = run(module)
    with streamed(module, sim(), k=3, k_prime=1) as streamer:
        predict(streamer, module, quiet=False)
        ours = step(streamer, lambda: run(module), training=False, quiet=True)
        assert torch.equal(predict(streamer, module), predict(streamer, module, quiet=False))
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


def test_with_a_timeline_uses_begin_and_end() -> None:
    module = Three()
    device = Device(torch.device("cpu"))
    with streamed(module, device, k=3, k_prime=1) as streamer:
        predict(streamer, module, quiet=False)
        timeline = device.make_timeline()
        device.timelines.append(timeline)
        predict(streamer, module)
        device.timelines.clear()
        assert [interval.layer for interval in timeline.take() if interval.kind == "forward"] == [0, 1, 2]
        assert not resting(streamer)
