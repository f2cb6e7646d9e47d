"""k and k' by themselves: the largest window that pays, never more than the budget, on a device that can be full."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineStrategy
from sp_lightning.capabilities.tuning.choices import Doublings
from sp_lightning.capabilities.tuning.tuner import Tuner
from sp_lightning.core.device.device import Device
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import Plan, make_plan
from sp_lightning.core.plan.window import Window
from tests.support.models import Module
from tests.support.runs import assert_equal, assert_same, fit, superpipeline, trainer_for
from tests.support.simdevice import SimDevice, simulated
from tests.support.tiers import first

WIDTH = 64
LAYER = WIDTH * WIDTH * 4
LAYERS = 12


class Tower(nn.Module):
    """Equal layers, all of which can be residents of a small window."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        return x


def rows(*sizes: int) -> list[Tensor]:
    """Batches of so many rows."""
    torch.manual_seed(3)
    return [torch.randn(size, WIDTH) for size in sizes]


class Meter(pl.Callback):
    """Notes the window and the most memory in use, batch by batch."""

    def __init__(self, devices: list[SimDevice]) -> None:
        self._devices = devices
        self.windows: list[tuple[int, int]] = []
        self.peaks: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        plan = trainer.strategy.plan
        self.windows.append((plan.k, plan.k_prime))
        self.peaks.append(self._devices[-1].peak)


def train(capacity: int | None, batches: list[Tensor], make: Any = None, **options: Any) -> tuple[Any, Meter]:
    with simulated(capacity=capacity) as devices:
        meter = Meter(devices)
        outcome = fit(make or (lambda: Module(Tower())), batches, superpipeline(**options), callbacks=[meter])
        return outcome, meter


@pytest.fixture
def slow_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated device a copy takes no time. Here a batch is nothing but stalls, and shorter with more layers."""
    monkeypatch.setattr(Tuner, "_measured", lambda self, *_: (1 / self.engine.plan.k,) * 2)


@pytest.mark.long("takes a second or more")
@pytest.mark.usefixtures("slow_fetches")
def test_the_window_grows_to_the_budget_and_no_further() -> None:
    batches = rows(*[4] * 11)
    capacity = 12 * LAYER
    ours, meter = train(capacity, batches)
    assert_same(ours, fit(lambda: Module(Tower()), batches))
    ks = [k for k, _ in meter.windows]
    assert ks[:6] == [1, 1, 2, 2, 4, 4], "after a change, the first batch is not timed"
    k, k_prime = meter.windows[-1]
    assert k >= 4
    assert max(meter.peaks) <= capacity
    plan = make_plan(find_layers(Module(Tower())), k=-(-5 * k // 4), k_prime=k_prime)
    assert plan.peak_device_bytes + 2 * LAYER > capacity * 15 // 16, "a quarter more would not be sure to fit"


@pytest.mark.long("many batches; the first tier grows a window once")
@pytest.mark.usefixtures("slow_fetches")
@pytest.mark.parametrize("soft", first([True, False], False, why="the same where nothing but the budget limits"))
@pytest.mark.parametrize("sizes", [(4, 4, 4, 40, 4, 80, 4), (4, 4, 120, 4, 4), (64, 4, 4, 4, 64, 4)], ids=str)
def test_batches_of_any_size_stay_within_the_budget(sizes: tuple[int, ...], soft: bool) -> None:
    """The window gives way before a batch that is larger than those before, and comes back when its memory is known."""
    batches = rows(*sizes, *[4] * 10)
    _, least = train(2**40, batches, k=1, k_prime=1)
    budget = max(least.peaks) + 4 * LAYER
    ours, meter = train(2**40 if soft else budget, batches, gpu_memory=budget if soft else "100%")
    assert_same(ours, fit(lambda: Module(Tower()), batches))
    assert max(meter.peaks) <= budget
    assert meter.windows[-1][0] > 3


@pytest.mark.long("takes a second or more")
@pytest.mark.usefixtures("slow_fetches")
def test_a_window_that_finds_no_room_after_all_leaves_the_one_that_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have taken the memory since it was measured."""
    monkeypatch.setattr(Window, "fits", lambda self, plan, more=0: True)
    batches = rows(*[4] * 9)
    ours, meter = train(17 * LAYER // 2, batches)
    assert_same(ours, fit(lambda: Module(Tower()), batches))
    assert [k for k, _ in meter.windows] == [1, 1, 2, 2, 4, 4, 4, 4, 4]


class Sampling(Tower):
    """Uses four rows, however many there are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:4])


@pytest.mark.long("takes a second or more")
@pytest.mark.usefixtures("slow_fetches")
def test_a_batch_that_was_feared_for_nothing_leaves_the_window_as_it_was() -> None:
    """Not what the larger window had in use counts as the rest, but what the smaller one has."""
    _, meter = train(14 * LAYER, rows(*[4] * 16, 80, 4, 4), lambda: Module(Sampling()))
    assert meter.windows[-3] < meter.windows[-4]
    assert meter.windows[-1] == meter.windows[-2] == meter.windows[-4]


class Takes(pl.Callback):
    """Something beside torch's allocator takes memory as the first batch loads kernels."""

    def __init__(self, devices: list[SimDevice], nbytes: int) -> None:
        self._devices = devices
        self._nbytes = nbytes

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            capacity = self._devices[-1].capacity
            assert capacity is not None
            self._devices[-1].capacity = capacity - self._nbytes


@pytest.mark.long("takes a second or more")
@pytest.mark.usefixtures("slow_fetches")
@pytest.mark.parametrize("budget", [None, 24 * LAYER, "100%"])
def test_what_others_take_in_the_first_batch_is_not_there_for_the_window(budget: Any) -> None:
    """Free memory was read before libraries had loaded their kernels: the window was chosen for more than there was."""
    batches = rows(*[4] * 6)
    with simulated(capacity=24 * LAYER) as devices:
        meter = Meter(devices)
        callbacks = [meter, Takes(devices, 12 * LAYER)]
        ours = fit(lambda: Module(Tower()), batches, superpipeline(gpu_memory=budget), callbacks=callbacks)
    assert_same(ours, fit(lambda: Module(Tower()), batches))
    assert meter.windows[-1][0] > 3
    assert meter.windows[-1][0] < LAYERS, "all layers fit in what was free at first"
    assert max(meter.peaks) <= 12 * LAYER


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.usefixtures("slow_fetches")
def test_a_choice_of_the_window_hides_no_peak() -> None:
    """``torch.cuda.max_memory_allocated()`` is set back whenever a window is chosen; the counters keep what it was."""
    batches = rows(*[4] * 4)
    batches[0][0, 0] = 200.0  # takes most
    with simulated(capacity=2**40) as devices:
        strategy, meter = superpipeline(gpu_memory=2**30), Meter(devices)
        fit(lambda: Module(Swelling()), batches, strategy, callbacks=[meter])
        assert devices[-1].peak < max(meter.peaks)
    assert strategy.stats().peak_allocated_bytes == max(meter.peaks)


def peaks(strategy: Any) -> dict[str, int]:
    return {name: value for name, value in vars(strategy.stats()).items() if name.startswith("peak_")}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("on_gpu", [True, False])
def test_after_the_search_peaks_are_those_of_the_chosen_window(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were those of the largest window that was tried, and torch kept its memory from other programs."""
    monkeypatch.setattr(Tuner, "_measured", lambda self, *_: (1.0, 0.1))  # uploads stall, and no k is faster
    found, reserved, ks = [], [], list[int]()
    for options in ({"gpu_memory": 2**30}, {"k": 1, "k_prime": 1}):
        with simulated(capacity=2**40) if on_gpu else nullcontext([]) as devices:
            strategy, noted = superpipeline(**options), pl.Callback()
            noted.on_train_batch_end = lambda trainer, *_: ks.append(trainer.strategy.plan.k)  # type: ignore[method-assign]
            fit(lambda: Module(Tower()), rows(*[4] * 14), strategy, callbacks=[noted])
            reserved.append([sum(each.reserved.values()) for each in devices])
        found.append(peaks(strategy))
        assert strategy.plan.k == 1
    assert max(ks) >= 8
    assert found[0] == found[1]
    assert reserved[0] == reserved[1]


@pytest.mark.rest("takes tenths of a second")
def test_peaks_are_those_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts per process: a second run with a smaller window had the first one's peak."""
    most = [0]

    def count(device: SimDevice, value: int) -> None:
        if "allocated" in vars(device):  # a new device is the same process
            most[0] = value

    monkeypatch.setattr(SimDevice, "peak", property(lambda _: most[0], count), raising=False)
    found = []
    for k in (1, 8, 1):
        with simulated(capacity=2**40):
            strategy = superpipeline(k=k, k_prime=1)
            fit(lambda: Module(Tower()), rows(*[4] * 2), strategy)
        found.append(peaks(strategy))
    assert found[0] == found[2] != found[1]


class Swelling(Tower):
    """Takes much more memory for some batches, which do not look like it."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if x[0, 0] > 100:
            y = y + y.repeat(200, 1).mean()
        return y


def swelling_rows() -> list[Tensor]:
    batches = rows(*[4] * 12)
    batches[10][0, 0] = 200.0
    return batches


@pytest.mark.long("takes a second or more")
@pytest.mark.usefixtures("slow_fetches")
def test_a_step_that_runs_out_of_memory_says_what_to_do() -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train(20 * LAYER, swelling_rows(), lambda: Module(Swelling()))
    note = "\n".join(raised.value.__notes__)
    assert re.search(r"k=\d+ and k_prime=1: .* Use less: SuperpipelineStrategy\(k=1, k_prime=1, activations=", note), (
        note
    )
    ours, _ = train(20 * LAYER, swelling_rows(), lambda: Module(Swelling()), k=1, k_prime=1)
    assert_same(ours, fit(lambda: Module(Swelling()), swelling_rows()))


class Cell(nn.Module):
    """A layer that can be computed again or offloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.inner(x)))


class SwellingCells(nn.Module):
    """Needs so much more for some batches that it has to offload what its layers save."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Cell() for _ in range(24))

    def forward(self, x: Tensor) -> Tensor:
        swells = x[0, 0] > 100
        for layer in self.layers:
            x = layer(x)
        return x + x.repeat(20, 1).mean() if swells else x


@pytest.mark.rest("takes tenths of a second")
def test_validation_is_no_part_of_the_batch_that_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[str] = []
    clock = Device.clock

    def noted(device: Device) -> float:
        began.append("clock")
        return clock(device)

    class Notes(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            began.append("train")

        def on_validation_batch_start(self, *_: Any) -> None:
            began.append("validate")

    monkeypatch.setattr(Device, "clock", noted)
    with simulated(capacity=30 * LAYER):
        fit(
            lambda: Module(Tower()), rows(*[4] * 4), superpipeline(), val=rows(*[4] * 2), val_check_interval=2,
            callbacks=[Notes()],
        )  # fmt: skip
    first = began.index("clock")
    assert began[first - 1 : first + 3] == ["train", "clock", "clock", "validate"]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.usefixtures("slow_fetches")
def test_the_batches_of_a_step_are_timed_together() -> None:
    """Layers are uploaded again after a step, not between the batches of a step."""
    with simulated(capacity=30 * LAYER) as devices:
        meter = Meter(devices)
        fit(lambda: Module(Tower()), rows(*[4] * 9), superpipeline(), callbacks=[meter], accumulate_grad_batches=3)
    assert [k for k, _ in meter.windows] == [1] * 4 + [2] * 4 + [4]


class SwellsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient + gradient.repeat(200, 1).mean()


@pytest.mark.long("takes a second or more")
@pytest.mark.usefixtures("slow_fetches")
@pytest.mark.parametrize(
    "overlap", first(["off", "forward"], "forward", why="the same error, with no update beside it")
)
def test_out_of_memory_in_backward_says_what_would_help(overlap: Any) -> None:
    class Backward(Module):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(SwellsBackward.apply(batch.requires_grad_()) if batch[0, 0] > 100 else batch)

    with pytest.raises(torch.OutOfMemoryError) as raised:
        train(20 * LAYER, swelling_rows(), lambda: Backward(Tower()), optimizer_overlap=overlap)
    note = "\n".join(raised.value.__notes__)
    assert re.search(r"streamed with k=\d+ and k_prime=1: .*SuperpipelineStrategy\(k=1, k_prime=1, ", note), note


@pytest.mark.usefixtures("slow_fetches")
@pytest.mark.parametrize("fn", first(["predict", "validate", "test"], "predict", why="the same loop"))
def test_batches_in_inference_mode(fn: str) -> None:
    """They count no versions. The window grows and, out of memory, the error says what to do."""

    def run(strategy: Any, batches: list[Tensor]) -> Any:
        pl.seed_everything(7, verbose=False)
        module = Module(Swelling())
        module.eval()
        trainer = trainer_for(strategy)
        data: Any = DataLoader(batches, batch_size=1, collate_fn=lambda each: each[0] * 1)  # type: ignore[arg-type]
        return getattr(trainer, fn)(module, data), trainer

    batches = rows(*[4] * 6)
    plain, _ = run("auto", batches)
    with simulated(capacity=20 * LAYER):
        ours, trainer = run(superpipeline(), batches)
    assert_equal(ours, plain, fn)
    assert trainer.strategy.plan.k > 1
    with simulated(capacity=20 * LAYER), pytest.raises(torch.OutOfMemoryError) as raised:
        run(superpipeline(), swelling_rows())
    assert "Use less: SuperpipelineStrategy(" in "\n".join(raised.value.__notes__)


@pytest.mark.long("takes a second or more")
def test_out_of_memory_with_the_smallest_window_or_one_that_was_given() -> None:
    keep = {"k_prime": 1, "activations": "keep"}
    for options, advice in (
        ({"k": 1, **keep}, 'the rest are activations. Use less: SuperpipelineStrategy(activations="recompute"), '),
        ({"k": 4, **keep}, 'Use less: SuperpipelineStrategy(k=1, k_prime=1, activations="recompute"), '),
    ):
        with pytest.raises(torch.OutOfMemoryError) as raised:
            train(9 * LAYER, swelling_rows(), lambda: Module(Swelling()), **options)
        assert advice in "\n".join(raised.value.__notes__)


# ---------------------------------------------------------------------- the choice


class Card(Device):
    """A device with so much memory."""

    free = 100 * LAYER

    def free_bytes(self) -> int:
        return self.free


def begun(k: Any, k_prime: Any, budget: Any = None) -> Window:
    window = Window(k, k_prime, budget)
    window.begin(find_layers(Tower(40)), Card(torch.device("cpu")))
    return window


def chosen(window: Window, seconds: Any, stalled: Any) -> list[int]:
    """Returns each k that is tried, the chosen one last. ``seconds`` and ``stalled`` return those of a batch with k layers."""
    doublings, tried = Doublings(window), [1]
    while not doublings.over:
        doublings.measured(seconds(doublings.k), stalled(doublings.k))
        tried.append(doublings.k)
    return tried


def test_where_uploads_hide_behind_compute_the_window_stays_small() -> None:
    assert chosen(begun("auto", "auto"), lambda k: 1.0, lambda k: 0.01) == [1, 1]


def test_k_is_doubled_until_uploads_hide() -> None:
    assert chosen(begun("auto", "auto"), lambda k: 1 + 1 / k, lambda k: 0.3 / k) == [1, 2, 4, 8, 16, 32, 32]


def test_where_uploads_bind_all_room_is_used() -> None:
    """The first doublings save next to nothing: each slot saves one upload of eighty."""
    window = begun("auto", "auto", budget=20 * LAYER)
    window.rest = 5 * LAYER
    tried = chosen(window, lambda k: 3.0 * (80 - k), lambda k: 3.0 * (80 - k) - 120)
    assert tried[:4] == [1, 2, 4, 8]
    assert window.fits(window.plan(tried[-1]))
    assert not window.fits(window.plan(tried[-1] + 1))


def test_doublings_that_make_no_batch_faster_are_taken_back() -> None:
    seconds = {1: 1.0, 2: 0.9, 4: 0.895, 8: 0.9, 16: 0.9, 32: 0.9, 40: 0.9, 30: 0.9}
    assert chosen(begun("auto", "auto"), seconds.__getitem__, lambda k: 0.1) == [1, 2, 4, 8, 16, 32, 40, 30, 2]


def test_three_quarters_of_the_last_k_can_be_the_fastest() -> None:
    tried = chosen(begun("auto", "auto"), lambda k: 2 + abs(k - 29) / 10, lambda k: 0.1)
    assert tried == [1, 2, 4, 8, 16, 32, 40, 30, 30]


def test_gradients_that_were_measured_are_not_counted_twice() -> None:
    window = begun("auto", "auto")
    found = find_layers(Tower(40))
    small, large = make_plan(found, k=1, k_prime=1), make_plan(found, k=3, k_prime=2)
    assert window.needs(small) == small.peak_device_bytes
    window.rest, window.rest_gradients = 10 * LAYER, small.gradient_bytes
    assert window.needs(small) == (2 + 10) * LAYER
    assert window.needs(large) == (5 + 10 + 1) * LAYER, "one more layer's gradients are on their way with k' = 2"


def test_what_is_given_is_kept() -> None:
    given = begun(7, 3)
    assert not given.auto
    assert Doublings(given).over
    assert (given.plan(1).k, given.plan(1).k_prime) == (7, 3)
    assert begun("auto", 3).plan(2).k_prime == 3
    assert begun("auto", "auto").plan(2).k_prime == 1


def test_on_the_cpu_there_is_no_limit_to_find() -> None:
    outcome = fit(lambda: Module(Tower()), rows(4), SuperpipelineStrategy())
    plan: Plan = outcome.trainer.strategy.plan  # type: ignore[attr-defined]
    assert (plan.k, plan.k_prime) == (2, 1)
