"""Failures that ranks report to each other. Here all ranks are in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic, sleep

import pytest
import torch.distributed as dist

from sp_lightning.experimental.ranks import failures
from sp_lightning.experimental.ranks.failures import Failures, RankError, RankInterrupt


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dist.TCPStore]]:
    """The store at which the processes have met, which is gone once it is out of this list."""
    there = [dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)]
    monkeypatch.setattr(failures, "store_of_default_group", lambda: there[0])
    yield there
    there.clear()
    assert comes(lambda: not listening()), "threads are left"


@pytest.fixture
def ranks(store: list[dist.TCPStore]) -> Iterator[list[Failures]]:
    made = [Failures("a run", f"rank {rank}", 3, lambda: ended.append(0)) for rank in range(3)]
    for each in made:
        each.begin()
    yield made
    for each in made:
        each.end()
    ended.clear()


ended: list[int] = []
"""One number for each rank that has ended its collectives on devices."""


def comes(true: Callable[[], object]) -> bool:
    late = monotonic() + 10
    while not true() and monotonic() < late:
        sleep(0.005)
    return bool(true())


def listening() -> int:
    return sum(thread.name == "superpipeline-failures" for thread in threading.enumerate())


@pytest.mark.rest("takes tenths of a second")
def test_all_ranks_read_the_first_failure(ranks: list[Failures]) -> None:
    ranks[1].report(ValueError("no\nnot this way"))
    ranks[2].report(RankError("rank 1 has failed"))
    for each in ranks:
        assert comes(partial(getattr, each, "first"))
        error = each.error("while rank 0 waited for a step")
        assert type(error) is RankError
        assert str(error) == "rank 1 has failed while rank 0 waited for a step: ValueError: no\nnot this way"
    assert comes(lambda: len(ended) == 3), "they would wait for it in C++, where nothing looks for failures"


@pytest.mark.rest("takes tenths of a second")
def test_another_run_has_other_failures(ranks: list[Failures]) -> None:
    ranks[0].report(ValueError("no"))
    another = Failures("another run", "rank 0", 3)
    another.begin()
    sleep(0.3)
    assert another.error("nothing") is None
    another.end()


@pytest.mark.rest("takes tenths of a second")
def test_the_thread_ends_with_the_run_and_begins_with_the_next_one(ranks: list[Failures]) -> None:
    for each in ranks:
        each.end()
    assert comes(lambda: not listening())
    ranks[0].begin()
    ranks[0].begin()
    assert comes(lambda: listening() == 1)
    ranks[1].report(ValueError("no"))
    assert comes(lambda: ranks[0].first)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RankInterrupt("rank 0 was interrupted")])
def test_an_interrupt_of_one_rank_is_one_of_all(error: BaseException, ranks: list[Failures]) -> None:
    """A third rank hears of an interrupt that was passed on, too."""
    ranks[0].report(error)
    assert comes(lambda: ranks[1].first)
    assert type(ranks[1].error("while rank 1 waited")) is RankInterrupt


def test_a_lost_store_has_no_failures(store: list[dist.TCPStore], ranks: list[Failures]) -> None:
    """The process that has it may have ended in order, a little before this one."""
    store.clear()
    assert comes(lambda: not listening())
    assert ranks[0].error("nothing") is None
    ranks[0].report(ValueError("nobody hears it"))
