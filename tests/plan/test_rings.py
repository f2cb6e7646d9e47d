"""Slots of layers of several sizes, and of layers that come on demand beside those of a window."""

from __future__ import annotations

from itertools import combinations
from random import Random

from sp_lightning.core.plan.rings import LEAST_SHARE, Ring, choose_rings, choose_rings_apart

SIZES = [10, 1000] * 4  # blocks, and their experts
EXPERTS = [1, 3, 5, 7]


def test_layers_on_demand_have_two_slots_whatever_the_window() -> None:
    for window in (3, 4, 8):
        rings, ring_of = choose_rings_apart(SIZES, window, (), EXPERTS)
        assert rings == (Ring(min(window, 4), 10), Ring(2, 1000))
        assert ring_of == [0, 1] * 4


def test_the_smallest_window_shares_slots_where_that_takes_less() -> None:
    assert choose_rings_apart(SIZES, 2, (), EXPERTS) == choose_rings(SIZES, 2)
    assert choose_rings_apart([500, 1000, 1000, 500], 2, (), [1, 2])[0] == (Ring(2, 1000),)
    assert choose_rings_apart([50, 1000, 1000, 50], 2, (), [1, 2])[0] == (Ring(2, 50), Ring(2, 1000))


def test_a_window_of_all_layers_has_a_slot_for_each() -> None:
    rings, _ = choose_rings_apart(SIZES, 9, (), EXPERTS)
    assert rings == choose_rings(SIZES, 9)[0] == (Ring(4, 10), Ring(4, 1000))


def test_what_one_module_uses_at_once_fits() -> None:
    """Its own blocks, and the experts of two others."""
    rings, ring_of = choose_rings_apart(SIZES, 3, [(0, 2, 4, 6), (1, 3, 5)], EXPERTS)
    assert rings == (Ring(4, 10), Ring(3, 1000))
    assert ring_of == [0, 1] * 4


def test_a_larger_window_takes_at_least_its_share() -> None:
    """The search for the largest window that fits ends there. It may take less than a smaller one, as the first sizes show."""
    chance = Random(5)
    some = [[chance.choice((13, 19, 28, 35)) for _ in range(chance.randint(5, 9))] for _ in range(60)]
    less = 0
    for sizes in ([13, 28, 28, 19, 19, 19, 28, 13, 28], *some):
        for by_rows in ((), (1, 3)):
            nbytes = [
                sum(ring.slots * ring.nbytes for ring in choose_rings_apart(sizes, window, (), by_rows)[0])
                for window in range(2, len(sizes) + 2)
            ]
            assert all(larger >= LEAST_SHARE * smaller for smaller, larger in combinations(nbytes, 2)), sizes
            less += nbytes != sorted(nbytes)
    assert less
