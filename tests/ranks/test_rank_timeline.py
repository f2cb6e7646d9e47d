"""Pictures of several devices: rank 0 alone draws one, with the sums over ranks in it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from sp_lightning import SuperpipelineCallback, SuperpipelineStrategy
from sp_lightning.trainer import plot
from tests.support.models import Module, Stack, vectors
from tests.support.ranks import in_ranks
from tests.support.runs import fit

pytestmark = pytest.mark.rest("a run of several ranks, to look at a file")

RANKS = 2


def train(folder: str) -> tuple[list[str], list[str], list[str]]:
    """Returns the files that this rank has opened, the kinds that were drawn, and the picture's title."""
    touched: list[str] = []
    drawn: list[str] = []
    titles: list[str] = []
    open_file, draw = io.open, plot.draw_timeline

    def opens(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if str(file).startswith(folder):
            touched.append(Path(file).name)
        return open_file(file, mode, *args, **kwargs)

    def draws(intervals: Any, names: Any, path: Path, title: str) -> None:
        drawn.extend(sorted({each.kind for each in intervals}))
        titles.append(title)
        draw(intervals, names, path, title)

    callback = SuperpipelineCallback(plot=f"{folder}/run.png", every_n_steps=1)
    strategy = SuperpipelineStrategy(k=1)
    with (
        mock.patch("io.open", opens),
        mock.patch("sp_lightning.trainer.callback.draw_timeline", draws),
    ):
        fit(lambda: Module(Stack()), vectors(8), strategy, devices=RANKS, callbacks=[callback], recorded="losses")
    return touched, drawn, titles


@pytest.mark.long("takes a second or more")
def test_rank_0_alone_draws_its_batch(tmp_path: Path) -> None:
    (first, drawn, titles), (second, *_) = in_ranks(RANKS, train, str(tmp_path))
    assert set(first) == {"run.png"}
    assert second == []
    assert titles == ["Training batch 3, k = 1, k' = 1, rank 0 of 2"]
    assert set(drawn) >= {"fetch", "backward", "reduce", "drain"}
    assert set(drawn) <= set(plot.COLORS), "everything has a colour"
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
