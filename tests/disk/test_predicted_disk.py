"""The simulated disk: a batch takes as long as its reads and writes if that is longest."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan
from sp_lightning.tools.planner.prediction.simulator import Walk
from sp_lightning.tools.planner.prediction.visits import Rates
from tests.support.models import Module, Stack
from tests.support.planner import schedule_visits

RATES = Rates(upload=1e9, download=1e9, update=1e9, host_memory=math.inf, visit_seconds=0.0)


def plan_of_stack() -> Any:
    module = Module(Stack())
    found = find_layers(module, layers=None, keep_on_gpu=(), autocast=None)
    return make_plan(found, k=1, k_prime=1)


@pytest.mark.parametrize("where", [{}, {"update_upload": 4.0, "update_download": 3.0}], ids=["host", "device"])
@pytest.mark.parametrize("overlap", ["off", "forward", "backward"])
def test_a_step_takes_as_long_as_a_slow_disk(overlap: Any, where: dict[str, float]) -> None:
    plan = plan_of_stack()
    visits = schedule_visits(plan, [1e-3] * len(plan.layers), training=True)
    sizes = dict.fromkeys(range(len(plan.layers)), 1000)
    slow = replace(RATES, disk=1000 / 0.5, **where)  # half a second for each read, and for each write
    seconds = Walk(plan, visits, slow, overlap=overlap, on_disk=sizes).predict().seconds
    bound = len(sizes) * 2 * 0.5
    assert 0.9 * bound <= seconds <= 1.25 * bound  # what is read ahead for the next batch counts there
    assert Walk(plan, visits, slow, overlap=overlap, on_disk=sizes).predict().busy["disk"] == pytest.approx(
        bound, rel=0.2
    )


def test_a_fast_disk_costs_nothing() -> None:
    plan = plan_of_stack()
    visits = schedule_visits(plan, [1e-3] * len(plan.layers), training=True)
    sizes = dict.fromkeys(range(len(plan.layers)), 1000)
    with_disk = Walk(plan, visits, replace(RATES, disk=1e12), overlap="forward", on_disk=sizes).predict()
    without = Walk(plan, visits, RATES, overlap="forward").predict()
    assert with_disk.seconds == pytest.approx(without.seconds, rel=1e-3)
    assert "disk" not in without.busy


def test_weights_that_are_read_in_place_bound_inference() -> None:
    plan = plan_of_stack()
    visits = schedule_visits(plan, [1e-3] * len(plan.layers), training=False)
    sizes = dict.fromkeys(range(len(plan.layers)), 1000)
    slow = replace(RATES, disk=1000 / 0.5)
    prediction = Walk(plan, visits, slow, on_disk=sizes).predict()
    assert prediction.seconds == pytest.approx(len(sizes) * 0.5, rel=0.2)
    assert prediction.binds == "disk"
    assert {event.kind for event in prediction.intervals} >= {"read"}
    assert "write" not in {event.kind for event in prediction.intervals}
