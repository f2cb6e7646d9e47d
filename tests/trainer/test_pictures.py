"""Pictures can be read: nothing lies on top of anything else, what is thin is shown larger, axes have numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sp_lightning.core.device.timeline import Interval
from sp_lightning.trainer.plot import draw_timeline, require_matplotlib
from tests.support.tiers import first


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Those that were drawn."""
    pyplot = require_matplotlib()
    close, found = pyplot.close, list[Any]()
    monkeypatch.setattr(pyplot, "close", found.append)
    yield found
    for each in found:
        close(each)


def box(artist: Any) -> Any:
    return artist.get_window_extent(artist.figure.canvas.get_renderer())


def batch(layers: int, fetch: float) -> list[Interval]:
    """Milliseconds: a forward and a backward of 30 for each layer, with a short fetch before and a drain after it."""
    found = []
    for at, layer in enumerate([*range(layers), *reversed(range(layers))]):
        kind: Any = "forward" if at < layers else "backward"
        begin = 0.04 * at
        found += [
            Interval("fetch", layer, begin, begin + fetch, 1),
            Interval(kind, layer, begin + 0.005, begin + 0.035, 0),
        ]
    return found


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("layers", first([2, 12, 60, 200], 12, 60, why="very few and very many"))
def test_a_batch(layers: int, figures: list[Any], tmp_path: Path) -> None:
    draw_timeline(batch(layers, 0.001), [f"layers.{index}" for index in range(layers)], tmp_path / "a.png", "a batch")
    (figure,) = figures
    (legend,), (whole, near) = figure.legends, figure.axes
    for upper, lower in pairwise(whole.get_yticklabels()):
        assert not box(upper).overlaps(box(lower)), f"{upper.get_text()} and {lower.get_text()}"
    for panel in (whole, near):
        assert panel.xaxis.label.get_text() == "milliseconds"
        assert not box(legend).overlaps(box(panel.xaxis.label))
    fetches = next(bars for bars in near.containers if bars.get_label() == "upload")
    low, high = near.get_xlim()
    seen = [bar for bar in fetches if low <= bar.get_x() and bar.get_x() + bar.get_width() <= high]
    assert seen
    assert all(box(bar).width >= 2 for bar in seen)
