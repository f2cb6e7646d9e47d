"""What ranks say to each other: those that disagree are noticed wherever they are. The ranks here are in one process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from time import monotonic, sleep
from unittest import mock

import pytest
import torch.distributed as dist

from sp_lightning.device.layout import whole_pages
from sp_lightning.device.pages import create
from sp_lightning.ranks import rank_status
from sp_lightning.ranks.rank_status import NodeNews, RankError, RankInterrupt, RankStatus, status_bytes
from sp_lightning.ranks.shared_memory import SharedMemory


def statuses(size: int = 2) -> list[RankStatus]:
    nbytes = whole_pages(status_bytes(size))
    descriptor = create(nbytes, "status")
    memory = SharedMemory(descriptor, nbytes)
    os.close(descriptor)
    names = [f"rank {rank}" for rank in range(size)]
    return [RankStatus(memory, rank, {}, names, str) for rank in range(size)]


def test_ranks_that_come_in_one_order_see_each_other() -> None:
    first, second = statuses()
    for turn in range(100):  # more than are kept
        first.arrive(f"collective {turn}")
        assert not first.all_have_arrived()
        second.arrive(f"collective {turn}")
        assert first.all_have_arrived()
        assert second.all_have_arrived()


def test_the_second_to_come_says_where_both_are() -> None:
    first, second = statuses()
    first.place = "batch 3"
    first.arrive("a sum")
    with pytest.raises(RankError, match=r"rank 1 has reached a step, and rank 0 a sum, batch 3\. All ranks need"):
        second.arrive("a step")
    with pytest.raises(RankError, match="rank 0 has reached a sum, batch 3, and rank 1 a step"):
        first.wait_until(lambda: False, "the others")


def test_a_difference_that_is_past_is_found() -> None:
    """Whoever goes ahead without waiting may have left the collective at which they disagree."""
    first, second = statuses()
    for what in ("one", "two", "three", "four"):
        first.arrive(what)
    second.arrive("one")
    with pytest.raises(RankError, match="rank 1 has reached another, and rank 0 two"):
        second.arrive("another")
    with pytest.raises(RankError, match="rank 1 has reached another, and rank 0 two"):
        second.arrive("three")


def test_a_rank_far_behind_is_let_alone() -> None:
    """Collectives that it has not reached are no longer stored, so nothing is compared until it is fewer behind."""
    first, second = statuses()
    for turn in range(100):
        first.arrive(str(turn))
    for turn in range(100):
        second.arrive(str(turn))


def test_each_meeting_has_its_numbers() -> None:
    first, second = statuses()
    first.arrive("backward", 7)
    second.arrive("backward", 7)
    assert [first.number_of(rank) for rank in range(2)] == [7, 7]
    first.arrive("backward", 5)  # the other one has not looked yet
    assert [second.number_of(rank) for rank in range(2)] == [7, 7]
    second.arrive("backward", 2**53)
    assert [[each.number_of(rank) for rank in range(2)] for each in (first, second)] == [[5, 2**53]] * 2


def test_a_rank_that_has_ended_its_run_is_not_waited_for() -> None:
    first, second = statuses()
    for each in (first, second):
        each.arrive("a batch")
    second.run_ends()
    first.check("nothing")  # it has reached every collective of this rank
    with pytest.raises(RankError, match="rank 0 has reached another batch, and rank 1 the end of its run"):
        first.arrive("another batch")


def test_a_rank_that_has_failed_says_that_and_not_that_it_disagrees() -> None:
    """It ends its run while the others still have a batch."""
    first, second = statuses()
    for each in (first, second):
        each.arrive("a batch")
    second.fail(ValueError("too large"))
    second.run_ends()
    first.arrive("another batch")
    with pytest.raises(RankError, match="rank 1 has failed while rank 0 waited for it: ValueError: too large"):
        first.check("it")


def test_after_its_run_a_rank_may_be_early() -> None:
    """Scripts save checkpoints after trainer.fit, and train again."""
    first, second = statuses()
    for each in (first, second):
        each.run_ends()
    first.arrive("a barrier")
    first.check("the others")


def test_what_has_come_in_the_last_moment_counts() -> None:
    """A rank that has ended may have brought about what is waited for, after the last look."""
    first, second = statuses()
    first.arrive("a batch")
    check, there = first.check, []

    def late(why: str) -> None:
        there.append(True)
        second.run_ends()
        check(why)

    with mock.patch.object(first, "check", late):
        first.wait_until(lambda: bool(there), "the other")


def test_a_rank_that_says_nothing_is_given_up() -> None:
    first, second = statuses()
    second.arrive("a step")
    first.arrive("a step")
    first.arrive("a sum")
    with (
        mock.patch.object(rank_status, "_TIMEOUT", timedelta(seconds=0.1)),
        pytest.raises(
            RankError, match=r"rank 0 has waited 0 seconds for it\. rank 0 was last at a sum; rank 1 was last at a step"
        ),
    ):
        first.wait_until(lambda: False, "it")


def test_an_interrupt_of_another_rank_is_no_error_where_none_is_looked_for() -> None:
    """At the end of a run, and where what is waited for is there. A third rank hears of an interrupt that was passed on, too."""
    first, second, third = statuses(3)
    first.fail(KeyboardInterrupt())
    with pytest.raises(RankInterrupt) as interrupted:
        second.check("the others")
    second.fail(interrupted.value)
    second.run_ends()
    third.run_ends()
    with pytest.raises(RankInterrupt, match="rank 0 has failed"):
        third.wait_until(lambda: False, "the others")
    check, there = third.check, []

    def late(why: str) -> None:
        there.append(True)
        check(why)

    with mock.patch.object(third, "check", late):
        third.wait_until(lambda: bool(there), "the others")


def comes(true: Callable[[], object]) -> bool:
    late = monotonic() + 10
    while not true() and monotonic() < late:
        sleep(0.005)
    return bool(true())


def listening() -> int:
    return sum(thread.name == "superpipeline-nodes" for thread in threading.enumerate())


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dist.TCPStore]]:
    """The store at which the processes have met, which is gone once it is out of this list. No thread listens afterwards."""
    made = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(made.port))
    there = [made]
    del made
    yield there
    there.clear()
    assert comes(lambda: not listening())


def test_all_nodes_hear_of_the_first_failure(store: list[dist.TCPStore]) -> None:
    first, second = (NodeNews("a run", 0.01) for _ in range(2))
    first.tell("rank 1 (node 0): ValueError: no")
    second.tell("rank 2 (node 1): RankError: rank 1 has failed")
    assert comes(lambda: first.failure and second.failure)
    assert first.failure == second.failure == "rank 1 (node 0): ValueError: no"
    assert NodeNews("another run", 0.01).failure == ""


def test_the_thread_that_listens_ends_with_the_run_and_begins_with_the_next_one(store: list[dist.TCPStore]) -> None:
    news = NodeNews("a run", 0.01)
    assert listening() == 1
    news.end()
    assert comes(lambda: not listening())
    news.begin()
    news.begin()
    assert comes(lambda: listening() == 1)
    store[0].set("superpipeline/a run/failure", "no")
    assert comes(lambda: news.failure == "no")
    assert comes(lambda: not listening())


def test_a_store_that_is_lost_is_no_failure_of_another_node(store: list[dist.TCPStore]) -> None:
    """The process that has it may have come to its end in order, a little before this one."""
    news = NodeNews("a run", 0.01)
    store.clear()
    assert comes(lambda: news.lost)
    assert news.failure == ""
