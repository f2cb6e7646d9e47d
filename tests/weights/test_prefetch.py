"""The trace drives prefetch; a wrong one costs a fetch, never a result."""

from __future__ import annotations

import math

from tests.support.engine import Trace


def upcoming(trace: Trace) -> list[int]:
    """The layers that come, nearest first; their distances are those that ``next_use`` tells."""
    coming = trace.coming(lambda layer: False, lambda layer: True, 99)
    assert all(trace.next_use(layer) == distance for layer, distance in coming)
    return [layer for layer, _ in coming]


def test_follows_what_was_recorded() -> None:
    trace = Trace([0, 1, 2, 2, 1, 0])
    assert upcoming(trace) == [0, 1, 2]
    assert trace.next_uses(0) == (0, 5)
    for layer in (0, 2, 2, 0):
        trace.visit(layer)
    trace.start()
    assert upcoming(trace) == [0, 2]
    assert trace.next_use(1) == math.inf


def test_a_layer_that_was_skipped_is_jumped_over() -> None:
    trace = Trace([0, 1, 2, 3])
    trace.visit(0)
    trace.visit(2)
    assert upcoming(trace) == [3]


def test_a_layer_that_was_not_expected_changes_nothing() -> None:
    trace = Trace([0, 1, 2])
    trace.visit(0)
    trace.visit(7)
    assert upcoming(trace) == [1, 2]


def test_round_and_round_where_copies_stay_valid() -> None:
    trace = Trace([0, 1, 2])
    trace.visit(0)
    assert trace.next_use(0) == math.inf
    trace.cyclic = True
    assert trace.next_uses(0)[0] == 2
    assert upcoming(trace) == [1, 2, 0]


def test_uses_are_counted_by_ring_from_the_first_batch() -> None:
    """A round uses layer 1 twice. Both uses have one number."""
    trace = Trace([0, 1, 2, 10, 1, 11], lambda layer: layer // 10)
    trace.visit(0)
    trace.cyclic = True
    coming = trace.coming(lambda layer: False, lambda layer: True, 99)
    assert {layer: trace.ordinal(layer, uses) for layer, uses in coming} == {1: 1, 2: 2, 10: 0, 11: 1, 0: 3}
    for layer in (1, 2, 10, 1, 11):
        trace.visit(layer)
    trace.start()
    assert (trace.ordinal(2, 2), trace.ordinal(11, 5)) == (5, 3)


def test_an_empty_batch_keeps_the_order() -> None:
    trace = Trace([0, 1])
    trace.start()
    assert upcoming(trace) == [0, 1]


def test_a_batch_that_goes_on_begins_the_order_anew() -> None:
    """Generation, token after token: the end of the order is followed by its beginning."""
    trace = Trace([0, 1, 2])
    trace.may_go_on = True
    for layer in (0, 1, 2, 0):
        trace.visit(layer)
    assert upcoming(trace) == [1, 2, 0]
    trace = Trace([0, 1, 2])
    trace.may_go_on = True
    for layer in (0, 1, 0):  # not at the end: a layer that is used again
        trace.visit(layer)
    assert upcoming(trace) == [2]


def test_what_is_there_is_passed_over() -> None:
    trace = Trace([0, 1, 2, 3, 2, 4])
    trace.visit(0)
    assert trace.coming({1: True}.get, lambda layer: layer != 3, 2) == [(2, 1), (4, 4)]
    assert trace.coming(lambda layer: layer < 5, lambda layer: True, 1) == []
