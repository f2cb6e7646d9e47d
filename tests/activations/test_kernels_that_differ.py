"""Kernels that leave memory unwritten or round in another way each time, and backwards that read saved tensors twice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.capabilities.activations.recompute import FirstRun, Unrepeatable
from sp_lightning.core.torch_compat.private import current_graph_task
from tests.support.kernels import (
    CountsSaved,
    RunsKernel,
    new_memory,
    with_one,
)
from tests.support.models import Module, twice, vectors
from tests.support.repeated_block import Block
from tests.support.runs import assert_same, fit, superpipeline
from tests.support.simdevice import simulated

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")

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


@pytest.mark.long("takes a second or more")
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


@pytest.mark.long("takes a second or more")
def test_memory_that_a_kernel_writes_later_is_compared_again() -> None:
    with simulated(), pytest.raises(Unrepeatable, match="computed other values in backward"):
        fit(lambda: CountsBatches(twice(WritesLater)().net), vectors(), superpipeline(k=1, activations="recompute"))
    assert WritesLater.batch == 2


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("block", [ReadsIndices, LastBits, AddsByIndex, Noise])
def test_recompute_raises_for_all_that_differs(block: type[nn.Module]) -> None:
    with simulated(unrepeatable=True), pytest.raises(Unrepeatable, match="computed other values in backward"):
        fit(with_one(block), vectors(), superpipeline(k=1, activations="recompute"))


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


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("block", [CountsSaved, ReadsNodes])
def test_saved_tensors_may_be_read_twice(block: type[nn.Module]) -> None:
    def make() -> Module:
        return RetainsGraph(twice(block)().net)

    ours = fit(make, vectors(), superpipeline(k=1, activations="recompute"))
    assert_same(ours, fit(make, vectors()))
    _nodes.clear()


@pytest.mark.rest("takes tenths of a second")
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
