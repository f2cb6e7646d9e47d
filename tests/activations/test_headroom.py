"""``activations="auto"``, the default: nothing changes where all activations fit; the rest trains with equal results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sp_lightning.capabilities.activations import offload
from sp_lightning.capabilities.activations.calls import UnitForward, UnitModes
from sp_lightning.capabilities.activations.headroom import Headroom, Kept
from sp_lightning.capabilities.activations.host_ring import HostRing
from sp_lightning.capabilities.activations.offload import Offload
from sp_lightning.capabilities.activations.recompute import Recompute
from sp_lightning.capabilities.tuning.tuner import Tuner
from tests.support.elsewhere import backward_elsewhere
from tests.support.experts import CASES as EXPERTS
from tests.support.models import CASES, Module, Stack, vectors
from tests.support.poison import crowded
from tests.support.runs import Outcome, assert_same, fit, fused, superpipeline
from tests.support.saving import Saves, rows, saving
from tests.support.simdevice import SimDevice, simulated

ROOM_FOR_ALL = 2**40


def train(
    capacity: int, make: Callable[[], Module], batches: Sequence[Any], callbacks: Sequence[Any] = (), **options: Any
) -> tuple[Outcome, SimDevice]:
    with simulated(capacity=capacity) as devices:
        ours = fit(make, batches, superpipeline(**{"k": 1, "k_prime": 1, **options}), callbacks=callbacks)
    return ours, devices[0]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what :class:`Saves` saves is worth moving."""
    monkeypatch.setattr(offload, "WORTH_MOVING", Saves.SIZE)


def eight() -> Module:
    return saving([1] * 8)


class Phases:
    """Notes for each batch whether it ran with headroom, and the modes of its units."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        begin = UnitModes.begin

        def noted(activations: UnitModes) -> None:
            modes = "+".join(sorted(set(activations.modes.values())))
            self.seen.append(f"{'headroom ' * (activations.headroom is not None)}{modes}")
            begin(activations)

        monkeypatch.setattr(UnitModes, "begin", noted)


# ---------------------------------------------------------------------- all activations fit


@pytest.mark.long("takes a second or more")
@pytest.mark.usefixtures("everything_is_worth_moving")
@pytest.mark.parametrize("options", [{"k": 2, "k_prime": 1}, {"k": "auto", "k_prime": "auto"}], ids=["given", "chosen"])
def test_nothing_changes_if_all_activations_fit(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits, transfers and batches are those of ``"keep"``, and no forward is called in another way."""
    # A simulated copy takes no time.
    monkeypatch.setattr(Tuner, "_measured", lambda self, *_: (1 / self.engine.plan.k,) * 2)
    for cls, name in ((Offload, "_send"), (Recompute, "run"), (UnitForward, "__init__"), (Headroom, "_evict")):
        monkeypatch.setattr(cls, name, lambda *_: pytest.fail("something was offloaded, run twice or called otherwise"))
    case, runs = CASES["llama-dropout"], {}
    for mode in ("keep", "auto"):
        ours, device = train(ROOM_FOR_ALL, case.make, case.batches(), activations=mode, **options)
        strategy = ours.trainer.strategy
        stats = {name: value for name, value in vars(strategy.stats()).items() if not name.endswith("seconds")}
        runs[mode] = (ours, stats, device.waits, device.peak, strategy.plan, strategy.activations)
    assert runs["keep"][1:] == runs["auto"][1:]
    assert_same(runs["auto"][0], runs["keep"][0])
    assert set(runs["auto"][5].values()) == {"keep"}


@pytest.mark.rest("takes tenths of a second")
def test_keep_means_keep(monkeypatch: pytest.MonkeyPatch, large: None) -> None:
    phases = Phases(monkeypatch)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train(4 * Saves.SIZE + 24_000, eight, rows(), activations="keep")
    assert phases.seen == [], "the engine's default, KeepAll, has run"
    assert 'Use less: SuperpipelineStrategy(activations="recompute")' in "".join(raised.value.__notes__)


# ---------------------------------------------------------------------- they do not


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("elsewhere", [False, True], ids=["in this thread", "in a thread of autograd's"])
@pytest.mark.parametrize("units", [3, 6])
def test_what_does_not_fit_is_trained_with_equal_results(
    units: int, elsewhere: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, large: None
) -> None:
    phases, batches = Phases(monkeypatch), rows() * 2
    plain = fit(eight, batches)
    capacity = (units * Saves.SIZE + 24_000) * 16 // 15 + 1
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        if elsewhere:
            with backward_elsewhere():
                ours, device = train(capacity, eight, batches)
        else:
            ours, device = train(capacity, eight, batches)
    assert_same(ours, plain)
    assert device.peak <= capacity
    assert phases.seen == ["headroom keep", *["headroom keep+offload"] * (len(batches) - 1)]
    (said,) = [each.getMessage() for each in caplog.records if "GPU memory is full" in each.getMessage()]
    assert "oldest activations are offloaded to CPU memory (so far those of net.blocks.0, net.blocks.1" in said
    assert 'activations="recompute", or the checkpointing of the model itself, may be faster.' in said


@pytest.mark.long("takes a second or more")
@pytest.mark.usefixtures("everything_is_worth_moving")
@pytest.mark.parametrize("name", ["llama-dropout", "reused", "gan"])
def test_real_models_that_do_not_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, phases = CASES[name], Phases(monkeypatch)
    batches = [*case.batches(), *case.batches()]
    peaks = {}
    for mode in ("keep", "offload"):
        peaks[mode] = train(ROOM_FOR_ALL, case.make, batches[:2], activations=mode)[1].peak
    phases.seen.clear()
    capacity = (peaks["keep"] + 2 * peaks["offload"]) // 3
    ours, device = train(capacity, case.make, batches)
    assert_same(ours, fit(case.make, batches))
    assert device.peak <= capacity
    assert phases.seen == ["headroom keep", *["headroom keep+offload"] * (len(batches) - 1)]


@pytest.mark.long("takes a second or more")
def test_the_oldest_are_offloaded_first_and_no_more_than_needed(monkeypatch: pytest.MonkeyPatch, large: None) -> None:
    moved: list[str] = []
    evict = Offload.evict

    def noted(self: Offload, tensor: Tensor, call: Any) -> Any:
        moved.append(call.unit)
        return evict(self, tensor, call)

    monkeypatch.setattr(Offload, "evict", noted)
    capacity = (6 * Saves.SIZE + 24_000) * 16 // 15 + 1
    ours, _ = train(capacity, eight, rows()[:1])
    assert_same(ours, fit(eight, rows()[:1]))
    assert moved == [f"net.blocks.{index}" for index in range(len(moved))]
    assert 2 <= len(moved) <= 4, "eight are saved, six fit, and room for what a layer computes is left"


@pytest.mark.long("takes a second or more")
def test_a_larger_batch_has_headroom_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "WORTH_MOVING", 2**10)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(size, 16, generator=generator) for size in (32, 32, 16, 96, 96, 32)]
    phases = Phases(monkeypatch)
    ours, device = train(110_000, lambda: Module(Stack()), batches)
    assert_same(ours, fit(lambda: Module(Stack()), batches))
    assert device.peak <= 110_000
    assert phases.seen[:4] == ["headroom keep", "keep", "keep", "headroom keep"]
    assert phases.seen[4:] == ["headroom keep+offload"] * 2


class Thawing(Module):
    """Trains its first layers from the third batch on, and then saves more in all of them."""

    def __init__(self) -> None:
        super().__init__(Stack())
        for block in (self.net.stem, *self.net.blocks[:4]):  # type: ignore[index, union-attr]
            block.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.requires_grad_(True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.long("takes a second or more")
@pytest.mark.usefixtures("everything_is_worth_moving")
@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        (200_000, ["headroom keep", "keep", "headroom keep", "headroom keep+offload"]),
        (130_000, ["headroom keep", "headroom keep+offload", "headroom keep+offload"]),
    ],
    ids=["all fitted", "not even before"],
)
def test_layers_that_are_trained_later_take_more(
    capacity: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    phases, batches = Phases(monkeypatch), [torch.randn(128, 16) for _ in range(6)]
    ours, device = train(capacity, Thawing, batches)
    assert_same(ours, fit(Thawing, batches))
    assert device.peak <= capacity
    assert phases.seen[: len(expected)] == expected


class Head(nn.Module):
    """A vocabulary that is large for the model, as a language model's: its logits take more than all that the blocks save."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(24))
        self.head = nn.Linear(16, 1024)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.log_softmax(self.head(x).float(), dim=-1)


@pytest.mark.long("takes a second or more")
@pytest.mark.usefixtures("everything_is_worth_moving")
def test_room_for_the_loss_is_made_before_the_head() -> None:
    """torch's allocator gives no notice, and nothing is saved between the logits and what the loss makes of them."""
    batches = [torch.randn(256, 16) for _ in range(2)]

    def make() -> Module:
        return Module(Head())

    least = train(ROOM_FOR_ALL, make, batches, activations="offload")[1].peak
    kept = train(ROOM_FOR_ALL, make, batches, activations="keep")[1].peak
    assert kept > 1.25 * least
    capacity = (kept + 2 * least) // 3
    ours, device = train(capacity, make, batches)
    assert_same(ours, fit(make, batches))
    assert device.peak <= capacity


@pytest.mark.long("takes a second or more")
@pytest.mark.usefixtures("nothing_fits")
def test_blocks_whose_experts_are_modules_are_offloaded() -> None:
    """Experts stay layers of their own, because no forward runs twice."""
    make, batches = EXPERTS["mixture"]
    strategy = superpipeline(k=1, k_prime=1)
    with simulated(capacity=ROOM_FOR_ALL):
        ours = fit(make, [*batches(), *batches()], strategy)
    assert_same(ours, fit(make, [*batches(), *batches()]))
    assert any("experts" in layer.name for layer in strategy.plan.layers)
    assert "offload" in strategy.activations.values()


# ---------------------------------------------------------------------- what is alive, and how often forwards run


_runs: list[StorageWeakRef] = []  # not an attribute, which a second run restores


class Counted(nn.Module):
    """Notes each run of its forward, with the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.inner(x))
        _runs.append(StorageWeakRef(hidden.untyped_storage()))
        return x + self.outer(torch.tanh(hidden))


class CountsAlive(Module):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(Counted() for _ in range(8))))
        self.alive: list[int] = []
        self.ran: list[int] = []

    def loss(self, batch: Any) -> Tensor:
        _runs.clear()
        loss = super().loss(batch)
        self.alive.append(sum(not each.expired() for each in _runs))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.ran.append(len(_runs))


@pytest.mark.parametrize(
    ("options", "alive", "runs"),
    [
        ({}, 8, 8),
        ({"gpu_memory": "12MiB"}, 2, 8),
        ({"activations": "keep"}, 8, 8),
        ({"activations": "offload"}, 2, 8),
        ({"activations": "recompute"}, 0, 16),
    ],
    ids=["auto, fits", "auto, full", "keep", "offload", "recompute"],
)
def test_activations_that_are_alive_after_a_forward(options: dict[str, Any], alive: int, runs: int) -> None:
    """``"auto"`` kept all activations while it claimed to recompute them: the first run's hook held them."""
    batches = [torch.randn(4096, 64) for _ in range(5)]
    ours = fit(CountsAlive, batches, superpipeline(k=1, k_prime=1, **options))
    assert_same(ours, fit(CountsAlive, batches))
    module: Any = ours.module
    assert module.alive == [alive] * len(batches)
    assert module.ran == [runs] * len(batches)


# ---------------------------------------------------------------------- errors


def test_memory_that_ends_in_the_first_batch_is_a_clear_error(large: None) -> None:
    """One layer alone saves more than there is."""
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train(3 * Saves.SIZE, lambda: saving([1, 5, 1]), rows())
    note = "".join(raised.value.__notes__)
    assert 'Use less: SuperpipelineStrategy(activations="recompute"), ' in note


@pytest.mark.long("takes a second or more")
def test_a_host_without_room_keeps_what_it_can(monkeypatch: pytest.MonkeyPatch, large: None) -> None:
    warned: list[str] = []
    monkeypatch.setattr(
        "sp_lightning.SuperpipelineStrategy.log.warning", lambda text, *values: warned.append(text % values)
    )
    monkeypatch.setattr(HostRing, "take", lambda self, nbytes: None)
    capacity = 8 * Saves.SIZE + 24_000  # all would fit without what is left for a layer
    ours, _ = train(capacity, eight, rows()[:1])
    assert_same(ours, fit(eight, rows()[:1]))
    assert ours.trainer.strategy.stats().offloaded_activation_bytes == 0
    assert len(warned) == 1


# ---------------------------------------------------------------------- graphs


class Retains(Module):
    """Two backwards of one graph, and a graph that outlives its step."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.automatic_optimization = False
        self.before: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.long("takes a second or more")
@pytest.mark.usefixtures("everything_is_worth_moving")
def test_two_backwards_of_one_graph() -> None:
    batches = [torch.randn(128, 16) for _ in range(3)]
    peaks = [train(ROOM_FOR_ALL, Retains, batches[:1], activations=mode)[1].peak for mode in ("keep", "offload")]
    ours, device = train(sum(peaks) // 2, Retains, batches)
    assert_same(ours, fit(Retains, batches))
    assert ours.trainer.strategy.stats().offloaded_activation_bytes > 0
    assert device.peak <= sum(peaks) // 2


class WritesSaved(nn.Module):
    """Writes in place what it has saved: autograd refuses it when backward needs that."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.inner(x))
        y.mul_(2)
        return y


@pytest.mark.long("takes a second or more")
@pytest.mark.usefixtures("everything_is_worth_moving")
@pytest.mark.parametrize("evicts", [False, True])
def test_a_saved_tensor_that_was_written_is_refused_as_ever(evicts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if evicts:
        monkeypatch.setattr(Tuner, "_left", lambda self, kept: -1)

    def make() -> Module:
        stack = Stack()
        stack.blocks[1] = WritesSaved()
        return Module(stack)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fit(make, vectors())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(ROOM_FOR_ALL, make, vectors())


class Exchanges(nn.Module):
    """Gives a leaf that was saved other memory, which autograd follows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full_like(x, 2.0).detach()
        y = self.inner(x) * mask
        mask.data = torch.full_like(mask, 3.0)
        return y


@pytest.mark.long("takes a second or more")
@pytest.mark.usefixtures("everything_is_worth_moving")
def test_a_kept_leaf_is_followed_to_other_memory_as_ever() -> None:
    def make() -> Module:
        stack = Stack()
        stack.blocks[1] = Exchanges()
        return Module(stack)

    ours, _ = train(ROOM_FOR_ALL, make, vectors())
    assert_same(ours, fit(make, vectors()))


@pytest.mark.long("takes a second or more")
@pytest.mark.usefixtures("everything_is_worth_moving")
def test_what_is_kept_is_freed_as_backward_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    load = Kept.load

    def noted(self: Kept) -> Any:
        loaded = load(self)
        alive.append(sum(each() is not None for each in self._headroom._kept))
        return loaded

    monkeypatch.setattr(Kept, "load", noted)
    train(ROOM_FOR_ALL, lambda: Module(Stack()), vectors()[:1])
    assert alive[0] > 10
    assert alive[-1] <= 3


class Island(nn.Module):
    """It leaves autocast for a part of its forward, which reads a float32 weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        with torch.autocast("cpu", enabled=False):
            return x + self.b(h.float())  # type: ignore[no-any-return]


class WithIslands(Module):
    """One of them is called twice: its second forward finds no cast on the device, of which autocast makes one."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(Island() for _ in range(4))))

    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        return net(net[0](batch)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.long("takes a second or more")
def test_a_copy_of_a_weight_is_no_value_that_each_run_has_anew() -> None:
    """With two forwards of a batch, it was taken for a forward that advances an iterator."""
    options: Any = {"precision": "bf16-mixed", "recorded": "losses"}
    plain = fit(fused(WithIslands), vectors() * 2, **options)
    with simulated(capacity=ROOM_FOR_ALL), crowded():
        assert_same(fit(fused(WithIslands), vectors() * 2, superpipeline(k=1), **options), plain)
