"""Ranks agree on gathers, whenever each of them looks. The ranks here are in one process, and do one thing after the other."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from sp_lightning.device.layout import whole_pages
from sp_lightning.device.pages import create
from sp_lightning.ranks import gather_log
from sp_lightning.ranks.gather_log import AHEAD, GatherLog, gather_log_bytes
from sp_lightning.ranks.shared_memory import SharedMemory


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_log, "PATIENCE", 0.0)


class Others:
    """What other ranks do while one waits."""

    def __init__(self) -> None:
        self.do: list[Callable[[], Any]] = []

    def until(self, reached: Callable[[], bool], why: Any) -> None:
        for each in self.do:
            each()
        assert reached(), f"nobody brings about {why}"


def logs(size: int = 2) -> tuple[Others, list[GatherLog]]:
    nbytes = whole_pages(gather_log_bytes(size))
    descriptor = create(nbytes, "log")
    others = Others()
    made = [GatherLog(SharedMemory(descriptor, nbytes), rank, size, others.until, others.until) for rank in range(size)]
    os.close(descriptor)
    for each in made:
        each.begin(1)
    return others, made


def test_what_all_announce_takes_place() -> None:
    _, ranks = logs(3)
    for rank in ranks[:2]:
        assert rank.announce(7) == 0
    assert [rank.verdict(0) for rank in ranks[:2]] == [None, None]
    ranks[2].announce(7)
    assert all(rank.verdict(0) for rank in ranks)


def test_what_two_announce_differently_does_not() -> None:
    _, ranks = logs(3)
    ranks[0].announce(7)
    assert ranks[1].announce(8) is None
    assert ranks[0].verdict(0) is False, "the third has not to say anything"
    assert ranks[2].announce(7) is None


@pytest.mark.parametrize("how", ["end", "close_round", "close"])
def test_a_rank_that_announces_no_more_is_not_waited_for(how: str) -> None:
    _, (first, second) = logs()
    for rank in (first, second):
        rank.announce(7)
    first.announce(8)
    getattr(second, how)()
    assert second.announce(8) is None
    assert first.verdict(0), "what had been announced takes place"
    assert first.verdict(1) is False
    assert first.announce(9) is None
    assert first.disagreed


def test_a_rank_that_is_late_and_elsewhere_is_not_waited_for() -> None:
    _, (first, second) = logs()
    first.announce(7)
    assert not first.wait(0)
    assert second.announce(7) is None
    assert second.disagreed
    for rank in (first, second):
        rank.end()
    for rank in (first, second):
        rank.begin(2)
    assert second.announce(7) == 0, "the next round is another one"


def test_an_announcement_that_comes_in_time_counts() -> None:
    others, (first, second) = logs()
    first.announce(7)
    others.do.append(lambda: second.announce(7))
    assert first.wait(0)
    assert second.verdict(0)
    assert not second.disagreed


def test_a_round_closes_where_another_rank_has_not_resolved_the_last_one() -> None:
    """It may still have to look at what this rank has announced there, and has to come to the same answer."""
    _, (first, second) = logs()
    for rank in (first, second):
        rank.announce(7)
    assert first.verdict(0)
    first.end()
    first.begin(2)
    assert first.announce(7) is None
    assert second.verdict(0)


def test_ranks_in_different_rounds_do_not_agree() -> None:
    _, (first, second) = logs()
    for rank in (first, second):
        rank.end()
    first.begin(3)
    second.begin(2)  # the first one is in a round that has not ended
    assert second.announce(7) is None
    first.announce(7)
    assert first.verdict(0) is None
    second.end()
    second.begin(3)
    second.announce(7)
    assert first.verdict(0)
    assert second.verdict(0)


def test_a_rank_that_is_not_to_wait_closes_its_round() -> None:
    _, (first, second) = logs()
    for rank in (first, second):
        rank.end()
    first.begin(2, patient=False)
    second.begin(2)
    assert second.announce(7) is None


def test_as_many_are_kept_as_may_be_open() -> None:
    _, (first, second) = logs()
    for number in range(2 * AHEAD):
        first.announce(number)
        if number >= AHEAD:
            second.announce(number - AHEAD)
    for number in range(AHEAD):
        second.announce(number + AHEAD)
    assert all(rank.verdict(number) for rank in (first, second) for number in range(2 * AHEAD))
