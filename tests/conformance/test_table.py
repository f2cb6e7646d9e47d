"""Lightning's features under this strategy: each runs under plain Lightning and under ours, and all that can be seen is equal.

CONFORMANCE.md lists them; ``python -m tests.conformance.test_table`` writes it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.conformance.features import FEATURES, GROUPS
from tests.support.nets import Net
from tests.support.ways import compare

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "CONFORMANCE.md"
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
    """Returns why a feature does not work: the reason of its test's mark. Empty if it works."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "xfail"]
    return str(marks[0].kwargs["reason"]) if marks else ""


def joined(names: Iterable[str]) -> str:
    """Names in one line. Those that differ only behind a colon are one item: "A: b, c"."""
    items: dict[str, list[str]] = {}
    for name in sorted(names):
        head, _, variant = name.partition(": ")
        items.setdefault(head, []).extend([variant] if variant else [])
    return "; ".join(f"{head}: {', '.join(variants)}" if variants else head for head, variants in items.items())


def page() -> str:
    """CONFORMANCE.md: the features by groups, and the reasons of those that do not work."""
    assert list(with_a_row())
    lines = [
        "# Conformance",
        'Lightning\'s features. Tests run each under `strategy="auto"` and under superpipeline, on the CPU, with updates in the '
        "step and, where possible, in the background. Weights, buffers, optimizer and scheduler state, logged values, "
        "checkpoints, progress of the loops and random state are equal, bit for bit: `pytest -m 'not long' tests/conformance`.",
    ]
    for group in GROUPS:
        verdicts = {name: verdict(test) for each, name, test in FEATURES if each == group}
        lines += [f"## {group}", joined(name for name, why in verdicts.items() if not why)]
        lines += [f"Not {name}: {why}" for name, why in sorted(verdicts.items()) if why]
    return "\n\n".join(lines) + "\n"


def test_the_page_is_of_these_tests() -> None:
    assert PAGE.read_text() == page(), "write it anew: python -m tests.conformance.test_table"


def test_every_test_has_a_row() -> None:
    assert set(with_a_row()) == {test.__name__ for _, _, test in FEATURES}
    assert len({(group, name) for group, name, _ in FEATURES}) == len(FEATURES)


if __name__ == "__main__":
    PAGE.write_text(page())
