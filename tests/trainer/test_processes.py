"""One device in each of several processes that other programs have started."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.fabric.plugins.environments import KubeflowEnvironment, SLURMEnvironment

from sp_lightning import SuperpipelineStrategy
from tests.support.models import Module, Stack, vectors
from tests.support.runs import fit


def test_one_device_in_each_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun has started two, and each would train by itself."""
    started = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"2 processes were started .* Pass Trainer\(devices=2\)"):
        fit(lambda: Module(Stack()), vectors(2), SuperpipelineStrategy(), devices=1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert fit(lambda: Module(Stack()), vectors(2), SuperpipelineStrategy(), devices=1).losses


@pytest.mark.parametrize("environment", [SLURMEnvironment, KubeflowEnvironment])
def test_one_device_where_the_environment_cannot_tell_the_number_of_processes(
    environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain Lightning does not ask for SLURM_NTASKS or WORLD_SIZE on one device; a KeyError was all that users saw here."""
    for name in ("SLURM_NTASKS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert fit(lambda: Module(Stack()), vectors(2), SuperpipelineStrategy(), devices=1, plugins=[environment()]).losses
