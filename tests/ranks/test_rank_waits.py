"""The waits of several devices: leave each out, and a rank then reads or writes too early.

Those between streams of one device are left out on the simulated device. Those between ranks are left out while one rank is
held up where it matters, so that the other one comes too early:

| wait | who is held up |
|---|---|
| STEP_AFTER_ARRIVAL | rank 1, in a hook before the step that then looks at weights |
| READ_AFTER_OWNER | rank 0, before its optimizer's step |
| READ_AFTER_PUBLISH | rank 0, before it shares gradients |
| READ_AFTER_FILL | rank 0, before it has cast the weights |
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from time import monotonic, sleep
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.device import Wait
from sp_lightning.experimental.ranks import collectives
from sp_lightning.experimental.ranks.gradient_copies import GradientCopies
from sp_lightning.experimental.ranks.owners import RankOwners
from sp_lightning.experimental.ranks.ranks import Ranks
from tests.equality.cases import CASES
from tests.equality.on_ranks import EveryBatch, seen
from tests.support.models import Module, Stack, vectors
from tests.support.ranks import RanksFailed, in_ranks, rank
from tests.support.runs import Make, assert_equal, fit, fused
from tests.support.simdevice import simulated
from tests.support.wait_scenarios import OF_RANKS, left_out

RANKS = 2
ON_THE_DEVICE = (Wait.REDUCE_AFTER_GRADIENT, Wait.DRAIN_AFTER_REDUCE)
SECONDS = 0.3
SOON = 3


def accumulate(simulate: bool, omit: str | None = None) -> tuple[dict[str, Any], set[str]]:
    """Accumulates in a model with residents, so that gradients come to ``param.grad`` twice."""
    case = CASES["vit"]

    def run() -> dict[str, Any]:
        strategy = SuperpipelineStrategy(k=1)
        return seen(fit(case.make, list(case.batches()) * RANKS, strategy, devices=RANKS, accumulate_grad_batches=2))

    if not simulate:
        return run(), set()
    with left_out(), simulated(None if omit is None else Wait[omit]) as made:
        outcome = run()
    return outcome, {wait.name for wait in made[0].waits}


@pytest.mark.long("each starts four processes; the first tier has the equality that these waits give")
@pytest.mark.parametrize("wait", ON_THE_DEVICE, ids=lambda wait: wait.name)
def test_every_wait_between_devices_is_needed(wait: Wait) -> None:
    plain = in_ranks(RANKS, accumulate, False)
    ours = in_ranks(RANKS, accumulate, True)
    for (mine, waits), (theirs, _) in zip(ours, plain, strict=True):
        assert wait.name in waits
        assert_equal(mine, theirs, "rank")
    with pytest.raises(RanksFailed, match=r"Race|Mixed"):
        in_ranks(RANKS, accumulate, True, wait.name)


# ---------------------------------------------------------------------- between ranks


class Looks(Callback):
    """Looks at weights right before the optimizer's step, and after the batch; rank 1 is late."""

    def __init__(self, late: bool) -> None:
        self.late = late
        self.seen: list[torch.Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.late:
            sleep(SECONDS * rank())
        self._look(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._look(pl_module)

    def _look(self, module: Any) -> None:
        self.seen += [parameter.detach().clone() for parameter in module.parameters()]


@contextmanager
def held_up(kind: type, method: str, who: int) -> Iterator[None]:
    """While this is active one rank is late in a method."""
    original = getattr(kind, method)

    def late(self: Any, *args: Any, **kwargs: Any) -> Any:
        if rank() == who:
            sleep(SECONDS)
        return original(self, *args, **kwargs)

    with mock.patch.object(kind, method, late):
        yield


HELD_UP: dict[Wait, Callable[[], Any]] = {
    Wait.STEP_AFTER_ARRIVAL: ExitStack,
    Wait.READ_AFTER_OWNER: lambda: held_up(RankOwners, "_merge", 0),
    Wait.READ_AFTER_PUBLISH: lambda: held_up(GradientCopies, "open", 0),
    Wait.READ_AFTER_FILL: lambda: held_up(RankOwners, "_cast", 0),
}


@contextmanager
def without(omit: Wait | None) -> Iterator[None]:
    """Nobody waits between ranks for this reason. What a collective brings is there all the same."""
    barrier, wait_until, left = Ranks.barrier, Ranks.wait_until, list[Any]()

    def goes_past(self: Ranks, what: str, number: float = 0, *, why: Any = None) -> list[float]:
        if why is None or why is not omit:
            return barrier(self, what, number, why=why)
        texts = torch.zeros(512 * self.world, dtype=torch.uint8)
        group = self._everybody
        left.append((texts, dist.all_to_all_single(texts.clone(), texts, group=group, async_op=True)))
        return [number] * self.world

    def early(self: Ranks, counter: torch.Tensor, number: int, why: Wait) -> None:
        if why is not omit:
            wait_until(self, counter, number, why)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Ranks, "barrier", goes_past))
        stack.enter_context(mock.patch.object(Ranks, "wait_until", early))
        yield


class Net(Module):
    def __init__(self) -> None:
        super().__init__(Stack())


class ByHand(Net):
    """Its forward comes before the optimizer's step, for which the ranks wait for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Exchanges(Callback):
    """Exchanges a layer between two batches, so that the store is filled anew. At set-up Lightning itself has a barrier."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            pl_module.net.head = copy.deepcopy(pl_module.net.head)


def train(why: str, overlap: Any, omit: bool, late: bool) -> dict[str, Any]:
    wait = Wait[why]
    looks = Looks(late and wait is Wait.STEP_AFTER_ARRIVAL)
    options: dict[str, Any] = {"callbacks": [looks]}
    make: Make = Net if overlap == "off" else fused(Net)
    with ExitStack() as stack:
        if late:
            stack.enter_context(HELD_UP[wait]())
        if omit:
            stack.enter_context(without(wait))
        if wait is Wait.READ_AFTER_FILL:
            make = ByHand
            options |= {"callbacks": [Exchanges()], "precision": "bf16-mixed"}
        strategy = SuperpipelineStrategy(k=1, optimizer_overlap=overlap)
        found = seen(fit(make, vectors(4), strategy, devices=RANKS, **options))
    return {**found, "looked at": looks.seen}


@pytest.mark.long("each holds a rank up; the first tier has the equality that these waits give")
@pytest.mark.parametrize(
    ("wait", "overlap"),
    [
        (Wait.STEP_AFTER_ARRIVAL, "off"),
        (Wait.READ_AFTER_OWNER, "off"),
        (Wait.READ_AFTER_OWNER, "forward"),
        (Wait.READ_AFTER_PUBLISH, "off"),
        (Wait.READ_AFTER_FILL, "off"),
    ],
    ids=str,
)
def test_every_wait_between_ranks_is_needed(wait: Wait, overlap: str) -> None:
    plain = in_ranks(RANKS, train, wait.name, overlap, False, False)
    assert_equal(in_ranks(RANKS, train, wait.name, overlap, False, True), plain, "held up")
    try:
        early = in_ranks(RANKS, train, wait.name, overlap, True, True)
    except RanksFailed:
        return
    with pytest.raises(AssertionError, match="values differ"):
        assert_equal(early, plain, "early")


class Keeps(Callback):
    """Keeps the memory of all weights over the step, and reads it afterwards: nothing notices that read."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.seen: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.kept = [parameter.data for parameter in pl_module.parameters()]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen += [each.clone() for each in self.kept]


def keep(plain: bool) -> list[torch.Tensor]:
    keeps = Keeps()
    strategy = EveryBatch() if plain else SuperpipelineStrategy(k=1, optimizer_overlap="forward")
    with ExitStack() if plain else held_up(RankOwners, "_merge", 0):
        fit(fused(Net), vectors(8), strategy, devices=RANKS, callbacks=[keeps])
    return keeps.seen


@pytest.mark.long("each starts four processes; holds a rank up")
def test_a_rank_that_keeps_memory_of_weights_waits_for_their_owners() -> None:
    assert_equal(in_ranks(RANKS, keep, False), in_ranks(RANKS, keep, True), "kept")


def never_published() -> None:
    nothing: Any = lambda *_: None  # noqa: E731
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(collectives, "TIMEOUT", timedelta(seconds=SOON)))
        if rank() == 0:
            stack.enter_context(mock.patch.object(RankOwners, "publish", nothing))
        fit(fused(Net), vectors(8), SuperpipelineStrategy(k=1, optimizer_overlap="forward"), devices=RANKS)


@pytest.mark.long("waits for a timeout")
def test_a_wait_for_an_owner_that_never_writes_ends_with_the_timeout_of_the_group() -> None:
    begun = monotonic()
    with pytest.raises(RanksFailed) as caught:
        in_ranks(RANKS, never_published)
    assert monotonic() - begun < 60, "the timeout is half an hour"
    sentence = f"RankError: rank 1 has lost other ranks while it waited for this: {Wait.READ_AFTER_OWNER.value}."
    assert sentence in str(caught.value.errors[1])
    assert "RankError: rank 1 has failed" in str(caught.value.errors[0]), "rank 0 hears of it"


def test_all_waits_are_tried() -> None:
    assert {*ON_THE_DEVICE, *HELD_UP} == set(OF_RANKS)
