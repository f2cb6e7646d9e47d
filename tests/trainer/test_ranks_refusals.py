"""What several devices cannot do is refused by name, on all of them and before work begins."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelPruning

from sp_lightning import SuperpipelineStrategy
from tests.support.models import Module, Stack, vectors
from tests.support.ranks import RanksFailed, in_ranks
from tests.support.runs import fit


class Net(Module):
    def __init__(self) -> None:
        super().__init__(Stack())


def train(strategy: dict[str, Any], pruned: bool) -> None:
    callbacks = [ModelPruning("l1_unstructured", amount=0.5)] if pruned else []
    fit(Net, vectors(2), SuperpipelineStrategy(**strategy), devices=2, callbacks=callbacks)


@pytest.mark.parametrize(
    ("strategy", "pruned", "message"),
    [
        ({}, True, "ModelPruning gives other weights on several devices"),
        ({"check_writes": True}, False, "check_writes=True looks at the weights of one process"),
        (
            {"optimizer_overlap": "backward"},
            False,
            'optimizer_overlap="backward" updates a layer as soon as one device',
        ),
    ],
)
def test_what_is_refused(strategy: dict[str, Any], pruned: bool, message: str) -> None:
    with pytest.raises(RanksFailed, match=message) as caught:
        in_ranks(2, train, strategy, pruned)
    assert all(error is not None and message in error for error in caught.value.errors)


def test_one_device_in_each_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun has started two, and each would train by itself."""
    started = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"2 processes were started .* Pass Trainer\(devices=2\)"):
        fit(Net, vectors(2), SuperpipelineStrategy(), devices=1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert fit(Net, vectors(2), SuperpipelineStrategy(), devices=1).losses
