"""A call of autograd's engine that fails is told to those who watch, before its caller goes on."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_lightning.core.torch_compat.patched import WatchesEngine, unwatch, watch
from sp_lightning.core.torch_compat.private import ENGINE_CALL, current_graph_task


class Watches(WatchesEngine):
    def __init__(self, tasks: list[int]) -> None:
        self.tasks: list[int] = tasks
        self.told: list[list[int]] = []
        self.nested: list[int] = []

    def nests(self) -> None:
        self.nested.append(current_graph_task())

    def failed(self, before: Sequence[int]) -> None:
        self.told.append(list(before))


def fail(gradient: Tensor) -> None:
    raise KeyError("in backward")


def backward(*, fails: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    if fails:
        y.register_hook(fail)
        with pytest.raises(KeyError, match="in backward"):
            y.sum().backward()
    else:
        y.sum().backward()


def test_two_watch_and_end_in_any_order() -> None:
    theirs: Any = getattr(*ENGINE_CALL)
    first, second = Watches([]), Watches([7])
    watch(first)
    watch(second)
    backward(fails=False)
    assert not first.told
    backward(fails=True)
    unwatch(first)
    assert getattr(*ENGINE_CALL) is not theirs
    backward(fails=True)
    unwatch(second)
    unwatch(second)
    assert getattr(*ENGINE_CALL) is theirs
    backward(fails=True)
    assert (first.told, second.told) == ([[]], [[7], [7]])


def test_a_nested_call_is_told_before_it_begins() -> None:
    """With the graph task that it is nested in."""
    watcher, x = Watches([]), torch.ones(2, requires_grad=True)
    tasks: list[int] = []

    def nest(gradient: Tensor) -> None:
        tasks.append(current_graph_task())
        with torch.enable_grad():
            backward(fails=False)

    y = x * 2
    y.register_hook(nest)
    watch(watcher)
    try:
        y.sum().backward()
    finally:
        unwatch(watcher)
    assert watcher.nested == tasks != []


@pytest.mark.rest("takes tenths of a second")
def test_nobody_is_kept_alive_by_watching() -> None:
    watches = Watches([])
    watch(watches)
    del watches
    gc.collect()
    watch(other := Watches([]))
    backward(fails=True)
    unwatch(other)
    assert other.told == [[]]


def test_another_wrapper_that_stays_is_no_loop() -> None:
    """Other code wrapped the engine's call during a run, and left its wrapper there: the next run, and any backward, recursed."""
    theirs: Any = getattr(*ENGINE_CALL)
    calls: list[int] = []
    try:
        for turn in range(3):
            watch(watches := Watches([]))
            ours = getattr(*ENGINE_CALL)

            def wrapper(*args: Any, turn: int = turn, ours: Any = ours, **options: Any) -> Any:
                calls.append(turn)
                return ours(*args, **options)

            setattr(*ENGINE_CALL, wrapper)
            backward(fails=True)
            assert watches.told == [[]]
            unwatch(watches)
            backward(fails=True)
            assert watches.told == [[]]
        assert calls == [0, 0, 1, 0, 1, 0, 2, 1, 0, 2, 1, 0]
    finally:
        setattr(*ENGINE_CALL, theirs)


def test_a_wrapper_is_put_back_where_other_code_has_put_the_function_of_before_back() -> None:
    theirs: Any = getattr(*ENGINE_CALL)
    watch(first := Watches([]))
    setattr(*ENGINE_CALL, theirs)
    watch(second := Watches([]))
    backward(fails=True)
    assert (first.told, second.told) == ([[]], [[]])
    unwatch(first)
    unwatch(second)
    assert getattr(*ENGINE_CALL) is theirs


def test_a_call_that_fails_elsewhere_is_not_that_of_a_thread_in_a_call_of_its_own() -> None:
    """Two runs in two threads: what has begun in the one's backward while the other's ran was taken for the other's."""
    watch(watches := Watches([]))

    def elsewhere(gradient: Tensor) -> None:
        watches.tasks = [7]  # a graph task of this thread's
        thread = threading.Thread(target=backward, kwargs={"fails": True})
        thread.start()
        thread.join()

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(elsewhere)
    y.sum().backward()
    assert not watches.told
    thread = threading.Thread(target=backward, kwargs={"fails": True})  # a thread of the user's that helps
    thread.start()
    thread.join()
    assert watches.told == [[7]]
    unwatch(watches)
