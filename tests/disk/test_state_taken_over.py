"""State on a disk that another optimizer takes over, that two parameters share, or that two optimizers have."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.capabilities.disk import tier as disk_tier
from sp_lightning.capabilities.disk.state_placement import StatePlacement
from tests.support.models import Module, Stack, vectors
from tests.support.on_disk import away, on_disk, without_room
from tests.support.runs import assert_equal, assert_same, fit, loader, trainer_for
from tests.support.tiers import first

ROOM = 8 * 2**10


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory has room for less than what all layers' state takes."""
    without_room(monkeypatch)
    monkeypatch.setattr(disk_tier, "place_state", lambda sizes, *_: StatePlacement({}, sizes, ROOM, ROOM))


def _new(parameters: Any, overlap: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True if overlap != "off" else None)


def _shares(new: Any, old: Any) -> None:
    new.state = old.state


def _loads(new: Any, old: Any) -> None:
    new.load_state_dict(old.state_dict())


def _copies_entries(new: Any, old: Any) -> None:
    for parameter, state in old.state.items():
        new.state[parameter] = dict(state)


TAKES = {take.__name__.strip("_"): take for take in (_shares, _loads, _copies_entries)}
OVERLAPS = first(["off", "forward", "backward"], "forward", why="the same in other modes of updates")


class Takes(Module):
    """Makes a new optimizer where it is asked to, which goes on from the state of the one before."""

    def __init__(self, overlap: Any, take: Any, where: str) -> None:
        super().__init__(Stack())
        self.overlap, self.take, self.where = overlap, take, where
        self.before: Any = None

    def configure_optimizers(self) -> Any:
        optimizer = _new(self.parameters(), self.overlap)
        if self.before is not None:
            self.take(optimizer, self.before)
        self.before = optimizer
        return optimizer

    def _exchanges(self, where: str) -> None:
        if where == self.where:
            self.trainer.strategy.optimizers = [self.configure_optimizers()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self._exchanges("in the step")
        return super().training_step(batch, batch_idx)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self._exchanges("between epochs")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("where", first(["in the step", "between epochs"], "in the step", why="another moment"))
@pytest.mark.parametrize("take", first(TAKES, "loads", second=list(TAKES)[:2], why="other ways of the same"))
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_optimizer_of_the_same_run(overlap: Any, take: str, where: str, tmp_path: Path) -> None:
    def make() -> Takes:
        return Takes(overlap, TAKES[take], where)

    options: Any = {"max_epochs": 3, "recorded": "losses"}
    ours = fit(make, vectors(), on_disk(tmp_path, optimizer_overlap=overlap), **options)
    assert_same(ours, fit(make, vectors(), **options))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "second",
    first(["disk", "memory", "plain", "the same trainer"], "disk", "memory", second=["plain"], why="other second runs"),
)
@pytest.mark.parametrize("take", first(TAKES, "shares", second=[], why="other ways of the same"))
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_second_fit(overlap: Any, take: str, second: str, tmp_path: Path) -> None:
    """The state of the first run is on its disk still. Whatever steps with it next finds it there, in the background too."""

    def two_fits(first: Any, strategy: Any) -> Any:
        seed_everything(7, verbose=False)
        module, trainer = Takes(overlap, TAKES[take], ""), trainer_for(first)
        trainer.fit(module, loader(vectors()))
        if first != "auto":
            assert away(module.before) > 0
        if strategy is None:
            trainer.fit_loop.max_epochs = 2
        else:
            trainer = trainer_for(strategy)
        trainer.fit(module, loader(vectors()))
        return {**module.state_dict()}, copy.deepcopy(module.before.state_dict())

    strategies: dict[str, Any] = {
        "disk": on_disk(tmp_path, optimizer_overlap=overlap),
        "memory": SuperpipelineStrategy(k=1, optimizer_overlap=overlap),
        "plain": "auto",
        "the same trainer": None,
    }
    ours = two_fits(on_disk(tmp_path, optimizer_overlap=overlap), strategies[second])
    plain = two_fits("auto", None if strategies[second] is None else "auto")
    assert_equal(ours, plain, "weights and state")


@pytest.mark.rest("takes tenths of a second")
def test_the_end_of_a_run_leaves_state_on_the_disk(tmp_path: Path) -> None:
    """Lightning moves the state to the CPU then, which must not copy it."""
    module = Takes("off", _shares, "")
    trainer_for(on_disk(tmp_path)).fit(module, loader(vectors()))
    assert away(module.before) == sum(
        value.numel() > 1 for state in module.before.state.values() for value in state.values()
    )


class AfterStep(Callback):
    """Does something with the optimizer after the second batch of each epoch."""

    def __init__(self, look: Any) -> None:
        self.look = look

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.look(trainer.optimizers[0])


# ---------------------------------------------------------------------- shared state


WITHIN = first([True, False], False, why="of one layer instead of two")


def _shared(within: bool) -> Any:
    """Two parameters of one shape get one tensor of state, those of one layer or those of two."""

    def share(optimizer: Any) -> None:
        names = dict(zip(optimizer.state, range(len(optimizer.state)), strict=True))
        blocks = [[p for p in names if p.shape == (16, 16)][i : i + 2] for i in (0, 2)]
        one, other = blocks[0] if within else (blocks[0][0], blocks[1][0])
        optimizer.state[other]["exp_avg"] = optimizer.state[one]["exp_avg"]

    return share


class Doubled(Module):
    """Each block has two weights of one shape."""

    def __init__(self, overlap: Any) -> None:
        super().__init__(nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(4)]))
        self.overlap = overlap

    def configure_optimizers(self) -> Any:
        return _new(self.parameters(), self.overlap)


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("overlap", first(["off", "forward", "backward"], "backward", why="the same in other modes"))
def test_state_that_two_parameters_share_is_refused(overlap: Any, within: bool, tmp_path: Path) -> None:
    """What it becomes depends on the order of the updates, which is not the optimizer's where layers are updated one by one."""
    strategy = on_disk(tmp_path, optimizer_overlap=overlap, layers="net.?")
    with pytest.raises(RuntimeError, match=r"disk= updates layers one by one, but two parameters share a state"):
        fit(lambda: Doubled(overlap), vectors(), strategy, callbacks=[AfterStep(_shared(within))], recorded="losses")


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("overlap", first(["forward", "backward"], "backward", why="the same in another mode"))
def test_without_a_disk_such_a_step_is_not_taken_apart(overlap: Any, within: bool) -> None:
    def run(strategy: Any) -> Any:
        return fit(
            lambda: Doubled(overlap), vectors(), strategy, callbacks=[AfterStep(_shared(within))], recorded="losses"
        )

    assert_same(run(SuperpipelineStrategy(k=1, optimizer_overlap=overlap, layers="net.?")), run("auto"))


# ---------------------------------------------------------------------- two optimizers


class TwoByHand(Module):
    """Optimizes by hand: one optimizer for the first half of the blocks, another one for the rest."""

    def __init__(self, overlap: Any) -> None:
        super().__init__(Stack())
        self.automatic_optimization = False
        self.overlap = overlap

    def configure_optimizers(self) -> Any:
        first, second = self.net.blocks[:2], self.net.blocks[2:]
        return [_new([p for block in each for p in block.parameters()], self.overlap) for each in (first, second)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = self.optimizers()
        for optimizer in (first, second, first) if batch_idx % 2 else (second,):
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
        return loss


class Alternating(TwoByHand):
    """Both optimizers step all blocks, the second one with momentum alone."""

    def configure_optimizers(self) -> Any:
        fused = True if self.overlap != "off" else None
        slow = torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9, fused=fused)
        return [_new(self.parameters(), self.overlap), slow]


class OneState(TwoByHand):
    """Both optimizers step all blocks, with one state."""

    def configure_optimizers(self) -> Any:
        one, other = (_new(self.parameters(), self.overlap) for _ in range(2))
        other.state = one.state
        return [one, other]


BY_HAND = first([TwoByHand, Alternating, OneState], Alternating, second=[OneState], why="other pairs of optimizers")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("kind", BY_HAND)
@pytest.mark.parametrize("overlap", first(["off", "forward"], "forward", why="without updates in the background"))
@pytest.mark.parametrize(
    "precision", first(["32-true", "bf16-mixed"], "32-true", second=[], why="the matrix has the other one")
)
def test_two_optimizers_by_hand(kind: Any, overlap: Any, precision: Any, tmp_path: Path) -> None:
    strategy = on_disk(tmp_path, optimizer_overlap=overlap)
    options: Any = {"max_epochs": 2, "recorded": "losses", "precision": precision}
    ours = fit(lambda: kind(overlap), vectors(), strategy, **options)
    assert_same(ours, fit(lambda: kind(overlap), vectors(), **options))


@pytest.mark.rest("takes tenths of a second")
def test_by_hand_nothing_is_updated_in_backward(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'optimizer_overlap="backward" cannot be used: optimization is manual'):
        fit(lambda: TwoByHand("backward"), vectors(), on_disk(tmp_path, optimizer_overlap="backward"))
