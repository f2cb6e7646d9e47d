"""Errors of collectives: which one is raised, and how long a rank waits for the reason."""

from __future__ import annotations

import os
import select
import signal
from threading import Timer
from time import sleep
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from sp_lightning.core.device.device import Wait
from sp_lightning.experimental.ranks import collectives
from sp_lightning.experimental.ranks.collectives import Collectives
from sp_lightning.experimental.ranks.failures import RankError


class Two(Collectives):
    """Rank 0 of two, without processes. Another rank may have ended, and report its error ``late`` seconds later."""

    def __init__(self, other: int = 0, late: float = 0.0) -> None:
        self.number = self.node = 0
        self.nodes = 1
        self.size = self.world = 2
        failures: Any = SimpleNamespace(pause=0.1, reads=True, error=lambda waited: None)
        self._failures = failures
        self._processes, self._rank_of = select.poll(), {}
        if other:
            self._rank_of[descriptor := os.pidfd_open(other)] = 1
            self._processes.register(descriptor, select.POLLIN)
        self._on_host, self._on_devices, self._aborted = False, mock.Mock(), 0.0
        if late:
            reported = RankError("rank 1 has failed: what the user's code says")
            Timer(late, setattr, (failures, "error", lambda waited: reported)).start()


@pytest.mark.rest("takes tenths of a second")
def test_a_process_that_has_ended_is_noticed_although_its_worker_lives() -> None:
    """The workers of a DataLoader are forked, and keep the connections of a killed rank open."""
    ready, tells = os.pipe()
    other = os.fork()
    if not other:
        worker = os.fork()
        if worker:
            os.write(tells, worker.to_bytes(8, "little"))
        sleep(60)
        os._exit(0)
    worker = int.from_bytes(os.read(ready, 8), "little")
    two, late = Two(other), Two(other, late=0.3)
    assert two.error("a step") is None
    os.kill(other, signal.SIGKILL)
    sleep(0.2)
    assert "what the user's code says" in str(late.error("a step")), "it may have reported its error"
    assert "the process of rank 1 has ended while rank 0 waited for a step" in str(two.error("a step"))
    os.waitpid(other, 0)
    os.kill(worker, signal.SIGKILL)


@pytest.mark.rest("takes tenths of a second")
def test_a_collective_may_fail_before_the_error_is_read() -> None:
    assert "what the user's code says" in str(Two(late=0.3)._lost("a step", RuntimeError("closed")))
    assert (
        str(Two()._lost("a step", RuntimeError("closed")))
        == "rank 0 has lost other ranks while it waited for a step: closed"
    )


def test_sums_that_a_failed_rank_never_joins_are_aborted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for them in backward, then to drop the gradients in flight. NCCL would wait until its watchdog's abort."""
    two = Two()
    two.check(Wait.APPLY_AFTER_DRAIN)
    two._on_devices.abort.assert_not_called()
    monkeypatch.setattr(
        two, "_failures", SimpleNamespace(error=lambda waited: RankError(f"rank 1 has failed {waited}"))
    )
    with pytest.raises(RankError, match="has failed while rank 0 waited for this: "):
        two.check(Wait.APPLY_AFTER_DRAIN)
    two.check(Wait.DROP_AFTER_DRAIN)  # aborted sums end within a moment
    two._on_devices.abort.assert_called_once()
    monkeypatch.setattr(collectives, "_ABORTS", 0)
    with pytest.raises(RankError):
        two.check(Wait.DROP_AFTER_DRAIN)
