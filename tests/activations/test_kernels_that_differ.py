"""Kernels that leave memory unwritten or round in another way each time, and backwards that read saved tensors twice."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from sp_lightning.capabilities.activations import recompute
from sp_lightning.capabilities.activations.fingerprints import SavedRun, only_rounding_differs, whole
from sp_lightning.capabilities.activations.recompute import FirstRun, Unrepeatable
from sp_lightning.core.torch_compat.private import current_graph_task
from tests.support.kernels import (
    CountsSaved,
    NoiseAlone,
    RunsKernel,
    Writes,
    from_third_batch,
    new_memory,
    with_one,
)
from tests.support.models import Module, twice, vectors
from tests.support.repeated_block import Block
from tests.support.runs import assert_same, fit, superpipeline
from tests.support.simdevice import simulated
from tests.support.tiers import first

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving", "nothing_fits")

BATCHES = [*vectors(), *vectors()]
OFFLOADED = "So activations of net.blocks.2 are offloaded or kept"
_numbers = itertools.count()


class ReadsIndices(RunsKernel):
    """Saves two indices that an iterator has given."""

    def saved(self) -> Tensor:
        return torch.tensor([next(_numbers), next(_numbers)])


class LastBits(RunsKernel):
    """Adds in another order each time, also with deterministic algorithms."""

    def rounds(self) -> float:
        return 1 + next(_numbers) % 4 * 2**-22


class AddsByIndex(Block):
    def factor(self, x: Tensor) -> Any:
        return torch.zeros_like(x).index_add_(0, torch.zeros(len(x), dtype=torch.long), self.inner(x)).exp()


class Noise(RunsKernel):
    """Reads an iterator."""

    def rounds(self) -> float:
        return 1 + next(_numbers) % 8 * 2**-12


class NoiseThatEnds(RunsKernel):
    """Reads an iterator whose values are the same after a while."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = itertools.chain([1.0, 1.5, 2.0, 2.25, 2.5], itertools.repeat(3.0))

    def rounds(self) -> float:
        return next(self.noise)


class Modes(Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            self.modes = dict(trainer.strategy.activations)


def auto(make: Any, batch: int = 2) -> Any:
    """The run, and the modes of a batch. The third batch's time is measured: all units are recomputed that can be."""
    noted = Modes(batch)
    with simulated(capacity=26_000, unrepeatable=True):
        ours = fit(make, BATCHES, superpipeline(k=1, k_prime=1, activations="auto"), callbacks=[noted])
    return ours, noted.modes


def test_memory_that_a_kernel_has_not_written_is_not_compared() -> None:
    with simulated():
        assert len({tuple(new_memory().tolist()) for _ in range(3)}) > 1
        ours = fit(twice(RunsKernel), vectors(), superpipeline(k=1, activations="recompute"))
    assert_same(ours, fit(twice(RunsKernel), vectors()))


class WritesLater(RunsKernel):
    """A counter fills the memory from the third batch on."""

    batch = 0

    def saved(self) -> Tensor:  # type: ignore[override]
        return torch.tensor([next(_numbers), 1]) if self.batch > 1 else new_memory()


class CountsBatches(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        WritesLater.batch = batch_idx


def test_memory_that_a_kernel_writes_later_is_compared_again() -> None:
    with simulated(), pytest.raises(Unrepeatable, match="computed other values in backward"):
        fit(lambda: CountsBatches(twice(WritesLater)().net), vectors(), superpipeline(k=1, activations="recompute"))
    assert WritesLater.batch == 2


@pytest.mark.rest("recompute finds such memory in the same way")
def test_auto_recomputes_a_forward_with_such_memory() -> None:
    ours, modes = auto(with_one(RunsKernel))
    assert_same(ours, fit(with_one(RunsKernel), BATCHES))
    assert set(modes.values()) == {"recompute"}


@pytest.mark.parametrize("block", [ReadsIndices, LastBits, AddsByIndex, Noise])
def test_recompute_raises_for_all_that_differs(block: type[nn.Module]) -> None:
    with simulated(unrepeatable=True), pytest.raises(Unrepeatable, match="computed other values in backward"):
        fit(with_one(block), vectors(), superpipeline(k=1, activations="recompute"))


@pytest.mark.parametrize(
    "block", first([ReadsIndices, Noise, NoiseThatEnds], Noise, why="each raises in the same place")
)
def test_auto_raises_for_iterators_that_it_has_read(block: type[nn.Module]) -> None:
    with pytest.raises(Unrepeatable, match="computed other values each time it ran"):
        auto(with_one(block))


@pytest.mark.parametrize(
    "block", first([LastBits, AddsByIndex], AddsByIndex, why="a kernel outside of torch is the same")
)
def test_auto_recomputes_no_kernel_that_is_not_deterministic(
    block: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch.superpipeline"):
        _, modes = auto(with_one(block))
    assert [unit for unit, mode in modes.items() if mode != "recompute"] == ["net.blocks.2"]
    assert caplog.text.count(OFFLOADED) == 1
    assert not torch.are_deterministic_algorithms_enabled()


# ---------------------------------------------------------------------- after the trial


class Unlike(Block):
    """Another factor in forward than in backward, by less than a bit of 16-bit numbers."""

    def factor(self, x: Tensor) -> Any:
        return torch.tanh(self.inner(x)) * (1.001 if current_graph_task() == -1 else 1)


class WritesAnother(Block):
    net: list[Any]

    def factor(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.net[0].blocks[4].inner.bias.mul_(0.9)
        return torch.tanh(self.inner(x))


class Trains(Block):
    """Gives its weight a gradient in forward."""

    def factor(self, x: Tensor) -> Any:
        if current_graph_task() == -1:
            self.inner(x.detach()).square().mean().backward()
        return torch.tanh(self.inner(x))


@pytest.mark.parametrize("block", first([LastBits, AddsByIndex], LastBits, why="another kernel is the same"))
def test_a_kernel_may_differ_for_the_first_time_after_the_trial(
    block: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    make = from_third_batch(block)
    with caplog.at_level(logging.INFO, "lightning.pytorch.superpipeline"):
        ours, modes = auto(make, 3)
    assert modes["net.blocks.2"] != "recompute"
    assert caplog.text.count(OFFLOADED) == 1
    torch.testing.assert_close(ours.losses, fit(make, BATCHES).losses)


@pytest.mark.parametrize("block", first([Unlike, Noise, ReadsIndices], Unlike, why="compared in the same place"))
def test_a_larger_difference_after_the_trial_is_an_error(block: type[nn.Module]) -> None:
    with pytest.raises(Unrepeatable, match="computed other values in backward"):
        auto(from_third_batch(block))


@pytest.mark.parametrize(
    "block", first([Writes, WritesAnother, Trains], Writes, why="found when the first run has ended, too")
)
def test_a_forward_may_begin_to_write_after_the_trial(block: type[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    make = from_third_batch(block)
    with caplog.at_level(logging.INFO, "lightning.pytorch.superpipeline"):
        ours, modes = auto(make, 3)
    assert modes["net.blocks.2"] != "recompute"
    assert caplog.text.count(OFFLOADED) == 1
    assert_same(ours, fit(make, BATCHES))


# ---------------------------------------------------------------------- further runs fail


@pytest.mark.parametrize("fails", first([torch.OutOfMemoryError, RuntimeError], RuntimeError, why="caught together"))
def test_deterministic_runs_may_fail(
    fails: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing() -> Any:
        raise fails("no deterministic kernel")

    caplog.set_level(logging.INFO, "lightning.pytorch.superpipeline")
    monkeypatch.setattr(recompute, "deterministic", failing)
    _, modes = auto(with_one(AddsByIndex))
    assert [unit for unit, mode in modes.items() if mode != "recompute"] == ["net.blocks.2"]
    assert caplog.text.count("A further run of 'net.blocks.2' failed") == 1
    assert OFFLOADED not in caplog.text
    _, modes = auto(from_third_batch(AddsByIndex), 3)
    assert modes["net.blocks.2"] != "recompute"
    with pytest.raises(Unrepeatable, match="computed other values each time it ran"):
        auto(with_one(NoiseAlone))


# ---------------------------------------------------------------------- comparisons


def runs(*saved: Any) -> list[SavedRun]:
    made = [SavedRun(lambda address: None, keep=whole) for _ in saved]
    for run, each in zip(made, saved, strict=True):
        run.note(each)
    return made


@pytest.mark.parametrize(
    ("change", "rounding"),
    [
        (lambda x: x * (1 + 2**-22), True),
        (lambda x: x * (1 + 2**-15), False),
        (lambda x: x.double(), False),
        (lambda x: x.t(), False),
        (lambda x: x.long(), False),
    ],
)
def test_last_bits_are_told_from_other_changes(change: Callable[[Tensor], Tensor], rounding: bool) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    assert only_rounding_differs(runs(x, x, x, x, change(x)), x.device) is rounding


def test_a_mean_of_zero_may_be_rounded_and_masks_may_not_change() -> None:
    x, cpu = torch.randn(64, generator=torch.Generator().manual_seed(1)), torch.device("cpu")
    one, other = ([x, torch.tensor(mean), torch.tensor([-torch.inf, 0])] for mean in (1e-9, 3e-9))
    assert only_rounding_differs(runs(one, other, one, other, one), cpu)
    assert not only_rounding_differs(runs(x > 0, x < 0, x > 0, x < 0, x > 0), cpu)


# ---------------------------------------------------------------------- saved tensors that are read twice

_nodes: list[Any] = []


class ReadsNodes(Block):
    """A hook reads what the nodes of all blocks so far have saved, before their backward reads it."""

    def factor(self, x: Tensor) -> Any:
        output = torch.tanh(self.inner(x))
        if current_graph_task() == -1:
            _nodes.append(output.grad_fn)
        nodes = list(_nodes)
        output.register_hook(lambda gradient: gradient + sum(node._saved_result.mean() for node in nodes))
        return output


class RetainsGraph(Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        _nodes.clear()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.parametrize("block", [CountsSaved, ReadsNodes])
def test_saved_tensors_may_be_read_twice(block: type[nn.Module]) -> None:
    def make() -> Module:
        return RetainsGraph(twice(block)().net)

    ours = fit(make, vectors(), superpipeline(k=1, activations="recompute"))
    assert_same(ours, fit(make, vectors()))
    _nodes.clear()


@pytest.mark.rest("recompute is the same")
def test_auto_recomputes_a_forward_whose_saved_tensors_are_read_twice() -> None:
    ours, modes = auto(twice(CountsSaved))
    assert_same(ours, fit(twice(CountsSaved), BATCHES))
    assert set(modes.values()) == {"recompute"}


def test_what_is_read_twice_is_computed_once_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    firsts: set[Any] = set()
    held: list[int] = []
    factor, unpacked = CountsSaved.factor, FirstRun.unpacked

    def counted(self: Any, x: Tensor) -> Any:
        runs.append(self)
        return factor(self, x)

    def watched(self: Any, *args: Any) -> Any:
        tensor = unpacked(self, *args)
        firsts.add(self)
        held.append(sum(len(each.read) > 0 for each in firsts))
        return tensor

    monkeypatch.setattr(CountsSaved, "factor", counted)
    monkeypatch.setattr(FirstRun, "unpacked", watched)
    fit(lambda: RetainsGraph(twice(CountsSaved)().net), vectors(1), superpipeline(k=1, activations="recompute"))
    assert len(runs) == 5 * 3  # a forward and two backwards
    assert max(held) == 1
