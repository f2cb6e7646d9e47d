"""The script that counts calls counts each of them, and the tables beside it read sources correctly."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from sp_lightning import SuperpipelineStrategy
from tests.repository import shape, walks
from tests.repository.walks import Calls, Function, Tracer

MODULE = """
def twice(x):
    return once(x) + once(x)

def once(x):
    return x
"""


def counted(then: Callable[[], Any], folder: str = walks.PACKAGE) -> Calls:
    """The calls of one walk."""
    with Tracer(folder).installed() as tracer:
        tracer.open("walk")
        then()
        tracer.close("walk")
    ((calls,),) = tracer.walks.values()
    return calls


def test_each_call_counts_on_each_thread(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(MODULE)
    spec = importlib.util.spec_from_file_location("some", tmp_path / "some.py")
    assert spec is not None
    some = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(some)

    def with_a_thread() -> None:
        thread = threading.Thread(target=some.once, args=(1,))
        thread.start()
        thread.join()
        some.twice(1)

    def names(then: Callable[[], Any]) -> dict[str, int]:
        return {function.name: calls for function, calls in counted(then, f"{tmp_path}/").items()}

    assert names(lambda: some.twice(1)) == {"twice": 1, "once": 2}
    assert names(lambda: (some.twice(1), some.once(1))) == {"twice": 1, "once": 3}
    assert names(with_a_thread) == {"twice": 1, "once": 3}
    assert names(lambda: len(counted(lambda: None))) == {}, "other folders do not count"


def test_the_figure_is_that_of_the_median() -> None:
    one, two = (Function(file, 1, "f") for file in ("a.py", "b.py"))
    few, more, most = Calls({one: 2}), Calls({one: 2, two: 1}), Calls({one: 9})
    assert str(walks.figure([most, few, more])) == "3 (2 to 9) | 2 | 2"
    assert str(walks.figure([few])) == "2 | 1 | 1"


@pytest.mark.rest("three trainings")
def test_walks_of_a_training_count_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "BLOCKS", 3)
    found = walks.trace("off", batches=2)
    fit, forward, batch = found[walks.FIT], found[walks.FORWARD], found[walks.BATCH]
    assert (len(fit), len(forward), len(found[walks.BACKWARD_OF_LAYER]), len(found[walks.BACKWARD])) == (1, 2, 2, 2)
    assert all(calls.total() >= len(calls) >= len(calls.files) > 0 for times in found.values() for calls in times)
    parts = [found[part][1].total() for part in (walks.ENTER, walks.COMPUTE, walks.LEAVE)]
    assert 0 < sum(parts) == forward[1].total() < batch[0].total()
    assert found[walks.BACKWARD_OF_LAYER][1].total() < found[walks.BACKWARD][1].total()

    forward_of_block = walks.Block.forward

    def with_one_more_call(self: walks.Block, x: torch.Tensor) -> torch.Tensor:
        SuperpipelineStrategy(k=2)
        return forward_of_block(self, x)

    one_more = counted(lambda: SuperpipelineStrategy(k=2))
    assert one_more.total() > 0
    with mock.patch.object(walks.Block, "forward", with_one_more_call):
        again = walks.trace("off", batches=2)
    assert again[walks.FORWARD][1] - forward[1] == one_more
    assert again[walks.FORWARD][1].total() == forward[1].total() + one_more.total()


@pytest.mark.rest("a training")
def test_updates_in_backward_are_counted_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "BLOCKS", 3)
    off, backward = (walks.trace(overlap, batches=2)[walks.BACKWARD][1].total() for overlap in ("off", "backward"))
    assert backward > 2 * off


SOURCE = '''"""A docstring,
of two lines."""

import os  # noqa: F401

# A comment.
TEXT = """A value,
of two lines."""


class A:
    """Another docstring."""

    x = 1  # a reason
    """A docstring of an attribute."""
'''


def test_lines_of_code_have_no_docstrings_comments_and_blank_lines() -> None:
    assert shape.size(SOURCE) == shape.Size(files=1, code=5, comments=2, classes=1)
    assert str(shape.size(SOURCE) + shape.size("x = 1\n")) == "2 | 6 | 2 | 33.3% | 1"


def test_folders_have_the_files_below_them() -> None:
    sources = {"sp_lightning.__init__": "x = 1\n", "sp_lightning.a.__init__": "", "sp_lightning.a.b.c": "x = 1\n"}
    assert shape.sizes(sources) == {"(root)": shape.Size(1, 1), "a": shape.Size(2, 1)}
    assert {shape.folder(module) for module in shape.files()} >= {"(root)", "trainer"}


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


def test_what_tests_import_and_replace_is_counted() -> None:
    public = "from sp_lightning import SuperpipelineStrategy, __version__\nimport sp_lightning.pytorch_lightning\n"
    inner = "import sp_lightning.cli\nfrom sp_lightning.trainer.options import A, B\nfrom sp_lightning import trainer\n"
    replaced = "mock.patch('sp_lightning.x.y')\nmock.patch.object(A, 'b')\nmonkeypatch.setattr(A.c, 'd', 1)\n"
    other = "mock.patch('torch.x')\nmonkeypatch.setattr(os, 'b', 1)\nmonkeypatch.chdir(A)\n"
    assert shape.knowledge([public, "x = 1"]) == shape.Knowledge(files=2)
    assert shape.knowledge([public, inner + replaced + other]) == shape.Knowledge(2, 1, 3, 2, 1)


@pytest.mark.rest("it reads every file")
def test_the_tables_are_markdown() -> None:
    tables = [line for line in shape.report() if line.startswith("|")]
    assert len(tables) > 20
    assert all(line.endswith("|") and "\n" not in line for line in tables)


def test_the_package_has_no_cycles_beside_the_files_that_name_everything() -> None:
    graph = shape.without_meeting_points(shape.between_files(shape.files(), types=True, inside=True))
    assert "sp_lightning.registry" not in graph
    assert shape.cycles(graph) == []
    assert shape.cycles(shape.between_folders(graph)) == []
