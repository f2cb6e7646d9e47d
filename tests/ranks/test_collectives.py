"""Errors of collectives: which one is raised, and how long a rank waits for the reason."""

from __future__ import annotations

from threading import Timer
from time import sleep
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from sp_lightning import SuperpipelineStrategy
from sp_lightning.experimental.ranks import ranks
from sp_lightning.experimental.ranks.collectives import Collectives
from sp_lightning.experimental.ranks.failures import RankError
from sp_lightning.experimental.ranks.process_locks import ProcessLocks
from tests.support.models import Module, Stack, vectors
from tests.support.ranks import devices, rank, start
from tests.support.runs import loader, trainer_for


class Two(Collectives):
    """Rank 0 of two, without processes. Another rank may have ended, and report its error ``late`` seconds later."""

    def __init__(self, ended: int | None = None, late: float = 0.0, places: dict[str, str] | None = None) -> None:
        self.number = self.node = 0
        self.nodes = 1
        self.size = self.world = 2
        failures: Any = SimpleNamespace(pause=0.1, reads=True, error=lambda waited: None, places=lambda: places or {})
        locks: Any = SimpleNamespace(ended=lambda: ended)
        self._failures, self._locks = failures, locks
        if late:
            reported = RankError("rank 1 has failed: what the user's code says")
            Timer(late, setattr, (failures, "error", lambda waited: reported)).start()


@pytest.mark.rest("takes tenths of a second")
def test_a_process_that_has_ended_may_have_reported_why() -> None:
    assert "what the user's code says" in str(Two(ended=1, late=0.1)._error("a step"))
    assert "the process of rank 1 has ended while rank 0 waited for a step" in str(Two(ended=1)._error("a step"))


@pytest.mark.rest("takes tenths of a second")
def test_a_collective_may_fail_before_the_error_is_read() -> None:
    assert "what the user's code says" in str(Two(late=0.3)._lost("a step", RuntimeError("closed")))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("places", "said"),
    [
        ({}, "No answer from rank 0, which has the store"),
        ({"rank 0": "a step"}, "No answer from rank 1: the process stands still"),
        ({"rank 0": "a step", "rank 1": "a sum"}, "rank 0 was last at a step; rank 1 was last at a sum"),
    ],
)
def test_missing_ranks_are_named(places: dict[str, str], said: str) -> None:
    found = str(Two(places=places)._lost("a step", RuntimeError("closed")))
    assert said in found
    assert found.endswith("(closed)")


class Late(ProcessLocks):
    """Rank 1 is late with its lock."""

    def __init__(self, *arguments: Any) -> None:
        sleep(0.7 * rank())
        super().__init__(*arguments)


def connect_late() -> None:
    with mock.patch.object(ranks, "ProcessLocks", Late):
        trainer_for(SuperpipelineStrategy(k=1, k_prime=1), **devices(2)).fit(Module(Stack(4)), loader(vectors()))


@pytest.mark.long("processes that are started for it")
def test_a_process_without_its_lock_has_not_ended() -> None:
    """On a busy machine, a rank that was slow to connect was taken for one that was killed."""
    assert [error for error, _ in start(2, connect_late).outcomes()] == [None, None]
