"""Three tiers of tests, and what is refused where one leaves the first."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.support.tiers import first, some

ROOT = Path(__file__).parents[2]


def marked(*marks: pytest.MarkDecorator) -> pytest.Item:
    """A test with marks, as pytest has collected it."""

    def named(name: str) -> list[pytest.Mark]:
        return [each.mark for each in marks if each.name == name]

    item: pytest.Item = mock.Mock(spec=pytest.Item, nodeid="test_x", iter_markers=named)
    return item


@pytest.mark.parametrize(
    "mark", [pytest.mark.rest, pytest.mark.long(""), pytest.mark.rest("slow"), pytest.mark.long(3)]
)
def test_a_test_that_leaves_the_first_tier_says_why(mark: pytest.MarkDecorator) -> None:
    with pytest.raises(pytest.UsageError, match="test_x: say why"):
        pytest_collection_modifyitems([marked(mark)])


def test_a_reason_is_enough() -> None:
    pytest_collection_modifyitems([marked(), marked(pytest.mark.rest("a larger model")), marked(pytest.mark.skip)])


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


def test_the_gate_begins_with_the_command_of_the_readme_and_goes_on_with_the_rest() -> None:
    gate = (ROOT / ".ci/run").read_text()
    assert gate.index('bash -euo pipefail -c "$tests"') < gate.index('-m "rest and not long"') < gate.index("mypy")
