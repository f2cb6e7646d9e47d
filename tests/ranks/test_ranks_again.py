"""One process after the other trains with several trainers: nothing is left of those that are over."""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from time import sleep
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from sp_lightning import SuperpipelineStrategy
from sp_lightning.experimental.ranks.failures import RankError
from tests.support.models import Module, Stack, vectors
from tests.support.ranks import Number, devices, in_ranks, rank, start
from tests.support.runs import assert_equal, loader, trainer_for


def threads() -> int:
    """How many threads this process has, with those that Python has not started: the least in a second, in which some end."""
    least = len(os.listdir("/proc/self/task"))
    for _ in range(10):
        sleep(0.1)
        least = min(least, len(os.listdir("/proc/self/task")))
    return least


def make() -> pl.LightningModule:
    pl.seed_everything(3, verbose=False)
    return Module(Stack(4))


def new_trainer(number: Number) -> pl.Trainer:
    return trainer_for(SuperpipelineStrategy(k=1, k_prime=1), **devices(number))


def train_with_several(number: Number) -> list[int]:
    counted = []
    for _ in range(5):
        new_trainer(number).fit(make(), loader(vectors()))
        counted.append(threads())
    return counted


@pytest.mark.long("five trainers each; the first tier has trainers that take turns")
@pytest.mark.parametrize("number", [2, (2, 1)])
def test_trainers_one_after_the_other_leave_no_threads(number: Number) -> None:
    for counted in in_ranks(number, train_with_several, number):
        # gloo has three for each group, and each time there are two new ones.
        assert counted[-1] < counted[1] + 6, counted


class FailsOnRank1(Module):
    def on_train_batch_end(self, *_: Any) -> None:
        if rank() == 1:
            raise ValueError("no")


def fit_in_the_users_group(file: str) -> dict[str, Any]:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank(), world_size=2)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    module = make()
    new_trainer(2).fit(module, loader(vectors()))
    return module.state_dict()


@pytest.mark.long("processes that are started for it")
def test_a_process_group_of_the_user_is_used(tmp_path: Path) -> None:
    """Failures were read from the store of MASTER_ADDR, which such a group need not have."""
    (first, state), (second, _) = start(2, fit_in_the_users_group, str(tmp_path / "store")).outcomes()
    assert (first, second) == (None, None)
    (expected, *_), _ = in_ranks(2, _plain_states)
    assert_equal(state, expected, "weights")


def _plain_states() -> list[dict[str, Any]]:
    module = make()
    new_trainer(2).fit(module, loader(vectors()))
    return [module.state_dict()]


def train_in_turns(number: Number) -> Any:
    first, second = new_trainer(number), new_trainer(number)
    module, other = make(), make()
    batches = vectors()
    first.fit(module, loader(deepcopy(batches)))
    second.fit(other, loader(deepcopy(batches)))
    first.strategy.barrier("of the user's")  # by now others have the groups
    told = first.strategy.broadcast(first.global_rank + 5, 1)
    first.fit_loop.max_epochs = 2
    first.fit(module, loader(deepcopy(batches)))
    second.fit_loop.max_epochs = 2
    second.fit(other, loader(deepcopy(batches)))
    return told, module.state_dict(), other.state_dict()


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("number", [2, (2, 1)])
def test_trainers_take_turns(number: Number) -> None:
    for told, module, other in in_ranks(number, train_in_turns, number):
        assert told == 6
        assert_equal(module, other, "two trainers")


def end_all_groups() -> bool:
    trainer = new_trainer(2)
    trainer.fit(make(), loader(vectors()))
    ranks: Any = trainer.strategy._ranks
    dist.destroy_process_group()
    ranks.close()
    return ranks.closed and trainer.strategy._ranks is None


@pytest.mark.long("takes a second or more")
def test_groups_that_the_user_has_ended_are_not_ended_again() -> None:
    assert start(2, end_all_groups).outcomes() == [(None, True)] * 2


def save_alone(folder: str) -> str:
    trainer = new_trainer(2)
    trainer.fit(make(), loader(vectors()))
    if rank() == 1:
        os._exit(0)
    sleep(0.5)
    with pytest.raises(RankError) as caught:
        trainer.save_checkpoint(f"{folder}/never.ckpt")
    return str(caught.value)


@pytest.mark.long("processes that are started for it")
def test_a_rank_that_has_ended_after_its_run_is_named(tmp_path: Path) -> None:
    (error, said), _ = start(2, save_alone, str(tmp_path)).outcomes()
    assert error is None
    assert "the process of rank 1 has ended while rank 0 waited for" in said


def fit_again_alone() -> str:
    with pytest.raises((ValueError, RuntimeError)):
        new_trainer(2).fit(FailsOnRank1(Stack(4)), loader(vectors()))
    if rank() == 0:
        os._exit(0)
    sleep(0.5)
    with pytest.raises(RankError) as caught:
        new_trainer(2).fit(make(), loader(vectors()))
    return str(caught.value)


@pytest.mark.long("processes that are started for it")
def test_a_rank_that_trains_again_alone_is_told_so() -> None:
    _, (error, said) = start(2, fit_again_alone).outcomes()
    assert error is None
    assert "rank 1 cannot connect to the other ranks" in said
