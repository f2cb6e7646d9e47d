"""The script that counts calls counts those of a training, and no files of the package import each other in a circle."""

from __future__ import annotations

import pytest

from tests.repository import shape, walks


@pytest.mark.long("a training")
def test_walks_of_a_training_count_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "BLOCKS", 3)
    found = walks.trace("off", batches=2)
    fit, forward, batch = found[walks.FIT], found[walks.FORWARD], found[walks.BATCH]
    assert (len(fit), len(forward), len(found[walks.BACKWARD_OF_LAYER]), len(found[walks.BACKWARD])) == (1, 2, 2, 2)
    assert all(calls.total() >= len(calls) >= len(calls.files) > 0 for times in found.values() for calls in times)
    parts = [found[part][1].total() for part in (walks.ENTER, walks.COMPUTE, walks.LEAVE)]
    assert 0 < sum(parts) == forward[1].total() < batch[0].total()
    assert found[walks.BACKWARD_OF_LAYER][1].total() < found[walks.BACKWARD][1].total()


CIRCLE = {
    "sp_lightning.a.__init__": "",
    "sp_lightning.a.one": "from sp_lightning.b import two",
    "sp_lightning.a.other": "from sp_lightning.a.one import One",
    "sp_lightning.b.__init__": "",
    "sp_lightning.b.two": "{}\n",
}


@pytest.mark.parametrize(
    ("source", "of_files", "of_folders"),
    [
        ("import os", [0, 0, 0], [0, 0, 0]),
        ("from ..a.other import Other", [3, 3, 3], [2, 2, 2]),
        ("import sp_lightning.a.one", [2, 2, 2], [2, 2, 2]),
        ("from sp_lightning import a", [0, 0, 0], [2, 2, 2]),
        ("if TYPE_CHECKING:\n    from sp_lightning.a.other import Other", [0, 3, 3], [0, 2, 2]),
        ("class A:\n  def f():\n    from sp_lightning.a import one", [0, 0, 2], [0, 0, 2]),
    ],
)
def test_cycles_are_found(source: str, of_files: list[int], of_folders: list[int]) -> None:
    sources = {name: text.format(source) for name, text in CIRCLE.items()}
    graphs = [
        shape.between_files(sources, types=types, inside=inside)
        for types, inside in ((False, False), (True, False), (True, True))
    ]
    assert [sum(map(len, shape.cycles(graph))) for graph in graphs] == of_files
    assert [sum(map(len, shape.cycles(shape.between_folders(graph)))) for graph in graphs] == of_folders


def test_two_cycles_are_two() -> None:
    graph = {"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"e"}, "e": {"c"}, "f": {"a"}}
    assert shape.cycles(graph) == [{"c", "d", "e"}, {"a", "b"}]


@pytest.mark.long("takes a second or more")
def test_the_package_has_no_cycles_beside_the_files_that_name_everything() -> None:
    graph = shape.without_meeting_points(shape.between_files(shape.files(), types=True, inside=True))
    assert "sp_lightning.registry" not in graph
    assert shape.cycles(graph) == []
    assert shape.cycles(shape.between_folders(graph)) == []
