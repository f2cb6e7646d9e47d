"""Handlers of signals run between two batches. A second Ctrl-C, timers, and signals of other processes act at once."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sp_lightning.trainer.signals import DeferredSignals


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """SIGUSR1, SIGINT and SIGALRM have handlers, which note that they have run."""
    found: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGALRM)}
    for number in before:
        signal.signal(number, lambda number, frame: found.append(number))
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def deferring(handled: list[int]) -> Iterator[DeferredSignals]:
    made = DeferredSignals()
    made.install()
    yield made
    made.remove()


def test_a_handler_runs_between_two_batches_once(handled: list[int], deferring: DeferredSignals) -> None:
    for _ in range(2):
        signal.raise_signal(signal.SIGUSR1)
    assert handled == []
    deferring.run_deferred()
    assert handled == [signal.SIGUSR1]
    deferring.run_deferred()
    assert handled == [signal.SIGUSR1]


def test_a_timer_acts_at_once(handled: list[int], deferring: DeferredSignals) -> None:
    """It may be a watchdog's, which ends a batch that hangs."""
    signal.raise_signal(signal.SIGALRM)
    assert handled == [signal.SIGALRM]


def test_a_second_ctrl_c_acts_at_once(handled: list[int], deferring: DeferredSignals) -> None:
    """So that a step that hangs can be ended. Others arrive twice for other reasons."""
    for _ in range(2):
        signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGINT)
    assert handled == []
    signal.raise_signal(signal.SIGINT)
    assert handled == [signal.SIGINT]
    deferring.run_deferred()
    assert handled == [signal.SIGINT, signal.SIGUSR1]


def test_a_handler_whose_work_is_done_is_dropped(handled: list[int], deferring: DeferredSignals) -> None:
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.raise_signal(number)
    deferring.drop(signal.SIGINT)
    deferring.remove()
    assert handled == [signal.SIGUSR1]


def test_handlers_are_as_they_were_afterwards(handled: list[int]) -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    deferring = DeferredSignals()
    deferring.install()
    here = signal.getsignal(signal.SIGUSR1)
    assert here == before[signal.SIGUSR1]
    assert here.__name__ == "<lambda>"  # type: ignore[union-attr]
    assert {here: 1}[before[signal.SIGUSR1]] == 1
    signal.raise_signal(signal.SIGUSR1)
    deferring.remove()
    assert handled == [signal.SIGUSR1]
    after = {number: signal.getsignal(number) for number in signal.valid_signals()}
    assert all(after[number] is before[number] for number in before)


def test_a_handler_that_is_set_meanwhile_is_deferred_and_stays(handled: list[int], deferring: DeferredSignals) -> None:
    seen: list[str] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append("new"))
    deferring.install()
    signal.raise_signal(signal.SIGUSR1)
    assert seen == []
    deferring.remove()
    assert seen == ["new"]
    signal.raise_signal(signal.SIGUSR1)
    assert seen == ["new", "new"]
    signal.signal(signal.SIGUSR1, before)  # as code does that had one for a while
    signal.raise_signal(signal.SIGUSR1)
    assert handled == [signal.SIGUSR1]


def test_a_handler_that_was_replaced_twice_is_released(handled: list[int], deferring: DeferredSignals) -> None:
    original = signal.getsignal(signal.SIGUSR1).handler  # type: ignore[union-attr]
    first = signal.signal(signal.SIGUSR1, lambda *_: None)
    deferring.install()
    signal.signal(signal.SIGUSR1, first)
    deferring.remove()
    assert signal.getsignal(signal.SIGUSR1) is original
    signal.raise_signal(signal.SIGUSR1)
    assert handled == [signal.SIGUSR1]


def test_a_handler_calls_the_one_that_it_has_replaced(handled: list[int], deferring: DeferredSignals) -> None:
    found: list[str] = []
    before: Any = signal.getsignal(signal.SIGUSR1)

    def chained(number: int, frame: Any) -> None:
        found.append("begins")
        before(number, frame)
        found.append(f"ends after {handled}")

    signal.signal(signal.SIGUSR1, chained)
    deferring.install()
    signal.raise_signal(signal.SIGUSR1)
    deferring.run_deferred()
    assert found == ["begins", f"ends after {[int(signal.SIGUSR1)]}"]


def test_a_signal_that_arrives_while_a_handler_runs_is_deferred(handled: list[int], deferring: DeferredSignals) -> None:
    """A handler that saves runs the package's own code."""
    order: list[str] = []

    def saves(number: int, frame: Any) -> None:
        order.append("begins")
        signal.raise_signal(signal.SIGINT)
        order.append(f"ends after {handled}")

    signal.signal(signal.SIGUSR1, saves)
    deferring.install()
    signal.raise_signal(signal.SIGUSR1)
    deferring.run_deferred()
    assert order == ["begins", "ends after []"]
    assert handled == [signal.SIGINT]


def test_handlers_do_not_pile_up_over_runs(handled: list[int]) -> None:
    """Code that keeps what it found, and puts it back, may keep one of a run that is over."""
    original = signal.getsignal(signal.SIGUSR1)
    for _ in range(3):
        deferring = DeferredSignals()
        deferring.install()
        found = signal.getsignal(signal.SIGUSR1)
        deferring.remove()
        signal.signal(signal.SIGUSR1, found)
    assert found.handler is original  # type: ignore[union-attr]


def test_a_run_inside_a_run(handled: list[int], deferring: DeferredSignals) -> None:
    inner = DeferredSignals()
    inner.install()
    signal.raise_signal(signal.SIGUSR1)
    inner.run_deferred()
    assert handled == [], "the outer run's step is under way"
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)
    assert handled == [signal.SIGINT]
    inner.remove()
    deferring.run_deferred()
    assert handled == [signal.SIGINT, signal.SIGUSR1]


def test_a_handler_that_raises_keeps_no_other_from_running(handled: list[int], deferring: DeferredSignals) -> None:
    def fails(number: int, frame: Any) -> None:
        raise KeyError(number)

    signal.signal(signal.SIGINT, fails)
    deferring.install()
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyError):
        deferring.run_deferred()
    assert handled == [signal.SIGUSR1]


def test_other_threads_change_no_handlers(handled: list[int]) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    thread = threading.Thread(target=DeferredSignals().install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_forked_process_defers_nothing(handled: list[int], deferring: DeferredSignals, monkeypatch: Any) -> None:
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        signal.raise_signal(signal.SIGUSR1)
    assert handled == [signal.SIGUSR1]


def test_copies_defer_nothing(handled: list[int], deferring: DeferredSignals) -> None:
    for copied in (copy.deepcopy(deferring), pickle.loads(pickle.dumps(deferring))):
        copied.run_deferred()
        copied.remove()
    assert copy.deepcopy(signal.getsignal(signal.SIGUSR1)) is signal.getsignal(signal.SIGUSR1).handler  # type: ignore[union-attr]
    signal.raise_signal(signal.SIGUSR1)
    assert handled == []
