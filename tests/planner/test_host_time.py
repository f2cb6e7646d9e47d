"""Python's time for each layer call is measured."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from sp_lightning.core.engine.engine import Engine
from sp_lightning.tools.planner.prediction import machine
from sp_lightning.tools.planner.prediction.machine import measure_host_seconds


@pytest.mark.parametrize("training", [True, False])
def test_a_line_through_layers_of_few_and_of_many_weights(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A visit of 60 µs, and 10 µs for each weight in it."""
    visits = 12 * (2 if training else 1)
    monkeypatch.setattr(machine, "_beyond_plain", lambda weights, training: visits * (6e-5 + 1e-5 * weights))
    assert measure_host_seconds(training=training) == (pytest.approx(6e-5), pytest.approx(1e-5))


def test_a_host_that_measures_badly_takes_no_negative_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_beyond_plain", lambda weights, training: -1.0 if weights > 1 else 24e-5)
    assert measure_host_seconds(training=True) == (pytest.approx(1e-5), 0.0)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("training", [True, False])
def test_as_many_steps_run_with_the_engine_as_without_it(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock counts the steps. Nothing is left of them."""
    begin = mock.Mock(wraps=Engine.begin)
    monkeypatch.setattr(Engine, "begin", lambda *arguments, **options: begin(*arguments, **options))
    clock = iter(range(10**6))
    monkeypatch.setattr(machine, "thread_time", lambda: next(clock))
    threads = torch.get_num_threads()
    assert measure_host_seconds(training=training) == (0.0, 0.0)
    assert next(clock) == 2 * 2 * 2 * machine._ROUNDS
    assert begin.call_count == 2 * machine._ROUNDS
    assert torch.get_num_threads() == threads
