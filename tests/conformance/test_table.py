"""Lightning's features under this strategy: each runs under plain Lightning and under ours, and all that can be seen is equal.

Which ones is in CONFORMANCE.md, which ``python -m tests.conformance.test_table`` writes.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.features import FEATURES, GROUPS
from tests.support.ways import Net, compare

FOLDER = Path(__file__).parent
TABLE = FOLDER.parent / "CONFORMANCE.md"
WITHOUT_A_ROW = {"test_table", "test_pytorch_lightning"}
"""Files whose tests are about no feature of Lightning's."""


@pytest.mark.rest("takes tenths of a second")
def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """Another learning rate in one of the ways is noticed."""
    with pytest.raises(AssertionError, match="differ"):
        compare(lambda way: way.fit(lambda: Net(lr=1e-2 if way.overlap is None else 1.1e-2)), tmp_path)
    with pytest.raises(AssertionError, match="nothing was streamed"):
        compare(lambda way: way.fit(), tmp_path / "resident", keep_on_gpu=["**"])


def with_a_row() -> Iterator[str]:
    """The names of all tests in this folder that are to have a row; importing their files fills the list of features."""
    for file in sorted(FOLDER.glob("test_*.py")):
        if file.stem not in WITHOUT_A_ROW:
            module = importlib.import_module(f"{__package__}.{file.stem}")
            yield from (name for name in vars(module) if name.startswith("test_"))


def verdict(test: Callable[..., None]) -> str:
    """What a mark says; without one the test says that it works."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "xfail"]
    return f"no: {marks[0].kwargs['reason']}" if marks else "yes"


def table() -> str:
    assert list(with_a_row())
    lines = [
        "# Conformance",
        'Lightning\'s features under this strategy. Each test runs the same thing under `strategy="auto"` and under '
        "superpipeline, on the CPU, with updates in and outside the background where that is possible, and compares "
        "everything that is left or can be seen, bitwise: weights, buffers, optimizer and scheduler state, what was logged, "
        "checkpoints, loops' progress, random state. `python -m tests.conformance.test_table` runs the tests and writes this.",
    ]
    for group in GROUPS:
        rows = sorted((name, verdict(test), test.__name__) for each, name, test in FEATURES if each == group)
        assert rows
        head = "| feature | works | test |\n|---|---|---|"
        body = "\n".join(f"| {name} | {works} | `{test}` |" for name, works, test in rows)
        lines += [f"## {group}", f"{head}\n{body}"]
    return "\n\n".join(lines) + "\n"


def test_the_table_is_of_these_tests() -> None:
    assert TABLE.read_text() == table()


def test_every_test_has_a_row() -> None:
    assert set(with_a_row()) == {test.__name__ for _, _, test in FEATURES}
    assert len({(group, name) for group, name, _ in FEATURES}) == len(FEATURES)


if __name__ == "__main__":
    importlib.import_module("tensorboard")  # a skipped test says nothing
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not long", str(FOLDER), "-k", "not the_table"]
    if not (failed := subprocess.run(command).returncode):
        TABLE.write_text(table())
    sys.exit(failed)
