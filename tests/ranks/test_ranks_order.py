"""NCCL needs one order of all collectives of devices, of all groups: those of user code, and the sums of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.experimental.ranks.collectives import Collectives
from tests.equality.on_ranks import EveryBatch, seen
from tests.support.models import Module, Stack, vectors
from tests.support.ranks import in_ranks
from tests.support.runs import assert_equal, fit
from tests.support.simdevice import simulated

RANKS = 2
COLLECTIVES = ("allreduce", "gather", "allgather", "_allgather_base", "broadcast", "reduce_scatter")
"""Methods of a process group, which torch's functions call."""


class OverRanks(torch.autograd.Function):
    """Adds a mean over the ranks in forward, and its gradient in backward, as ``SyncBatchNorm`` does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mean = x.mean(0)
        dist.all_reduce(mean)
        return x + mean / RANKS

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        of_mean = gradients[0].sum(0)
        dist.all_reduce(of_mean)
        return gradients[0] + of_mean / RANKS / len(gradients[0])


class Synchronized(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return OverRanks.apply(x)  # type: ignore[no-any-return]


class Net(Module):
    """Each second block is followed by a module that reduces over the ranks."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.net.blocks = nn.Sequential(*(
            each for block in self.net.blocks for each in (block, Synchronized())
        ))  # fmt: skip


@contextmanager
def on_devices() -> Iterator[None]:
    """Ranks behave as on accelerators: gradients are summed by the group for their tensors, and no host waits for it."""
    make = Collectives.__init__

    def init(self: Any, device: torch.device, per_node: int | None = None) -> None:
        make(self, torch.device("meta"), per_node)

    with simulated(), mock.patch.object(Collectives, "__init__", init):
        yield


@contextmanager
def logged() -> Iterator[list[tuple[str, str]]]:
    """The collectives of this rank, in their order: the group, and the method."""
    log: list[tuple[str, str]] = []

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(group: Any, *args: Any) -> Any:
            log.append((group.group_name, name))
            return call(group, *args)

        return noted

    with ExitStack() as stack:
        for name in COLLECTIVES:
            method = noting(name, getattr(dist.ProcessGroup, name))
            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, method))
        yield log


def train(plain: bool) -> tuple[dict[str, Any], list[tuple[str, str]], str]:
    """Returns what this rank has seen, its collectives within the last backward, and the default group's name."""
    with logged() as log, ExitStack() as stack:
        if not plain:
            stack.enter_context(on_devices())
        of_backward = OfBackward(log)
        strategy = EveryBatch() if plain else SuperpipelineStrategy(k=1)
        found = fit(Net, vectors(8), strategy, devices=RANKS, callbacks=[of_backward], recorded="losses")
        return seen(found), of_backward.log, dist.group.WORLD.group_name  # type: ignore[union-attr]


class OfBackward(Callback):
    """Keeps the collectives of the last backward."""

    def __init__(self, all_of_them: list[tuple[str, str]]) -> None:
        self.all = all_of_them
        self.log: list[tuple[str, str]] = []

    def on_before_backward(self, *_: Any) -> None:
        self.all.clear()

    def on_after_backward(self, *_: Any) -> None:
        self.log = [*self.all]


@pytest.mark.rest("runs of two ranks")
def test_all_collectives_of_devices_are_in_one_group_and_in_one_order() -> None:
    """In two groups of NCCL, a rank could begin a sum while another one begins the module's, and both would wait for ever."""
    ours = in_ranks(RANKS, train, False)
    for (mine, _, _), (theirs, _, _) in zip(ours, in_ranks(RANKS, train, True), strict=True):
        assert_equal(mine | {"optimizers": []}, theirs | {"optimizers": []}, "rank")
    (_, first, group), (_, second, _) = ours
    assert first == second
    assert {of for of, _ in first[1:-1]} == {group}, "before and after, hosts compare and agree"
    summed = [name for _, name in first[1:-1]]
    assert "gather" in summed[summed.index("allreduce") : -summed[::-1].index("allreduce")], "they alternate"
