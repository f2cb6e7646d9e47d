"""Steps on the device: gradients that never leave it, and casts that the next fetch finds there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.capabilities.gpu_steps.on_device import FRESH
from sp_lightning.capabilities.gpu_steps.twins import for_fetch
from sp_lightning.core.device.device import Stream, Wait
from sp_lightning.core.engine.host_source import HostSource
from sp_lightning.core.weights.gradients import Gradients
from sp_lightning.core.weights.layer import Kind, Slot, StreamedLayer
from tests.support.engine import Slots
from tests.support.models import Module, Stack, vectors
from tests.support.nets import Stepped, on_device
from tests.support.runs import Outcome, assert_equal, assert_same, fit
from tests.support.simdevice import SimDevice, simulated


@pytest.mark.long("takes a second or more")
def test_gradients_of_layers_never_leave_in_backward() -> None:
    def drained(mode: str) -> int:
        strategy = on_device(optimizer_overlap=mode)
        with simulated() as made:
            fit(Stepped, vectors(), strategy, recorded="losses")
        # Where none leaves, a step waits for the kernels that wrote them: backward may run on a stream of its user's.
        assert Wait.DRAIN_AFTER_GRADIENT in made[0].waits
        return strategy.stats().offloaded_gradient_bytes

    assert drained("off") > 0
    assert drained("backward") == 0, "this model has no residents"


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of gradients that are on the device whenever one has come."""
    arrived, seen = Gradients.arrived, list[int]()

    def noting(self: Gradients, *args: Any) -> bool:
        whole = arrived(self, *args)
        seen.append(self.transfers.device_bytes)
        return whole

    monkeypatch.setattr(Gradients, "arrived", noting)
    return seen


def test_gradients_that_stay_are_counted_until_they_are_used(there: list[int]) -> None:
    strategy = on_device(optimizer_overlap="backward")
    fit(Stepped, vectors(), strategy, recorded="nothing")
    largest = max(layer.gradient_bytes for layer in strategy.plan.layers)
    assert 1.5 * largest < max(there) <= strategy.plan.gradient_bytes, (
        "one layer's are used while the next one's arrive"
    )
    assert there[0] == min(there) < largest


class Incomplete(Stepped):
    """One parameter of each layer never gets a gradient, so that none is stepped in backward."""

    def __init__(self) -> None:
        super().__init__()
        net: Any = self.net
        for each in (net.stem, *net.blocks, net.head):
            each.lonely = nn.Parameter(torch.ones(3))


def test_gradients_of_layers_that_are_not_complete_leave_in_backward(there: list[int]) -> None:
    strategy = on_device(optimizer_overlap="backward")
    fit(Incomplete, vectors(), strategy, recorded="nothing")
    assert 0 < max(there) <= strategy.plan.gradient_bytes


class LooksInBackward(Stepped):
    """Looks at gradients before each module's backward. That of a layer which is updated already is refused by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Tensor]] = []
        for each in self.net.modules():
            each.register_forward_hook(self.follow)

    def follow(self, _: nn.Module, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self.look)

    def look(self, _: Tensor) -> None:
        self.seen.append({})
        for name, p in self.named_parameters():
            with suppress(RuntimeError):
                if p.grad is not None:
                    self.seen[-1][name] = p.grad.clone()


@pytest.mark.long("takes a second or more")
def test_a_gradient_that_has_stayed_comes_if_user_code_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    stayed: list[Any] = []
    keep = Gradients._keep

    def noting(self: Gradients, *args: Any) -> None:
        stayed.append(args[0])
        keep(self, *args)

    monkeypatch.setattr(Gradients, "_keep", noting)
    apply = Gradients.apply

    def later(self: Gradients, *, everything: bool = False) -> None:
        """As where another thread is in a hook, so that the next layer's gradients come before an update begins."""
        if everything or len(self.transfers.retired) > 1:
            last = self.transfers.retired.pop() if not everything else None
            apply(self, everything=everything)
            if last is not None:
                self.transfers.retired.append(last)

    monkeypatch.setattr(Gradients, "apply", later)

    def run(strategy: Any) -> tuple[Outcome, list[dict[str, Tensor]]]:
        made: list[LooksInBackward] = []

        def make() -> LooksInBackward:
            made.append(LooksInBackward())
            return made[-1]

        return fit(make, vectors(), strategy, recorded="losses"), made[-1].seen

    plain, gradients = run("auto")
    with simulated():
        ours, seen = run(on_device(optimizer_overlap="backward"))
    assert stayed
    assert sum(map(len, seen)) > len(stayed), "each layer's are looked at, of several parameters each"
    expected = [{name: there[name] for name in looked} for looked, there in zip(seen, gradients, strict=True)]
    assert_equal(seen, expected, "gradients")
    assert_same(ours, plain)


def fetched(module: Callable[[], Stepped], **options: Any) -> tuple[Outcome, int]:
    """A run in mixed precision on a simulated device, and the bytes that its fetches have brought from the host."""
    strategy = on_device(optimizer_overlap="forward", **options)
    with simulated():
        ours = fit(module, vectors(), strategy, recorded="losses", precision="bf16-mixed")
    return ours, strategy.stats().fetched_bytes


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("ahead", [False, True])
def test_what_a_step_has_cast_need_not_be_fetched(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps are ahead of the forward, few layers' casts wait for it on the device, and the others' are fetched."""
    wait = HostSource.wait

    def wait_for_all(self: HostSource, _: StreamedLayer) -> None:
        for layer in self._layers:
            wait(self, layer)

    if ahead:
        monkeypatch.setattr(HostSource, "wait", wait_for_all)
    ours, fewer = fetched(Stepped)
    assert_same(ours, fit(Stepped, vectors(), "auto", recorded="losses", precision="bf16-mixed"))
    monkeypatch.setattr("sp_lightning.capabilities.gpu_steps.on_device.for_fetch", lambda *_: [])
    without, all_of_it = fetched(Stepped)
    assert_same(ours, without)
    # Each layer once for each step but the last: its first fetch after it. All of the first step is waited for.
    layers = [layer.nbytes for layer in ours.trainer.strategy.plan.layers]
    few, all_layers = sum(layers[-FRESH:]), sum(layers)
    assert all_of_it - fewer == few + (few if ahead else all_layers) * (len(vectors()) - 2)


class Wanders(nn.Module):
    """Leaves out some of its blocks, others in each call, so that layers are fetched in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for at, block in enumerate(self.blocks):
            if (at + self.calls) % 3:
                x = x + torch.tanh(block(x))
        return x


def wandering() -> Stepped:
    module = Stepped()
    module.net = Wanders()
    return module


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("make", [Stepped, wandering])
def test_what_a_fetch_reads_on_the_device_is_alive_until_steps_have_waited(
    make: Callable[[], Stepped], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is fetched last and in vain is there until the run ends, and then the host waits."""
    let_go, fetch, free = Slots._release_sources, Slots.fetch, Slots.free
    seen, read, at_end = list[tuple[int, Wait]](), list[int](), list[int]()

    def noting(self: Slots, slot: Slot) -> None:
        alive = len(slot.sources)
        let_go(self, slot)
        seen.append((alive, self._device.waits[-1]))

    def counting(self: Slots, transfer: Any) -> None:
        read.extend(len(layer.step_results) for layer, _, _ in transfer if layer.step_results)
        fetch(self, transfer)

    def ending(self: Slots) -> None:
        at_end.extend(len(slot.sources) for slot in self.all)
        free(self)

    monkeypatch.setattr(Slots, "_release_sources", noting)
    monkeypatch.setattr(Slots, "fetch", counting)
    monkeypatch.setattr(Slots, "free", ending)
    fetched(make)
    assert sum(alive for alive, _ in seen) + sum(at_end) == sum(read) > 0
    assert {wait for _, wait in seen} == {Wait.STEP_AFTER_FETCH}


class Forwards(Stepped):
    """Notes when its forward runs."""

    running = False

    def loss(self, batch: Any) -> Tensor:
        self.running = True
        try:
            return super().loss(batch)
        finally:
            self.running = False


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_neither_the_host_nor_the_models_kernels_wait_for_steps(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waited in each fetch until all that the layer's step had made was there, and the next forward's kernels for the
    state of layers that were to be stepped later."""
    modules, blocked, kernels = list[Forwards](), list[Wait](), set[tuple[Stream, Wait]]()

    def make() -> Forwards:
        modules.append(Forwards())
        return modules[-1]

    synchronize, wait = SimDevice.synchronize, SimDevice.wait

    def synchronizing(self: SimDevice, event: Any, why: Wait) -> None:
        if modules and modules[-1].running and event is not None and self._runs != Stream.UPDATE:
            blocked.append(why)
        synchronize(self, event, why)

    def waiting(self: SimDevice, stream: Stream, event: Any, why: Wait) -> None:
        kernels.add((stream, why))
        wait(self, stream, event, why)

    monkeypatch.setattr(SimDevice, "synchronize", synchronizing)
    monkeypatch.setattr(SimDevice, "wait", waiting)
    options: dict[str, Any] = {"recorded": "nothing", "precision": precision, "gradient_clip_val": 0.05}
    with simulated():
        ours = fit(make, vectors(), on_device(optimizer_overlap="forward"), **options)
    if precision == "bf16-mixed":  # otherwise a fetch reads what the host has of the step, once it has that
        assert Wait.READ_AFTER_TAKE not in blocked
    assert [stream for stream, why in kernels if why is Wait.STEP_AFTER_BRING] == [Stream.STEP]
    assert_same(ours, fit(Stepped, vectors(), "auto", **options))


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_transfer_that_fails_leaves_nothing_for_later_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then user code may write weights in a way that no version shows."""
    stage, staged, left, inside = HostSource.stage, list[StreamedLayer](), list[bool](), list[int]()

    def interrupted(self: HostSource, layer: StreamedLayer) -> Any:
        if inside and staged and staged[-1].step_results:
            raise KeyboardInterrupt
        staged.append(layer)
        return stage(self, layer)

    class Catches(Stepped):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            inside.append(batch_idx)
            try:
                return super().training_step(batch, batch_idx)
            except KeyboardInterrupt:
                left.append(bool(staged.pop().step_results))
                return None
            finally:
                inside.clear()

    monkeypatch.setattr(HostSource, "stage", interrupted)
    monkeypatch.setattr(
        "sp_lightning.capabilities.gpu_steps.on_device.FRESH", 99
    )  # all of the first step, which is waited for
    strategy = SuperpipelineStrategy(k=2, k_prime=2, optimizer_on="gpu", optimizer_overlap="forward")
    with simulated():
        fit(Catches, vectors(), strategy, recorded="nothing", precision="bf16-mixed")
    assert left
    assert not any(left)


@pytest.mark.long("takes a second or more")
def test_what_steps_have_made_is_gone_after_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layers' casts wait for a forward that does not come."""
    alive: list[weakref.ref[Tensor]] = []

    def noting(*args: Any) -> Any:
        found = for_fetch(*args)
        alive.extend(weakref.ref(each) for _, each in found)
        return found

    monkeypatch.setattr("sp_lightning.capabilities.gpu_steps.on_device.for_fetch", noting)
    ours, _ = fetched(Stepped)
    gc.collect()
    assert len(alive) == len(vectors()) * len(ours.state)
    assert [each for each in alive if each() is not None] == []


HOST_HAS_WORK: dict[str, Callable[[Any, Any], tuple[Any, str, Any]]] = {
    "only rows are uploaded": lambda source, layer: (layer, "rows", object()),
    "casts are out of date": lambda source, layer: (type(layer.casts), "current", False),
    "the slot has to be filled again": lambda source, layer: (layer.slot, "stale", True),
    "user code views the slot": lambda source, layer: (layer, "views", True),
    "weights are on a disk": lambda source, layer: (layer.block, "memory", type("OnDisk", (), {"use": None})()),
    "weights were given other memory": lambda source, layer: (type(layer.block), "displaced", [0]),
    "a weight has another dtype": lambda source, layer: (layer.block, "retyped", {0: torch.ones(1)}),
}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("why", HOST_HAS_WORK)
def test_a_fetch_waits_for_the_host_if_that_has_work_before_it(why: str) -> None:
    """Otherwise it would copy what the update has left on the device, without that work."""
    found: list[bool] = []

    class Asks(Module):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            source = self.trainer.strategy._run.engine.source
            layer = next(each for each in source.engine.layers if each.slot is not None and each.kind is Kind.BLOCK)
            found.append(source._fetches_as_updated(layer))
            owner, name, value = HOST_HAS_WORK[why](source, layer)
            with mock.patch.object(owner, name, value):
                found.append(source._fetches_as_updated(layer))
            return loss

    with simulated():
        fit(lambda: Asks(Stack()), vectors(1), on_device(), recorded="nothing")
    assert found == [True, False]
