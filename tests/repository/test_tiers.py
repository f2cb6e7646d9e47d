"""Three tiers of tests, and what is refused where one leaves the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.conftest import refuse_without_reason
from tests.support import seconds
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


class Item:
    """A test with marks, which may get more."""

    def __init__(self, name: str, *marks: str) -> None:
        self.nodeid, self.marks = name, list(marks)

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark.name)


def test_tests_that_take_long_run_a_tier_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = (
        "0.70s call     t/a.py::x[1, 2]\n0.30s setup    t/a.py::y\n0.30s call     t/a.py::y\n0.05s call     t/a.py::z\n"
    )
    log += "0.40s call     t/b.py::x\n2.00s call     t/b.py::y\n9.00s call     t/c.py::x\n"
    tiers = {
        "t/a.py::x[1, 2]": "",
        "t/a.py::y": "",
        "t/a.py::z": "",
        "t/b.py::x": "rest",
        "t/b.py::y": "rest",
        "t/c.py::x": "long",
    }
    found = seconds.read([log], tiers, {})
    assert found == {"t/a.py::x[1, 2]": 0.7, "t/a.py::y": pytest.approx(0.6), "t/b.py::y": 2.0}
    before = {"t/a.py::y": 5.0, "t/d.py::x": 3.0, "t/d.py::gone": 3.0}  # of which the log has the first one
    assert seconds.read([log], {**tiers, "t/d.py::x": "rest"}, before) == {**found, "t/d.py::x": 3.0}
    monkeypatch.setattr(seconds, "ROOT", tmp_path)
    monkeypatch.setattr(seconds, "FILE", tmp_path / "seconds.txt")
    (tmp_path / "t").mkdir()
    for name in ("a", "b"):
        (tmp_path / "t" / f"{name}.py").touch()
    seconds.FILE.write_text("# Seconds\n4.00 t/a.py::w\n0.70 t/a.py::x[1, 2]\n2.00 t/b.py::y\n")
    quick, slow, slowest = Item("t/a.py::z"), Item("t/a.py::x[1, 2]"), Item("t/a.py::w")
    other = Item("t/b.py::y", "rest")
    seconds.move_down([quick, slow, slowest, other], whole=True)  # type: ignore[list-item]
    assert [quick.marks, slow.marks, slowest.marks, other.marks] == [[], ["rest"], ["long"], ["rest", "long"]]
    monkeypatch.setattr(seconds, "gone", [])
    seconds.move_down([quick], whole=False)  # type: ignore[list-item]
    assert not seconds.gone
    seconds.move_down([quick], whole=True)  # type: ignore[list-item]
    assert seconds.gone == ["t/a.py::w", "t/a.py::x[1, 2]"]
    (tmp_path / "t" / "b.py").unlink()  # no test of a removed file is collected
    seconds.move_down([quick], whole=False)  # type: ignore[list-item]
    assert seconds.gone == ["t/b.py::y"]


def test_the_file_of_slow_tests_names_existing_tests() -> None:
    assert not seconds.gone, "make tests/seconds.txt anew, or take these out of it"


def test_the_gate_begins_with_the_command_of_the_readme_and_goes_on_with_the_rest() -> None:
    gate = (ROOT / ".ci/run").read_text()
    assert gate.index('bash -euo pipefail -c "$tests"') < gate.index('-m "rest and not long"') < gate.index("mypy")
