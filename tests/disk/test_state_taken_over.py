"""State on a disk after the run: what another run and its optimizer take over."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from sp_lightning import SuperpipelineStrategy
from sp_lightning.capabilities.disk import tier as disk_tier
from sp_lightning.capabilities.disk.state_placement import StatePlacement
from tests.support.models import Module, Stack, vectors
from tests.support.on_disk import away, on_disk, without_room
from tests.support.runs import assert_equal, loader, trainer_for
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
    """Makes a new optimizer for each run, which goes on from the state of the one before."""

    def __init__(self, overlap: Any, take: Any) -> None:
        super().__init__(Stack())
        self.overlap, self.take = overlap, take
        self.before: Any = None

    def configure_optimizers(self) -> Any:
        optimizer = _new(self.parameters(), self.overlap)
        if self.before is not None:
            self.take(optimizer, self.before)
        self.before = optimizer
        return optimizer


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
        module, trainer = Takes(overlap, TAKES[take]), trainer_for(first)
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
    module = Takes("off", _shares)
    trainer_for(on_disk(tmp_path)).fit(module, loader(vectors()))
    assert away(module.before) == sum(
        value.numel() > 1 for state in module.before.state.values() for value in state.values()
    )
