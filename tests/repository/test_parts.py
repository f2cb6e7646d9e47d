"""The parts into which the gate divides the tests of the third tier."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support import simulated_gpu
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


def of(name: str, *marks: pytest.Mark) -> Any:
    """A test with these marks, the nearest one first."""

    def those(wanted: str) -> list[pytest.Mark]:
        return [mark for mark in marks if mark.name == wanted]

    item = mock.Mock(nodeid=name, iter_markers=those)
    item.get_closest_marker = lambda wanted: next(iter(those(wanted)), None)
    return item


GPU, REAL = pytest.mark.gpu.mark, pytest.mark.gpu("streams of CUDA").mark


def test_the_parts_of_a_simulated_gpu_have_each_of_its_tests_once() -> None:
    tests = [of(f"tests/gpu/test_a.py::test_b[{number}]", GPU) for number in range(200)]
    others = [of("tests/gpu/test_a.py::test_c[cpu]"), of("tests/gpu/test_a.py::test_d", REAL, GPU)]
    found = Counter[str]()
    for part in range(PARTS):
        kept, config = [*tests, *others], mock.Mock()
        config.getoption.return_value = str(part)
        simulated_gpu.pytest_collection_modifyitems(config, kept)
        found.update(item.nodeid for item in kept)
    assert found == Counter(item.nodeid for item in (*tests, others[1]))
    (skipped,) = others[1].add_marker.call_args.args
    assert skipped.kwargs == {"reason": "streams of CUDA"}
    assert not tests[0].add_marker.called


@pytest.mark.parametrize(("marks", "outcome"), [((REAL, GPU), "skipped"), ((GPU,), "failed")])
def test_a_test_of_a_gpu_that_is_skipped_without_a_reason_fails(marks: Any, outcome: str) -> None:
    report = mock.Mock(outcome="skipped", skipped=True, longrepr="a package is missing")
    hook = simulated_gpu.pytest_runtest_makereport(of("tests/gpu/test_a.py::test_b", *marks))
    next(hook)
    with pytest.raises(StopIteration) as ended:
        hook.send(report)
    assert ended.value.value.outcome == outcome


def test_all_tests_of_a_gpu_have_its_mark() -> None:
    """One that looks for CUDA itself would be skipped on a simulated GPU, too."""
    files = {path.name: path.read_text() for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert not [name for name, text in files.items() if "is_available" in text]
    assert all("pytest.mark.gpu" in text for text in files.values())
