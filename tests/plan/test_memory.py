"""Memory and traffic are what the plan says."""

from __future__ import annotations

import gc
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakSet

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.model.found import tensor_bytes
from sp_lightning.core.model.wrapped import parts
from sp_lightning.core.plan.plan import make_plan
from sp_lightning.core.plan.units import human_bytes
from sp_lightning.core.weights.gradients import Gradients
from sp_lightning.trainer.plan_text import sentence
from tests.equality.cases import CASES as REGISTRY
from tests.equality.cases import Case
from tests.support.engine import engine_of
from tests.support.models import CASES, Block, Module, Stack, llama, tokens, vectors
from tests.support.quantised import opaque
from tests.support.runs import fit, loader, superpipeline, trainer_for
from tests.support.simdevice import SimDevice, simulated
from tests.support.tiers import first

# A view of a weight that leaves its layer keeps a slot, and so does one weight of several layers that are read together.
ESCAPING = {"returns-view", "target-network", "clamped-in-forward", "path-by-modules"}


class FetchesPerBatch(Callback):
    def __init__(self) -> None:
        self.fetched: list[int] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.fetched.append(trainer.strategy.stats().fetched_layers)


@pytest.mark.parametrize("k_prime", [1, 2, 3])
@pytest.mark.parametrize("k", first([1, 2, 3, 5, 8], 1, 3, 8, why="the same formula with other windows"))
@pytest.mark.parametrize("n", first([2, 6, 7, 8], 2, 7, why="the same formula with other counts"))
def test_fetches_of_one_forward_and_backward(n: int, k: int, k_prime: int) -> None:
    """``max(n, 2n − (k + k'))``: those at the turn are still there. From the first batch on."""
    counter = FetchesPerBatch()
    batches = [x.requires_grad_() for x in vectors(4)]  # so that the first layer's weight is needed in backward
    make = lambda: Module(nn.Sequential(*(nn.Linear(16, 16) for _ in range(n))))  # noqa: E731
    strategy = superpipeline(k=k, k_prime=k_prime, callback=False)
    fit(make, batches, strategy, callbacks=[counter])
    assert len(strategy.plan.layers) == n
    fetched = [new - old for old, new in zip([0, *counter.fetched], counter.fetched, strict=False)]
    assert fetched == [max(n, 2 * n - (k + k_prime))] * 4
    assert strategy.stats().demand_fetches == 0
    assert strategy.stats().extra_slots == 0


@pytest.mark.parametrize("k_prime", [1, 2, 3])
def test_k_prime_layers_move_as_one_transfer(k_prime: int) -> None:
    """In training with k ≥ k'. With a smaller k, layers would compute while nothing is copied."""
    strategy = superpipeline(k=3, k_prime=k_prime, callback=False)
    make = lambda: Module(nn.Sequential(*(nn.Linear(16, 16) for _ in range(12))))  # noqa: E731
    fit(make, vectors(1), strategy)
    stats = strategy.stats()
    assert stats.transfers - stats.demand_fetches <= -(-stats.fetched_layers // k_prime) + 2


def test_gradients_of_a_layer_that_never_gets_all_of_them_count() -> None:
    """The first layer's, whose backward is the last: they leave when the whole has ended."""

    class Partly(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.unused = nn.Parameter(torch.zeros(1))

    others = [nn.Linear(16, 16).requires_grad_(False) for _ in range(3)]
    strategy = superpipeline(k=1)
    fit(lambda: Module(nn.Sequential(Partly(), *others)), vectors(1), strategy)
    assert strategy.stats().peak_device_bytes >= strategy.plan.slot_bytes + 16 * 17 * 4


@pytest.mark.rest("takes tenths of a second")
def test_nothing_is_evicted_with_k_for_all() -> None:
    strategy = superpipeline(k=7)
    fit(lambda: Module(Stack()), vectors(5), strategy)
    assert len(strategy.plan.layers) == 7
    assert strategy.stats().fetched_layers == 7 * 5


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("k", "k_prime"), first([(1, 1), (2, 1), (3, 2)], (1, 1), (3, 2), second=[], why="a window between them")
)
@pytest.mark.parametrize(
    "name",
    first(CASES, "llama-dropout", "stack", "reused", "frozen", "lstm", why="other models of the same kinds"),
)
def test_the_peak_is_the_plans(name: str, k: int, k_prime: int) -> None:
    """Gradients are counted by their storages, alive or not, and not by the engine's own books."""
    strategy = superpipeline(k=k, k_prime=k_prime)
    alive: list[tuple[StorageWeakRef, int]] = []
    peak = 0
    arrived = Gradients.arrived

    def watch(self: Gradients, layer: Any, index: int, gradient: Tensor) -> None:
        nonlocal peak
        if gradient.layout is torch.strided:
            alive.append((StorageWeakRef(gradient.untyped_storage()), gradient.nbytes))
        arrived(self, layer, index, gradient)
        peak = max(peak, sum(nbytes for storage, nbytes in alive if not storage.expired()))

    with mock.patch.object(Gradients, "arrived", watch):
        fit(CASES[name].make, CASES[name].batches(), strategy)
    stats, plan = strategy.stats(), strategy.plan
    if name in ESCAPING:
        return
    assert stats.extra_slots == 0
    assert stats.peak_device_bytes <= plan.peak_device_bytes
    if not {"penalty", "autograd", "gradient", "tied", "t5", "gpt2", "checkpoint"} & set(name.split("-")):
        assert peak <= plan.gradient_bytes


class AddsUp(Callback):
    """Adds up what is on the device after each batch: what the engine allocated, and what else the module has."""

    def __init__(self, made: list[SimDevice]) -> None:
        self.made = made
        self.weights: list[int] = []
        self.gradients: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        modules = list(pl_module.modules())
        parameters = {p for module in modules for p in module._parameters.values() if p is not None}
        aside = [p for p in parameters if not any(self.is_on_host(part) for _, part in parts("", p))]
        buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
        engine = sum(end - start for start, end, alive in self.made[0].device_ranges if not alive.expired())
        self.weights.append(engine + sum(map(tensor_bytes, (*aside, *buffers))))
        self.gradients.append(sum(p.grad.nbytes for p in aside if p.grad is not None))

    def is_on_host(self, tensor: Tensor) -> bool:
        return any(start <= tensor.data_ptr() < end for start, end, _ in self.made[0].host_ranges)


def scripted() -> Module:
    """A front that is a ScriptModule, with buffers, before blocks."""
    front = nn.Sequential(nn.Linear(16, 256), nn.BatchNorm1d(256), nn.Linear(256, 16))
    return Module(nn.Sequential(torch.jit.script(front), *(Block() for _ in range(4))))


def with_a_subclass() -> Module:
    net = nn.Sequential(*(Block() for _ in range(4)))
    net[1].inner.weight = opaque(net[1].inner.weight)  # type: ignore[union-attr,assignment,arg-type]
    return Module(net)


STAYING = {
    "scripted": Case(scripted, vectors, "a ScriptModule, which is moved whole"),
    "subclass": Case(with_a_subclass, vectors, "a tensor subclass that cannot be streamed, and is resident"),
}
OF_EACH_KIND = (
    "stack",
    "gpt2-tied",
    "clamped-in-forward",
    "rows/sparse",
    "experts/mixture",
    "stacked/called-twice",
    "quantised/int8",
)


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without")
@pytest.mark.parametrize(
    "name",
    first(
        [*STAYING, *REGISTRY],
        *STAYING,
        *OF_EACH_KIND,
        second=[name for name in list(REGISTRY)[::3] if name not in (*STAYING, *OF_EACH_KIND)],
        why="other models of the same kinds",
    ),
)
def test_all_that_is_on_the_device_is_in_the_plan(name: str) -> None:
    """Modules that are moved whole were counted nowhere, nor were buffers: a budget of 1 MiB took a scripted front of 4."""
    case, plain = {**STAYING, **REGISTRY}[name], name not in STAYING
    strategy = superpipeline(
        k=1, k_prime=1, keep_on_gpu=() if plain else ("net.1.inner.weight",) * (name == "subclass")
    )
    with simulated() as made:
        seen = AddsUp(made)
        fit(case.make, case.batches(), strategy, callbacks=[seen], recorded="nothing")
    plan, stats = strategy.plan, strategy.stats()
    assert len(made) == 1, "the engine was built anew before a batch, as if modules had been exchanged"
    extra = [each - plan.slot_bytes - plan.resident_bytes for each in seen.weights]
    assert not any(extra) or (name in ESCAPING and min(extra) >= 0)
    assert max(seen.gradients) == plan.staying[1]
    assert stats.peak_device_bytes >= max(map(sum, zip(seen.weights, seen.gradients, strict=True)))
    assert plan.plain[0] >= sum(map(tensor_bytes, case.make().parameters())), "plain Lightning has all of it"


@pytest.mark.rest("takes tenths of a second")
def test_escaping_views_take_extra_slots_and_give_them_back() -> None:
    strategy = superpipeline(k=1)
    seen = []

    class AtEnd(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen.append(engine_of(trainer.strategy).slots.device_bytes)

    fit(CASES["returns-view"].make, CASES["returns-view"].batches(), strategy, callbacks=[AtEnd()])
    assert strategy.stats().extra_slots > 0
    assert seen == [strategy.plan.slot_bytes] * 3


def test_the_plan_counts_its_bytes() -> None:
    strategy = superpipeline(k=2, k_prime=1)
    fit(
        lambda: Module(nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))),
        [torch.ones(2, 128)],
        strategy,
    )
    plan = strategy.plan
    layer = 128 * 128 * 4
    assert [each.nbytes for each in plan.layers] == [layer] * 6
    assert [each.name for each in plan.layers] == [f"net.{i}" for i in range(6)]
    assert plan.slot_bytes == 3 * layer
    assert plan.gradient_bytes == 2 * layer
    assert plan.peak_device_bytes == 5 * layer
    assert plan.resident_bytes == 0
    assert plan.host_bytes == 12 * layer


@pytest.mark.rest("takes tenths of a second")
def test_large_layers_do_not_inflate_the_ring() -> None:
    net = nn.Sequential(nn.Linear(4096, 16), *(Block() for _ in range(8)), nn.Linear(16, 4096))
    strategy = superpipeline(k=2, k_prime=1)
    fit(lambda: Module(net), [torch.ones(2, 4096)], strategy)
    plan = strategy.plan
    assert [ring.slots for ring in plan.rings] == [3, 1]
    assert plan.rings[0].nbytes < 8192 < plan.rings[1].nbytes


@pytest.mark.rest("takes tenths of a second")
def test_nothing_stays_alive_after_teardown() -> None:
    gc.collect()
    before = WeakSet(each for each in gc.get_objects() if type(each) is Engine)  # errors of other tests may hold some
    module = llama()
    trainer = trainer_for(superpipeline(k=1))
    trainer.fit(module, loader(tokens()))
    trainer.validate(module, loader(tokens()), verbose=False)
    del trainer
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Engine and each not in before]
    assert not any(len(child._forward_hooks) + len(child._forward_pre_hooks) for child in module.modules())
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in module.parameters())


@pytest.mark.long("tensors are looked for in all memory")
def test_steps_leave_no_tensors_behind() -> None:
    """An output that its own node keeps would never be freed; neither may slots or gradients pile up."""

    class Count(Callback):
        def __init__(self) -> None:
            self.counts: list[int] = []

        def on_train_batch_end(self, *args: Any) -> None:
            gc.collect()
            self.counts.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))

    count = Count()
    trainer = trainer_for(superpipeline(k=1), callbacks=[count], gradient_clip_val=1.0)
    trainer.fit(llama(), loader(tokens(8)))
    assert count.counts[-1] <= count.counts[2] + 2


class Squashed(nn.Module):
    """``tanh`` saves its own output: kept as it is, the node would keep itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.outputs: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.outputs.append(StorageWeakRef(y.untyped_storage()))
        return y * 2


@pytest.mark.rest("takes tenths of a second")
def test_saved_tensors_are_freed_without_the_garbage_collector() -> None:
    class CallsTwice(Module):
        """Only one of the graphs is gone through, which frees what it saved."""

        def loss(self, batch: Any) -> Tensor:
            self.net(batch)
            return super().loss(batch)

    gc.collect()
    gc.disable()
    try:
        module: Any = fit(lambda: CallsTwice(Squashed()), vectors(2), superpipeline()).module
        assert [output.expired() for output in module.net.outputs] == [True] * 4
    finally:
        gc.enable()


SET_UP = """
import torch
from torch import nn
from sp_lightning.core.device.device import Device
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan
from sp_lightning.core.engine.engine import Engine

def high_water():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

net = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(24)))  # 16 MiB each
device = Device(torch.device("cpu"))
found = find_layers(net)
plan = make_plan(found, k=1, k_prime=1)
before = high_water()
engine = Engine(net, found, plan, device, pin=False)
print((high_water() - before) / 2**24)
"""


@pytest.mark.long("a subprocess that imports torch")
def test_set_up_peaks_at_the_model_and_one_layer() -> None:
    """Each original goes as soon as it is absorbed: the whole model is never there twice. Slots are on this host, too."""
    if not Path("/proc/self/status").exists():
        pytest.skip("reads the high-water mark from /proc")
    ran = subprocess.run([sys.executable, "-c", SET_UP], capture_output=True, text=True, check=True)
    layers = float(ran.stdout)
    assert layers <= 1 + 2 + 1, f"set-up took {layers:.1f} layers beyond the model: one, two slots, and a little"


def test_a_plan_in_one_line_is_compared_with_what_is_known() -> None:
    plan = make_plan(find_layers(Stack()), k=1, k_prime=1)
    assert sentence(plan).endswith("of GPU memory, without activations.")
    weights, everything = human_bytes(plan.plain[0]), human_bytes(sum(plan.plain) + 8)
    assert sentence(replace(plan, training=False)).endswith(f"plain Lightning {weights}, both without activations.")
    assert sentence(plan, state=8).endswith(
        f"plain Lightning {everything} with optimizer state, both without activations."
    )


def test_a_plan_of_inference_counts_no_gradients() -> None:
    strategy = superpipeline(k=1)
    trainer_for(strategy).predict(Module(Stack()), loader(vectors()))
    assert strategy.plan.peak_device_bytes == strategy.stats().peak_device_bytes
    assert "gradients" not in str(strategy.plan)


@pytest.mark.parametrize(("k_prime", "counted"), [(1, 96 + 64), (2, 96 + 64 + 32), (9, 96 + 64 + 32 + 32)])
def test_the_plan_counts_the_largest_gradients_that_are_in_flight(k_prime: int, counted: int) -> None:
    """It counted the largest for each transfer, up to twice what was there."""
    net = nn.Sequential(*(nn.Linear(16, rows, bias=False) for rows in (64, 96, 32)), nn.Linear(16, 32, bias=False))
    plan = make_plan(find_layers(net, layers=["*"]), k=1, k_prime=k_prime)
    assert plan.gradient_bytes == 16 * 4 * counted
