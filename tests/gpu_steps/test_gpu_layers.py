"""Layers that stay on the device: what they move, whose bits they have, who is told, and what is refused.

The models are in ``tests/equality`` (``staying``), what is waited for in ``tests/device/test_waits.py``, user code that reads and
writes in ``test_layers_that_stay.py``.
"""

from __future__ import annotations

import ctypes
import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from sp_lightning import SuperpipelineStrategy
from sp_lightning.capabilities.gpu_steps.staying import StayingLayers
from sp_lightning.core.device.device import Wait
from sp_lightning.core.device.layout import PAGE
from sp_lightning.core.engine.clipping import Clipping
from sp_lightning.core.observe.stats import Stats
from tests.support.made_bytes import MadeBytes
from tests.support.models import Module, Stack, vectors
from tests.support.on_device import Stepped, on_device
from tests.support.plain_bits import BATCHES, OPTIMIZERS
from tests.support.plain_bits import Stepped as OfKind
from tests.support.runs import Outcome, assert_same, fit, superpipeline
from tests.support.simdevice import SimDevice, simulated
from tests.support.tiers import first

ALL = 99


class Counts(Callback):
    """Notes the counters after each step."""

    def __init__(self) -> None:
        self.found: list[Stats] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.found.append(trainer.strategy.stats())

    def per_step(self, name: str) -> list[int]:
        """By how much a counter has risen in each step but the first."""
        values = [getattr(each, name) for each in self.found]
        return [after - before for before, after in zip(values, values[1:], strict=False)]


MOVED = ("fetched_bytes", "offloaded_gradient_bytes", "step_upload_bytes", "step_download_bytes")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}], ids=str)
def test_a_layer_that_stays_moves_nothing(options: dict[str, Any], precision: Any) -> None:
    counts = Counts()
    with simulated():
        strategy = on_device(gpu_layers=ALL, optimizer_overlap="forward")
        ours = fit(Stepped, vectors(8), strategy, recorded="losses", precision=precision, callbacks=[counts], **options)
    for name in MOVED:  # the second step finds the layers there
        assert not any(counts.per_step(name)[3:]), name
    assert_same(ours, fit(Stepped, vectors(8), recorded="losses", precision=precision, **options))


@pytest.mark.long("takes a second or more")
def test_what_moves_falls_with_each_layer_that_stays() -> None:
    moved = []
    for share in (0, 2, 4, ALL):
        counts = Counts()
        with simulated():
            fit(Stepped, vectors(6), on_device(gpu_layers=share), recorded="losses", callbacks=[counts])
        moved.append(sum(counts.per_step(name)[-1] for name in MOVED))
    assert moved == sorted(moved, reverse=True)
    assert len(set(moved)) == 4
    assert moved[-1] == 0


@pytest.mark.long("takes a second or more")
def test_the_host_waits_twice_for_clipping_however_many_layers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all norms together, and for the coefficient."""
    waits, per_step = [0], list[int]()
    copy, clip = Tensor.cpu, Clipping.by_norm

    def counted(tensor: Tensor) -> Tensor:
        waits[-1] += 1
        return copy(tensor)

    def clips(*arguments: Any) -> None:
        waits.append(0)
        clip(*arguments)
        per_step.append(waits.pop())

    monkeypatch.setattr(Tensor, "cpu", counted)
    monkeypatch.setattr(Clipping, "by_norm", clips)

    def run(strategy: Any) -> Outcome:
        def make() -> Stepped:
            return Stepped(lambda ps: torch.optim.AdamW(ps, fused=True))

        return fit(make, vectors(4), strategy, recorded="losses", gradient_clip_val=0.05)

    plain = run("auto")
    for share in (1, 4):
        with simulated():
            ours = run(SuperpipelineStrategy(k=1, gpu_layers=share, optimizer_overlap="forward"))
        assert per_step[-1] == 2
        assert_same(ours, plain)


class PartlyFrozen(Module):
    """Three blocks are frozen, and one weight of another layer."""

    def __init__(self) -> None:
        super().__init__(Stack())
        net: Any = self.net
        for block in net.blocks[:3]:
            block.requires_grad_(False)
        net.stem.bias.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.long("takes a second or more")
def test_frozen_layers_stay_too() -> None:
    counts = Counts()
    with simulated():
        ours = fit(PartlyFrozen, vectors(6), on_device(gpu_layers=ALL), recorded="losses", callbacks=[counts])
    assert not any(counts.per_step("fetched_bytes")[1:])
    assert_same(ours, fit(PartlyFrozen, vectors(6), recorded="losses"))


@pytest.mark.long("takes a second or more")
def test_steps_of_layers_that_stay_write_their_slots() -> None:
    """Neither memory for steps nor slots beyond the plan are taken."""
    with simulated():
        strategy = on_device(gpu_layers=ALL)
        fit(Stepped, vectors(4), strategy, recorded="losses")
    stats, plan = strategy.stats(), strategy.plan
    assert stats.extra_slots == 0
    assert stats.peak_device_bytes <= plan.peak_device_bytes - (plan.update_bytes - plan.staying_bytes)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16-mixed"}, {"precision": "32-true", "gradient_clip_val": 1e-3}],
    ids=["widens", "clips"],
)
def test_the_plan_counts_what_a_step_makes(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the budget full of layers that stay, the allocator had to free memory in each step, or ran out of it."""
    made, step = list[int](), StayingLayers.step

    def counted(*args: Any, **settings: Any) -> None:
        with MadeBytes() as counts:
            step(*args, **settings)
        made.append(counts.most)

    monkeypatch.setattr(StayingLayers, "step", counted)
    strategy, make = on_device(gpu_layers=ALL), partial(Stepped, partial(torch.optim.AdamW, foreach=True))
    with simulated():
        fit(make, vectors(4), strategy, recorded="nothing", **options)
    plan = strategy.plan
    most = max(made[len(made) // 2 :])  # without the first steps, which make state
    weights = max(4 * sum(math.prod(span.shape) for span in layer.spans) for layer in plan.layers)
    masters = sum(plan.moving[layer.masters].nbytes for layer in plan.layers if layer.masters is not None)
    kept = masters + sum(3 * layer.gradient_bytes - layer.narrow_bytes for layer in plan.layers)
    assert 2 * weights <= most <= plan.staying_bytes - kept <= 2 * max(layer.gradient_bytes for layer in plan.layers)


class CountsPages(Callback):
    """Counts the pages of host memory that weights have, after each step."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        layers = trainer.strategy._run.engine._moving
        memories = [layer.block.memory._memory.bytes for layer in layers if layer.block.memory._memory is not None]
        self.found.append(sum(resident_pages(each) for each in memories))


def resident_pages(memory: Tensor) -> int:
    """How many pages of page-aligned memory the system has in its memory."""
    flags = (ctypes.c_ubyte * (memory.nbytes // PAGE))()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), flags)
    return sum(flag & 1 for flag in flags)


@pytest.mark.long("takes a second or more")
def test_what_stays_takes_no_host_memory() -> None:
    counts = {share: CountsPages() for share in (0, 4, ALL)}
    for share, pages in counts.items():
        with simulated():
            fit(Stepped, vectors(4), on_device(gpu_layers=share), recorded="losses", callbacks=[pages])
    none, some, every = (pages.found[-1] for pages in counts.values())
    assert none > some > every == 0


# ---------------------------------------------------------------------- whose bits

MIXED: list[tuple[str, str, str, dict[str, Any]]] = [
    ("AdamW, fused", "bf16-mixed", "forward", {}),
    ("AdamW, fused", "32-true", "auto", {"gradient_clip_val": 0.1}),
    ("Adam, decay, fused", "32-true", "off", {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    ("AdamW, fused", "bf16-true", "forward", {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}),
]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(("name", "precision", "overlap", "options"), first(MIXED, *MIXED[:2], why="the same way"))
def test_some_layers_step_on_the_gpu_and_the_others_on_the_cpu(
    name: str, precision: str, overlap: Any, options: dict[str, Any]
) -> None:
    """On the simulated device both places have the same bits, if the user's optimizer is fused."""
    make, options = partial(OfKind, OPTIMIZERS[name]), {"precision": precision, **options}
    with simulated():
        strategy = SuperpipelineStrategy(k=1, optimizer_overlap=overlap, gpu_layers=3)
        ours = fit(make, BATCHES, strategy, recorded="nothing", **options)
    assert strategy.stats().step_upload_bytes > 0
    assert_same(ours, fit(make, BATCHES, recorded="nothing", **options))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("stay", first([0, 3], 3, why="the same without layers that stay"))
def test_all_layers_step_on_the_gpu_as_an_unchanged_program_does(stay: int) -> None:
    make = partial(OfKind, OPTIMIZERS["AdamW"])
    with simulated():
        ours = fit(make, BATCHES, SuperpipelineStrategy(k=1, optimizer_on="gpu", gpu_layers=stay), recorded="nothing")
    assert_same(ours, fit(make, BATCHES, recorded="nothing"))


# ---------------------------------------------------------------------- as many as fit


def chosen(capacity: int, **options: Any) -> tuple[Outcome, SuperpipelineStrategy]:
    batches = [each * (1 + at / 10) for at, each in enumerate((*BATCHES, *BATCHES))]
    with simulated(capacity=capacity):
        strategy = SuperpipelineStrategy(gpu_layers="auto", **options)
        return fit(partial(OfKind, OPTIMIZERS["AdamW"]), batches, strategy, recorded="losses"), strategy


@pytest.mark.long("takes a second or more")
def test_as_many_layers_stay_as_fit() -> None:
    counts = []
    for capacity in (80_000, 120_000, 2**20):
        _, strategy = chosen(capacity, optimizer_on="gpu")
        assert strategy.plan.peak_device_bytes <= capacity
        counts.append(len(strategy.plan.stay))
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == len(strategy.plan.layers)


@pytest.mark.long("takes a second or more")
def test_why_none_stays_by_choice_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch.superpipeline"):
        _, strategy = chosen(2**20)
        assert not strategy.plan.stay
        assert 'No layer stays on the GPU (gpu_layers="auto"): results would depend on the choice' in caplog.text
        fit(Stepped, vectors(2), SuperpipelineStrategy(gpu_layers="auto"), recorded="losses")
        assert 'No layer stays on the GPU (gpu_layers="auto"): the model computes on the CPU.' in caplog.text


@pytest.mark.long("takes a second or more")
def test_as_many_stay_with_all_steps_on_the_gpu() -> None:
    """State that the first steps have made on the host is no reason against that: nobody else holds it."""
    counts = Counts()
    with simulated(capacity=2**20):
        strategy = SuperpipelineStrategy(gpu_layers="auto", optimizer_on="gpu")
        ours = fit(Stepped, vectors(9), strategy, recorded="losses", callbacks=[counts])
    assert len(strategy.plan.stay) == len(strategy.plan.layers)
    for name in MOVED:
        assert not any(counts.per_step(name)[-3:]), name
    assert_same(ours, fit(Stepped, vectors(9), recorded="losses"))


def test_fused_steps_on_the_cpu_promise_nothing_where_layers_stay(caplog: pytest.LogCaptureFixture) -> None:
    strategy = SuperpipelineStrategy(k=1, gpu_layers=3, optimizer_overlap="forward")
    with caplog.at_level(logging.INFO, "lightning.pytorch.superpipeline"):
        fit(Stepped, vectors(2), strategy, recorded="losses")
    assert "layers that stay step as you made it: weights are those of neither" in caplog.text
    assert "results are bitwise" not in caplog.text


class ReadsWeights(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.net.stem.weight.sum()


@pytest.mark.long("takes a second or more")
def test_none_stays_by_choice_where_user_code_reads_weights_in_each_step(caplog: pytest.LogCaptureFixture) -> None:
    make, batches = partial(OfKind, OPTIMIZERS["AdamW"]), [*BATCHES, *BATCHES, *BATCHES]
    with simulated(capacity=2**20), caplog.at_level(logging.INFO, "lightning.pytorch.superpipeline"):
        strategy = SuperpipelineStrategy(gpu_layers="auto", optimizer_on="gpu")
        fit(make, batches, strategy, recorded="losses", callbacks=[ReadsWeights()])
    assert "user code reads or writes weights in each step" in caplog.text
    assert not strategy.plan.stay


class Asks(OfKind):
    def on_train_end(self) -> None:
        strategy: Any = self.trainer.strategy
        self.said = strategy._step_advice(1e9)  # of a run that has hardly waited


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("waited", "given", "said"),
    [
        (
            1.0,
            {},
            "Try gpu_layers=7: 7 of 7 layers fit on the GPU with their optimizer state, and step there.",
        ),
        (0.1, {}, ""),
        (1.0, {"gpu_layers": 1}, ""),
    ],
)
def test_a_run_that_waits_for_updates_is_told_what_fits(
    waited: float, given: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    def stalled(device: Any, *why: Wait) -> float:
        return waited if Wait.FETCH_AFTER_UPDATE in why else 0.5 if Wait.USE_AFTER_FETCH in why else 0.0

    monkeypatch.setattr(SimDevice, "stall_seconds", stalled)
    options: Any = {"gradient_clip_val": 1.0, "recorded": "nothing"}
    with simulated(capacity=2**20):
        strategy = SuperpipelineStrategy(optimizer_overlap="forward", **given)
        ours = fit(partial(Asks, OPTIMIZERS["AdamW"]), [*BATCHES, *BATCHES], strategy, **options)
    module: Any = ours.module
    assert module.said == said


# ---------------------------------------------------------------------- what is refused


class ReadsMemory(Callback):
    """Reads a weight as a C++ extension does, which does not ask for it."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with torch.DisableTorchFunctionSubclass():
            pl_module.net.head.weight.data_ptr()


@pytest.mark.rest("takes tenths of a second")
def test_a_read_that_does_not_ask_is_an_error() -> None:
    with (
        simulated(),
        pytest.raises(RuntimeError, match=r"'net.head.weight' was read while the weight stays on the GPU"),
    ):
        fit(Stepped, vectors(4), on_device(gpu_layers=ALL), recorded="losses", callbacks=[ReadsMemory()])


class ByHand(Stepped):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        raise AssertionError("it is refused before")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (ByHand, "gpu_layers=2 steps layers on the GPU, which is not possible: optimization is manual"),
        (
            partial(Stepped, lambda parameters: torch.optim.LBFGS(parameters)),
            "gpu_layers=2 steps layers on the GPU, which is not possible: LBFGS steps all parameters together",
        ),
    ],
)
def test_what_cannot_step_there(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(make, vectors(2), superpipeline(k=1, gpu_layers=2), recorded="losses")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (-1, ValueError, 'a number of layers (8), a share of them (0.5) or "auto", found -1'),
        (1.5, ValueError, "found 1.5. For example gpu_layers=0.5"),
        (float("nan"), ValueError, "found nan"),
        (True, TypeError, "found True"),
        ("all", TypeError, "found 'all'"),
    ],
)
def test_wrong_values(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        SuperpipelineStrategy(gpu_layers=given)
    assert message in str(raised.value)


def test_state_is_in_one_place(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"gpu_layers=0\.5 keeps optimizer state in GPU memory, and disk= keeps it on a disk"
    ):
        SuperpipelineStrategy(gpu_layers=0.5, disk=tmp_path)


def test_too_many_layers_are_refused_with_what_they_take() -> None:
    with (
        pytest.raises(ValueError, match=r"The 7 layers that stay take .*: lower gpu_layers"),
        simulated(capacity=70_000),
    ):
        fit(Stepped, vectors(2), on_device(gpu_layers=ALL, gpu_memory=70_000), recorded="losses")


class OtherThreads(Callback):
    """Changes the number of torch's threads after the optimizers were set up."""

    def on_fit_start(self, *_: Any) -> None:
        torch.set_num_threads(torch.get_num_threads() + 1)


@pytest.mark.long("takes a second or more")
def test_the_cpu_steps_other_layers_with_the_threads_that_training_begins_with() -> None:
    """The bits of a step that is not fused may depend on their number."""
    threads = torch.get_num_threads()
    try:
        with simulated() as made:
            strategy = superpipeline(k=1, gpu_layers=2, optimizer_overlap="off")
            fit(Stepped, vectors(2), strategy, recorded="losses", callbacks=[OtherThreads()])
        assert made[-1].background_threads == threads + 1
    finally:
        torch.set_num_threads(threads)
