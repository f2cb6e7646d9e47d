"""The parts into which the gate divides the tests of the third tier."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest import mock

from tests.support.tiers import PARTS, keep_one_part, part_of

ROOT = Path(__file__).parents[2]


def test_each_test_is_in_one_part_and_parts_are_of_one_size() -> None:
    names = [f"tests/test_a.py::test_b[{number}]" for number in range(4000)]
    sizes = Counter(part_of(name) for name in names)
    assert sorted(sizes) == list(range(PARTS))
    assert max(sizes.values()) < 2 * min(sizes.values())


def test_a_part_has_its_tests_of_the_third_tier_and_all_others() -> None:
    items = [mock.Mock(nodeid=f"test_a.py::test_b[{number}]") for number in range(80)]
    for number, item in enumerate(items):
        item.get_closest_marker = {"long": number % 2}.get
    kept, config = list(items), mock.Mock()
    keep_one_part(config, kept, 7)
    assert kept == [item for number, item in enumerate(items) if number % 2 == 0 or part_of(item.nodeid) == 7]
    assert 40 < len(kept) < 80
    (left_out,) = config.hook.pytest_deselected.call_args.kwargs.values()
    assert len(left_out) == 80 - len(kept)
