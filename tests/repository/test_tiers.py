"""Three tiers of tests, and what is refused where one leaves the first."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import yaml

from tests.conftest import refuse_without_reason
from tests.support import parts
from tests.support.parts import PARTS, keep_one_part, part_of
from tests.support.tiers import first, some

ROOT = Path(__file__).parents[2]


def marked(*marks: pytest.MarkDecorator) -> pytest.Item:
    """A test with marks, as pytest has collected it."""

    def named(name: str) -> list[pytest.Mark]:
        return [each.mark for each in marks if each.name == name]

    item: pytest.Item = mock.Mock(spec=pytest.Item, nodeid="test_x", iter_markers=named)
    return item


@pytest.mark.parametrize(
    "mark", [pytest.mark.rest, pytest.mark.long(""), pytest.mark.rest("slow"), pytest.mark.long(3), pytest.mark.hours]
)
def test_a_test_that_leaves_the_first_tier_says_why(mark: pytest.MarkDecorator) -> None:
    with pytest.raises(pytest.UsageError, match="test_x: say why"):
        refuse_without_reason([marked(mark)])


def test_a_reason_is_enough() -> None:
    refuse_without_reason([marked(), marked(pytest.mark.rest("a larger model")), marked(pytest.mark.skip)])


def test_all_but_a_few_parameters_are_in_the_second_tier() -> None:
    one, two = first([1, 2], 1, why="a larger number")
    assert one == 1
    assert [(mark.name, mark.args) for mark in two.marks] == [("rest", ("a larger number",))]
    assert first([("a", 1), ("b", 2)], if_=lambda each: each[1] == 2, why="the other one")[0].values == ("a", 1)
    with pytest.raises(AssertionError, match="are not all of"):
        first([1, 2], 1, 3, why="a larger number")


def test_most_parameters_may_be_in_the_third_tier() -> None:
    _, two, three = first([1, 2, 3], 1, second=[2], why="larger numbers")
    assert [mark.name for each in (two, three) for mark in each.marks] == ["rest", "long"]
    one, other = some([1, 2], 1, why="a larger number")
    assert one == 1
    assert [(mark.name, mark.args) for mark in other.marks] == [("long", ("a larger number",))]
    for wrong in (lambda: first([1, 2], 1, second=[3], why=""), lambda: some([1, 2], 3, why="")):
        with pytest.raises(AssertionError, match="are not all of"):
            wrong()


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


@pytest.mark.parametrize("text", ["40", "-1", "first", ""])
def test_a_part_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"got '{text}'. Expected a number from 0 to 39"):
        parts.number(text)


def test_the_gate_begins_with_the_command_of_the_readme_and_goes_on_with_the_rest() -> None:
    gate = (ROOT / ".ci/run").read_text()
    order = ['bash -euo pipefail -c "$tests"', '-m "rest and not long"', ".ci/part", "mypy"]
    assert sorted(order, key=gate.index) == order


def test_the_workflow_runs_the_gate_on_the_oldest_and_the_newest_python_with_the_history() -> None:
    (job,) = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"].values()
    checkout, _, gate = job["steps"]
    assert checkout["with"] == {"fetch-depth": 0}
    assert gate == {"run": ".ci/run"}
    promised = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert job["strategy"]["matrix"]["python"] == [promised[0], promised[-1]]
