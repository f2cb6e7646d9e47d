"""What happens to each layer, event by event, and the bytes that it takes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.core.device.accelerator import Accelerator
from sp_lightning.core.device.device import Device
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.plan.plan import make_plan
from tests.support.engine import events, step, streamed
from tests.support.simdevice import SimDevice

DEVICES: list[Callable[[], Device]] = [
    lambda: Device(torch.device("cpu")),
    lambda: SimDevice(torch.device("cpu")),
]
if torch.cuda.is_available():
    DEVICES.append(lambda: Accelerator(torch.device("cuda")))
Run = Callable[[Engine, Any, Tensor], None]


class Three(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


class Reused(Three):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.b(self.a(x)))


class Conditional(Three):
    without_b = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(x if self.without_b else self.b(x))


class Read(Three):
    """No module is called, so that nothing but what autograd has saved tells that a layer's backward begins."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c):
            x = nn.functional.linear(x, layer.weight, layer.bias)
        return x


class Fails(Three):
    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x))
        y.register_hook(lambda _: (_ for _ in ()).throw(KeyError("in backward")))
        return self.c(y)


def train(engine: Engine, net: Any, x: Tensor) -> None:
    step(engine, lambda: net(x).sum().backward())


def train_twice(engine: Engine, net: Any, x: Tensor) -> None:
    train(engine, net, x)
    train(engine, net, x)


def predict(engine: Engine, net: Any, x: Tensor) -> None:
    with torch.inference_mode():
        step(engine, lambda: net(x), training=False)


def validate_within_fit(engine: Engine, net: Any, x: Tensor) -> None:
    train(engine, net, x)
    predict(engine, net, x)
    train(engine, net, x)


def train_another_way(engine: Engine, net: Any, x: Tensor) -> None:
    train(engine, net, x)
    net.without_b = True
    train(engine, net, x)


def fail(engine: Engine, net: Any, x: Tensor) -> None:
    with suppress(KeyError):
        train(engine, net, x)
    engine.abort()


FORWARD = """
    fetch 0, fetch 1, use 0, forward 0, release 0, fetch 2, use 1, forward 1, release 1, use 2, forward 2, release 2
"""
BACKWARD = """
    use 2, drain 2, release 2, fetch 0, use 1, drain 1, release 1, use 0, drain 0, apply 2, release 0, apply 1, apply 0
"""

# With k = 1 and k' = 1 there are two slots for three layers. The last two are still there when backward begins; the
# first comes again as soon as the last is done.
SEQUENCES: dict[str, tuple[type[nn.Module], Run, str]] = {
    "training": (Three, train, f"{FORWARD}, {BACKWARD}"),
    # Weights may be written after a backward, by hooks that nobody sees: the second forward fetches anew.
    "accumulation": (Three, train_twice, f"{FORWARD}, {BACKWARD}, {FORWARD}, {BACKWARD}"),
    "prediction": (Three, predict, FORWARD),
    "validation": (Three, validate_within_fit, f"{FORWARD}, {BACKWARD}, {FORWARD}, {FORWARD}, {BACKWARD}"),
    # The trace expected layer 2 (it is never called), so it came for nothing; layer 0 comes again on demand.
    "reused": (
        Reused,
        train,
        """
        fetch 0, fetch 1, use 0, forward 0, release 0, fetch 2, use 1, forward 1, release 1, fetch 0, use 0, forward 0,
        release 0, use 0, release 0, use 1, drain 1, release 1, use 0, drain 0, release 0, apply 1, apply 0
        """,
    ),
    # The second time layer 1 is left out: it has come for nothing, and everything else is as ever.
    "conditional": (
        Conditional,
        train_another_way,
        f"""
        {FORWARD}, {BACKWARD},
        fetch 0, fetch 1, use 0, forward 0, release 0, fetch 2, use 2, forward 2, release 2,
        use 2, drain 2, release 2, fetch 0, use 0, drain 0, release 0, apply 2, apply 0
        """,
    ),
    # The slot of layer 2 is free as soon as backward has come to layer 1, and layer 0 comes at once.
    "read": (
        Read,
        train,
        """
        fetch 0, fetch 1, use 0, release 0, use 1, fetch 2, release 1, use 2,
        drain 2, release 2, use 1, fetch 0, drain 1, release 1, use 0, drain 0, apply 2, release 0, apply 1, apply 0
        """,
    ),
    # What had arrived before the failure is applied, as plain autograd has it in .grad by then.
    "failure": (Fails, fail, f"{FORWARD}, use 2, drain 2, release 2, fetch 0, apply 2"),
}


def words(text: str) -> list[str]:
    return [" ".join(each.split()) for each in text.split(",") if each.strip()]


@pytest.mark.parametrize("make", DEVICES, ids=["cpu", "simulated", "cuda"][: len(DEVICES)])
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequence(name: str, make: Callable[[], Device]) -> None:
    kind, run, expected = SEQUENCES[name]
    device = make()
    x = torch.ones(2, 4, device=device.device, requires_grad=True)
    with events() as happened, streamed(kind(), device, k=1, k_prime=1) as engine:
        run(engine, engine.module, x)
        seen = list(happened)
    assert seen == words(expected)


def test_two_layers_move_as_one_transfer() -> None:
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    x = torch.ones(2, 4, requires_grad=True)
    with events() as happened, streamed(net, SimDevice(torch.device("cpu")), k=2, k_prime=2) as engine:
        train(engine, net, x)
        fetches = [each for each in happened if each.startswith("fetch")]
    assert fetches == ["fetch 0+1", "fetch 2+3", "fetch 4+5", "fetch 1+0"]


@pytest.mark.parametrize(("k", "k_prime"), [(1, 1), (2, 1), (1, 2), (3, 2), (2, 3)])
def test_the_peak_is_reached_exactly(k: int, k_prime: int) -> None:
    """For equal layers of which every gradient comes: slots, and gradients of k' + 1 layers."""
    net = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(9)))
    x = torch.ones(2, 128, requires_grad=True)
    with streamed(net, SimDevice(torch.device("cpu")), k=k, k_prime=k_prime) as engine:
        train(engine, net, x)
        layer = 128 * 128 * 4
        assert engine.plan.peak_device_bytes == (k + k_prime) * layer + (k_prime + 1) * layer
        assert engine.stats().peak_device_bytes == engine.plan.peak_device_bytes


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(("before", "after"), [((1, 1), (3, 2)), ((3, 2), (1, 1)), ((2, 3), (4, 1))])
def test_an_engine_of_another_size_is_like_one_made_so(before: tuple[int, int], after: tuple[int, int]) -> None:
    """The same events, and the peak that its plan says; only then, because the larger one was there before."""
    net = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(9)))
    x = torch.ones(2, 128, requires_grad=True)

    def run(k: int, k_prime: int, *then: int) -> tuple[list[str], int]:
        with events() as happened, streamed(net, SimDevice(torch.device("cpu")), k=k, k_prime=k_prime) as engine:
            train(engine, net, x)
            if then:
                engine.resize(make_plan(engine.found, k=then[0], k_prime=then[1]))
            happened.clear()
            engine.device.stats.peak_device_bytes = 0
            train(engine, net, x)
            seen, most = list(happened), engine.stats().peak_device_bytes
            assert most == engine.plan.peak_device_bytes
            return seen, most

    assert run(*before, *after) == run(*after)


def test_no_device_memory_outlives_the_engine() -> None:
    net, device = Three(), SimDevice(torch.device("cpu"))
    with streamed(net, device, k=2, k_prime=1) as engine:
        train(engine, net, torch.ones(2, 4, requires_grad=True))
    del engine
    gc.collect()
    assert len(device.device_ranges) >= 3
    assert all(storage.expired() for *_, storage in device.device_ranges)
    assert not all(storage.expired() for *_, storage in device.host_ranges), "the parameters still live there"


class Ordered(nn.Module):
    """Seven layers, of which each batch uses some, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(7))
        self.order = list(range(7))

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("before", "order", "late"),
    [([0, 4, 6], [0, 1, 2, 3, 5], 6), ([1, 2, 4], [0, 3, 4, 5, 6], 2), ([*range(7)], [1, 3, 2, 4, 5, 6], 0)],
    ids=["others", "fewer", "swapped"],
)
def test_unexpected_layers_evict_one_another(before: list[int], order: list[int], late: int, training: bool) -> None:
    """Each evicted the layer that was expected next, which was prefetched again at once: up to ten times in a batch."""
    net = Ordered()

    def run() -> None:
        output = net(torch.ones(1, 4))
        if training:
            output.sum().backward()

    with streamed(net, Device(torch.device("cpu")), k=1, k_prime=1) as engine:
        net.order = before
        step(engine, run, training=training)
        net.order = order
        with events() as happened:
            step(engine, run, training=training)
    uploads = [int(each.removeprefix("fetch ")) for each in happened if each.startswith("fetch ")]
    assert uploads.count(late) <= (3 if training else 1)
    assert max(map(uploads.count, order)) <= (3 if training else 2)


def test_layers_rest_from_batch_to_batch() -> None:
    """With a slot for each nothing is released or fetched, as long as nobody notes times or trains."""
    net, device, x = Three(), SimDevice(torch.device("cpu")), torch.ones(2, 4)
    plain = [each.grad for each in [net(x).sum().backward(), *net.parameters()][1:]]  # type: ignore[func-returns-value]
    net.zero_grad()

    def predict(*, quiet: bool = True) -> list[str]:
        with torch.inference_mode():
            step(engine, lambda: net(x), training=False, quiet=quiet)
        return [layer.name for layer in engine.residency.resting]

    def train() -> None:
        loss = net(x).sum()
        assert not engine.residency.resting
        loss.backward()

    with streamed(net, device, k=3, k_prime=1) as engine:
        assert predict(quiet=False) == ["a", "b", "c"]
        with events() as happened:
            predict()
        assert not [event for event in happened if event.startswith(("fetch", "use", "release"))]
        timeline = device.make_timeline()
        device.timelines.append(timeline)
        assert predict() == []
        device.timelines.clear()
        assert [each.layer for each in timeline.take() if each.kind == "forward"] == [0, 1, 2]
        step(engine, train, quiet=True)
        assert predict(quiet=False) == ["a", "b", "c"]
    assert all(torch.equal(p.grad, each) for p, each in zip(net.parameters(), plain, strict=True))  # type: ignore[arg-type]
    with streamed(net, device, k=1, k_prime=1) as engine:
        assert predict(quiet=False) == predict() == [], "layers make room for others"
