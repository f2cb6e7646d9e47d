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

USER, INT, TIMER = map(int, (signal.SIGUSR1, signal.SIGINT, signal.SIGALRM))
Handled = list[Any]


@pytest.fixture
def handled() -> Iterator[Handled]:
    """SIGUSR1, SIGINT and SIGALRM have handlers, which note that they have run."""
    found: Handled = []
    before = {number: signal.getsignal(number) for number in (USER, INT, TIMER)}
    for number in before:
        signal.signal(number, lambda number, frame: found.append(number))
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def deferring(handled: Handled) -> Iterator[DeferredSignals]:
    made = DeferredSignals()
    made.install()
    yield made
    made.remove()


def strike(*numbers: int) -> None:
    for number in numbers:
        signal.raise_signal(number)


@pytest.mark.parametrize(
    ("numbers", "at_once", "between"),
    [
        ([USER, USER], [], [USER]),
        ([TIMER], [TIMER], [TIMER]),  # it may be a watchdog's, which ends a batch that hangs
        ([USER, USER, INT, INT], [INT], [INT, USER]),  # a second Ctrl-C ends a step that hangs
    ],
)
def test_a_handler_runs_between_two_batches_once(
    numbers: list[int], at_once: list[int], between: list[int], handled: Handled, deferring: DeferredSignals
) -> None:
    strike(*numbers)
    assert handled == at_once
    for _ in range(2):
        deferring.run_deferred()
        assert handled == between


def test_a_handler_whose_work_is_done_is_dropped(handled: Handled, deferring: DeferredSignals) -> None:
    strike(INT, USER)
    deferring.drop(signal.SIGINT)
    deferring.remove()
    assert handled == [USER]


def test_handlers_are_as_they_were_afterwards(handled: Handled) -> None:
    """They do not pile up over runs: code that keeps what it found, and puts it back, may keep one of a run that is over."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    for _ in range(2):
        deferring = DeferredSignals()
        deferring.install()
        here: Any = signal.getsignal(USER)
        assert here == before[USER]
        assert here.__name__ == "<lambda>"
        assert {here: 1}[before[USER]] == 1
        strike(USER)
        deferring.remove()
        after = {number: signal.getsignal(number) for number in signal.valid_signals()}
        assert all(after[number] is before[number] for number in before)
        signal.signal(USER, here)
    assert handled == [USER, USER]
    assert here.handler is before[USER]


def test_a_handler_that_is_set_meanwhile_is_deferred_and_stays(handled: Handled, deferring: DeferredSignals) -> None:
    seen: list[str] = []
    original = signal.getsignal(USER).handler  # type: ignore[union-attr]
    before = signal.signal(USER, lambda *_: seen.append("new"))
    deferring.install()
    strike(USER)
    assert seen == []
    deferring.remove()
    strike(USER)
    assert seen == ["new", "new"]
    deferring.install()
    signal.signal(USER, before)  # as code does that had one for a while
    deferring.remove()
    assert signal.getsignal(USER) is original
    strike(USER)
    assert handled == [USER]


@pytest.mark.parametrize("chained", [True, False])
def test_a_handler_calls_the_one_that_it_has_replaced(
    chained: bool, handled: Handled, deferring: DeferredSignals
) -> None:
    """Another signal that arrives meanwhile is deferred: a handler that saves runs the package's own code."""
    before: Any = signal.getsignal(USER)

    def handler(number: int, frame: Any) -> None:
        handled.append("begins")
        before(number, frame) if chained else strike(INT)
        handled.append("ends")

    signal.signal(USER, handler)
    deferring.install()
    strike(USER)
    deferring.run_deferred()
    assert handled == (["begins", USER, "ends"] if chained else ["begins", "ends", INT])


def test_a_run_inside_a_run(handled: Handled, deferring: DeferredSignals) -> None:
    inner = DeferredSignals()
    inner.install()
    strike(USER)
    inner.run_deferred()
    assert handled == [], "the outer run's step is under way"
    strike(INT, INT)
    assert handled == [INT]
    inner.remove()
    deferring.run_deferred()
    assert handled == [INT, USER]


def test_a_handler_that_raises_keeps_no_other_from_running(handled: Handled, deferring: DeferredSignals) -> None:
    def fails(number: int, frame: Any) -> None:
        raise KeyError(number)

    signal.signal(INT, fails)
    deferring.install()
    strike(USER, INT)
    with pytest.raises(KeyError):
        deferring.run_deferred()
    assert handled == [USER]


def test_other_threads_change_no_handlers(handled: Handled) -> None:
    before = signal.getsignal(USER)
    thread = threading.Thread(target=DeferredSignals().install)
    thread.start()
    thread.join()
    assert signal.getsignal(USER) is before


def test_a_forked_process_defers_nothing(handled: Handled, deferring: DeferredSignals, monkeypatch: Any) -> None:
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        strike(USER)
    assert handled == [USER]


def test_copies_defer_nothing(handled: Handled, deferring: DeferredSignals) -> None:
    for copied in (copy.deepcopy(deferring), pickle.loads(pickle.dumps(deferring))):
        copied.run_deferred()
        copied.remove()
    assert copy.deepcopy(signal.getsignal(USER)) is signal.getsignal(USER).handler  # type: ignore[union-attr]
    strike(USER)
    assert handled == []
