"""The engine's default for activations, KeepAll, and the fallback of ``activations="auto"`` without its folder."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch

from sp_lightning.core.engine.activations import KeepAll
from sp_lightning.core.engine.streamer import Streamer
from tests.support.models import Module, Stack, vectors
from tests.support.runs import assert_same, fit, superpipeline
from tests.support.saving import Saves, rows, saving
from tests.support.simdevice import simulated


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("choice", ["keep", "auto"])
def test_a_run_that_offloads_nothing_has_the_default(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    begin = Streamer.begin

    def noted(self: Streamer, *args: object, **options: object) -> None:
        found.append(self.activations)
        begin(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Streamer, "begin", noted)
    ours = fit(lambda: Module(Stack()), vectors(2), superpipeline(k=1, activations=choice))
    assert_same(ours, fit(lambda: Module(Stack()), vectors(2)))
    assert {type(each) for each in found} == {KeepAll}
    assert set(ours.trainer.strategy.activations.values()) == {"keep"}


@pytest.mark.rest("takes tenths of a second")
def test_auto_without_the_folder_keeps_all_and_says_so_if_memory_ends(caplog: pytest.LogCaptureFixture) -> None:
    missing = mock.patch(
        "sp_lightning.registry.is_installed", side_effect=lambda folder: folder != "capabilities.activations"
    )
    with caplog.at_level(logging.INFO, "lightning.pytorch"), missing:
        with simulated(capacity=2**40):
            fit(lambda: saving([1] * 8), rows(), superpipeline(k=1, k_prime=1))
        assert "is not installed" not in caplog.text
        with simulated(capacity=4 * Saves.SIZE + 24_000), pytest.raises(torch.OutOfMemoryError):
            fit(lambda: saving([1] * 8), rows(), superpipeline(k=1, k_prime=1))
    assert caplog.text.count('activations="auto" keeps all activations on the GPU') == 1
