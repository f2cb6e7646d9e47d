"""Handlers of signals run at once, or a moment later: after the package's own code, and after a step that is under way."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sp_lightning.trainer import signals
from sp_lightning.trainer.signals import DeferredSignals

OURS = Path(signals.__file__).with_name("made_by_a_test.py")


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """SIGUSR1 and SIGINT have handlers, which note that they have run."""
    found: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGINT)}
    for number in before:
        signal.signal(number, lambda number, frame: found.append(number))
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def deferring() -> Iterator[DeferredSignals]:
    made = DeferredSignals()
    yield made
    made.remove()


def in_our_code(act: Callable[[], Any]) -> Any:
    """Calls a builtin from a file of the package: code of a test would be no code of the package."""
    scope: dict[str, Any] = {"act": act}
    exec(compile("def run(): return act()", str(OURS), "exec"), scope)
    return scope["run"]()


def soon(is_true: Callable[[], Any]) -> bool:
    """Returns when the condition holds. If it never does, the time limit of all tests ends this one."""
    while not is_true():
        time.sleep(0.001)
    return True


def raises(number: int) -> Callable[[], None]:
    """A builtin, which has no frame."""
    return partial(signal.raise_signal, number)


def test_a_handler_runs_at_once_where_nothing_is_half_done(handled: list[int], deferring: DeferredSignals) -> None:
    deferring.install(lambda: False)
    signal.raise_signal(signal.SIGUSR1)
    assert handled == [signal.SIGUSR1]


def test_a_handler_waits_for_the_end_of_our_own_code(handled: list[int], deferring: DeferredSignals) -> None:
    deferring.install(lambda: False)
    in_our_code(raises(signal.SIGUSR1))
    assert soon(lambda: handled == [signal.SIGUSR1])
    time.sleep(0.01)
    assert handled == [signal.SIGUSR1], "once"


def test_what_our_code_calls_of_torch_and_python_is_our_code(handled: list[int], deferring: DeferredSignals) -> None:
    deferring.install(lambda: False)
    source = "def run():\n    copy.copy(Strikes())\n    return list(handled)"
    strikes = type("Strikes", (), {"__copy__": lambda self: signal.raise_signal(signal.SIGUSR1)})
    vars(strikes)["__copy__"].__code__ = vars(strikes)["__copy__"].__code__.replace(co_filename=copy.__file__)
    scope: dict[str, Any] = {"copy": copy, "handled": handled, "Strikes": strikes}
    exec(compile(source, str(OURS), "exec"), scope)
    assert scope["run"]() == []
    assert soon(lambda: handled)


def test_a_handler_waits_for_a_whole_step(handled: list[int], deferring: DeferredSignals) -> None:
    torn = [True]
    deferring.install(lambda: torn[0])
    signal.raise_signal(signal.SIGUSR1)
    time.sleep(0.02)
    assert handled == []
    torn[0] = False
    assert soon(lambda: handled == [signal.SIGUSR1])


def test_the_end_of_a_step_need_not_be_found(handled: list[int], deferring: DeferredSignals) -> None:
    deferring.install(lambda: True)
    signal.raise_signal(signal.SIGUSR1)
    deferring.run_deferred()
    assert handled == [signal.SIGUSR1]
    deferring.run_deferred()
    assert handled == [signal.SIGUSR1]


def test_a_second_ctrl_c_acts_at_once(handled: list[int], deferring: DeferredSignals) -> None:
    """So that a step that hangs can be ended. Others come twice for other reasons."""
    deferring.install(lambda: True)
    for _ in range(2):
        signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGINT)
    assert handled == []
    signal.raise_signal(signal.SIGINT)
    assert handled == [signal.SIGINT]
    deferring.run_deferred()
    assert handled == [signal.SIGINT, signal.SIGUSR1]


def test_a_handler_whose_work_is_done_is_dropped(handled: list[int], deferring: DeferredSignals) -> None:
    deferring.install(lambda: True)
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.raise_signal(number)
    deferring.drop(signal.SIGINT)
    deferring.remove()
    assert handled == [signal.SIGUSR1]


def test_our_code_may_wait_for_something(
    handled: list[int], deferring: DeferredSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For another process, or a disk. A handler, of a watchdog for example, waits for a while then."""
    monkeypatch.setattr(signals, "PATIENCE", 0.02)
    deferring.install(lambda: False)
    source = "def run():\n    strike()\n    while not handled: time.sleep(0.001)"
    scope: dict[str, Any] = {"time": time, "handled": handled, "strike": raises(signal.SIGUSR1)}
    exec(compile(source, str(OURS), "exec"), scope)
    scope["run"]()
    assert handled == [signal.SIGUSR1]


def test_handlers_are_as_they_were_afterwards(handled: list[int], deferring: DeferredSignals) -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    deferring.install(lambda: True)
    here = signal.getsignal(signal.SIGUSR1)
    assert here == before[signal.SIGUSR1]
    assert here.__name__ == "<lambda>"  # type: ignore[union-attr]
    assert {here: 1}[before[signal.SIGUSR1]] == 1
    signal.raise_signal(signal.SIGUSR1)
    assert handled == []
    deferring.remove()
    assert handled == [signal.SIGUSR1]
    after = {number: signal.getsignal(number) for number in signal.valid_signals()}
    assert all(after[number] is before[number] for number in before)
    assert not [each for each in threading.enumerate() if each.name == "superpipeline-signals" and not soon_over(each)]


def soon_over(thread: threading.Thread) -> bool:
    thread.join(5)
    return not thread.is_alive()


def test_a_handler_that_is_set_meanwhile_is_found_and_stays(handled: list[int], deferring: DeferredSignals) -> None:
    deferring.install(lambda: True)
    seen: list[str] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append("new"))
    deferring.install(lambda: True)
    signal.raise_signal(signal.SIGUSR1)
    assert seen == []
    deferring.remove()
    assert seen == ["new"]
    signal.raise_signal(signal.SIGUSR1)
    assert seen == ["new", "new"]
    signal.signal(signal.SIGUSR1, before)  # as code does that had one for a while
    signal.raise_signal(signal.SIGUSR1)
    assert handled == [signal.SIGUSR1]


def test_handlers_do_not_pile_up_over_runs(handled: list[int]) -> None:
    """Code that keeps what it found, and puts it back, may keep one of a run that is over."""
    original = signal.getsignal(signal.SIGUSR1)
    for _ in range(3):
        deferring = DeferredSignals()
        deferring.install(lambda: False)
        found = signal.getsignal(signal.SIGUSR1)
        deferring.remove()
        signal.signal(signal.SIGUSR1, found)
    assert found.handler is original  # type: ignore[union-attr]


def test_a_run_inside_a_run(handled: list[int], deferring: DeferredSignals) -> None:
    torn = [True]
    deferring.install(lambda: torn[0])
    inner = DeferredSignals()
    inner.install(lambda: False)
    signal.raise_signal(signal.SIGINT)
    time.sleep(0.01)
    assert handled == [], "the outer one's step is under way"
    torn[0] = False
    assert soon(lambda: handled)
    inner.remove()
    signal.raise_signal(signal.SIGUSR1)
    assert handled == [signal.SIGINT, signal.SIGUSR1]


def test_a_handler_that_raises_keeps_no_other_from_running(handled: list[int], deferring: DeferredSignals) -> None:
    def fails(number: int, frame: Any) -> None:
        raise KeyError(number)

    signal.signal(signal.SIGINT, fails)
    deferring.install(lambda: True)
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyError):
        deferring.run_deferred()
    assert handled == [signal.SIGUSR1]


def test_other_threads_change_no_handlers(handled: list[int], deferring: DeferredSignals) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    thread = threading.Thread(target=deferring.install, args=[lambda: True])
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_forked_process_is_no_run(handled: list[int], deferring: DeferredSignals, monkeypatch: Any) -> None:
    deferring.install(lambda: True)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    signal.raise_signal(signal.SIGUSR1)
    assert handled == [signal.SIGUSR1]


def test_copies_are_of_no_run(handled: list[int], deferring: DeferredSignals) -> None:
    deferring.install(lambda: True)
    for copied in (copy.deepcopy(deferring), pickle.loads(pickle.dumps(deferring))):
        copied.run_deferred()
        copied.remove()
    assert copy.deepcopy(signal.getsignal(signal.SIGUSR1)) is signal.getsignal(signal.SIGUSR1).handler  # type: ignore[union-attr]
    signal.raise_signal(signal.SIGUSR1)
    assert handled == []


class Finalized:
    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __del__(self) -> None:
        self.act()


@pytest.mark.parametrize("where", ["finalizer", "weakref.py", "_weakrefset.py"])
def test_a_handler_waits_where_python_would_ignore_what_it_raises(
    where: str, handled: list[int], deferring: DeferredSignals
) -> None:
    deferring.install(lambda: False)
    found: list[list[int]] = []

    def act() -> None:
        signal.raise_signal(signal.SIGUSR1)
        found.append(list(handled))

    if where == "finalizer":
        Finalized(act)
    else:  # a callback, which calls a builtin
        scope: dict[str, Any] = {"act": raises(signal.SIGUSR1)}
        exec(compile("def run(): act()", f"/lib/{where}", "exec"), scope)
        scope["run"]()
        found.append(list(handled))
    assert found == [[]]
    assert soon(lambda: handled)
