"""Several devices that update layers in backward: an owner updates a layer once no rank needs its former weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import sleep
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.updates.layerwise import LayerwiseStep
from sp_lightning.core.weights.gradients import Gradients
from sp_lightning.experimental.ranks.gradients import SummedGradients
from tests.equality.on_ranks import EveryBatch, seen
from tests.support.models import Module, Stack, vectors
from tests.support.ranks import RanksFailed, in_ranks, rank
from tests.support.runs import assert_equal, fit, fused

pytestmark = pytest.mark.rest("runs of two ranks")

RANKS = 2
STEPS = 4
LAYERS = 7


@contextmanager
def begun() -> Iterator[list[int]]:
    """The number of layers that this rank has updated in backward, step by step."""
    early: list[int] = []
    submit = LayerwiseStep.submit

    def noted(self: Any, *args: Any) -> Any:
        early.append(len(self.begun))
        return submit(self, *args)

    with mock.patch.object(LayerwiseStep, "submit", noted):
        yield early


class Net(Module):
    def __init__(self) -> None:
        super().__init__(Stack())


class Writes(Net):
    """Writes and exchanges weights of two layers before each batch, on every rank, as a module under ``ddp`` has to."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.blocks[1].inner.weight.data.mul_(0.9)
        self.net.blocks[2].outer.bias.data = self.net.blocks[2].outer.bias.data * 0.9


class Keeps(Net):
    """Rank 1 keeps the memory of all weights, and reads it at the end of backward, after the other rank has come far."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.read: list[Tensor] = []
        self.net.blocks[0].register_full_backward_pre_hook(lambda *_: self.look())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kept = [parameter.data for parameter in self.parameters()] if rank() == 1 else []

    def look(self) -> None:
        sleep(0.2 * rank())
        self.read += [each.clone() for each in self.kept]


class Reads(Net):
    """Rank 1 reads a weight in backward, after the gradients of its layer were summed."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[0].register_full_backward_pre_hook(lambda *_: self.look())

    def look(self) -> None:
        if rank() == 1:
            self.net.blocks[3].inner.weight.sum()


def train(kind: type[Net], plain: bool, precision: Any = "32-true", agree: bool = True) -> tuple[Any, list[int]]:
    made = list[Any]()

    def make() -> Net:
        made.append(fused(kind)())
        return made[0]

    strategy = EveryBatch() if plain else SuperpipelineStrategy(k=1, optimizer_overlap="backward")
    with begun() as early, ExitStack() as stack:
        if not agree:
            stack.enter_context(mock.patch.object(SummedGradients, "_apply_drain", Gradients._apply_drain))
        outcome = fit(make, vectors(STEPS * RANKS), strategy, devices=RANKS, recorded="losses", precision=precision)
    return seen(outcome) | {"read": getattr(made[0], "read", [])}, early


def check(ours: Any, plain: Any) -> None:
    for number, ((mine, _), (theirs, _)) in enumerate(zip(ours, plain, strict=True)):
        assert_equal({**mine, "optimizers": None}, {**theirs, "optimizers": None}, f"rank {number}")
    assert_equal(ours[0][0]["optimizers"], plain[0][0]["optimizers"], "optimizers")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(("kind", "layers"), [(Net, LAYERS), (Writes, LAYERS - 2)])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_layers_that_no_rank_has_written_are_updated_in_backward(kind: Any, layers: int, precision: str) -> None:
    ours = in_ranks(RANKS, train, kind, False, precision)
    check(ours, in_ranks(RANKS, train, kind, True, precision))
    assert [sum(each) for each in zip(*(early for _, early in ours), strict=True)] == [layers] * STEPS


@pytest.mark.long("takes a second or more")
def test_no_layer_is_updated_that_another_rank_may_read() -> None:
    """Without the ranks' agreement, which comes with the sum, rank 1 reads weights that are updated already."""
    plain = in_ranks(RANKS, train, Keeps, True)
    check(in_ranks(RANKS, train, Keeps, False), plain)
    with pytest.raises(AssertionError, match=r"read.*values differ"):
        check(in_ranks(RANKS, train, Keeps, False, agree=False), plain)


@pytest.mark.long("takes a second or more")
def test_a_later_use_on_another_rank_is_an_error() -> None:
    with pytest.raises(RanksFailed, match=r"had updated layer 'net.blocks.3' when, in the same backward") as caught:
        in_ranks(RANKS, train, Reads, False)
    assert "RankError: rank 1" in str(caught.value.errors[0])


class Foreign(Net):
    """Its optimizer steps a parameter that the module does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [nn.Parameter(torch.ones(16))]

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch * self.others[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.parameters(), *self.others])


def train_foreign(mode: Any) -> None:
    fit(
        fused(Foreign), vectors(8), SuperpipelineStrategy(k=1, optimizer_overlap=mode), devices=RANKS, recorded="losses"
    )


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_a_step_that_must_run_as_a_whole_is_refused(mode: str) -> None:
    with pytest.raises(RanksFailed, match=r"one by one, but the optimizer has a parameter of shape \(16,\)"):
        in_ranks(RANKS, train_foreign, mode)
