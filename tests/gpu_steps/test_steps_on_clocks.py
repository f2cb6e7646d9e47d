"""Steps on the device take as long as was predicted: the real engine on a device whose streams, and whose threads, are clocks."""

from __future__ import annotations

import pytest

from examples.benchmarks import clocked_loan, clocked_steps
from sp_lightning.core.device.device import Stream
from sp_lightning.tools.planner.prediction.clocks import ClockDevice
from sp_lightning.tools.planner.prediction.visits import Rates
from tests.support.tiers import first

CASES = [
    (overlap, precision, ratio)
    for overlap in ("off", "forward", "backward")
    for precision in ("32-true", "bf16-mixed")
    for ratio in (0.5, 1, 4)
]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("overlap", "precision", "ratio"),
    first(CASES, ("forward", "32-true", 1), ("forward", "bf16-mixed", 1), why="other balances of the same"),
)
def test_a_step_takes_no_longer_than_planned(overlap: str, precision: str, ratio: float) -> None:
    row = clocked_steps.measure(overlap, precision, ratio)
    assert 0.9 < row.times <= clocked_steps.MOST


@pytest.mark.long("two trainings on clocks")
@pytest.mark.parametrize(("stay", "most"), [(0, 0.01), (2, 1.0)])
def test_a_loan_of_the_gpu_takes_less_than_a_second(stay: int, most: float) -> None:
    """With an 8B model, copies at 25 GB/s."""
    without, lent = (clocked_loan.train("all weights", stay, 2, lends=lends)[0] for lends in (False, True))
    assert lent - without < most


def test_steps_take_the_models_time_where_they_overlap() -> None:
    device = ClockDevice(Rates(1.0, 1.0, 1.0, 1.0))
    device.spend(Stream.COMPUTE, 2.0, "forward", 0)
    device.step(1.0, 0)
    assert device.now[Stream.COMPUTE] == 3.0, "kernels that were issued before"
    device.now[Stream.STEP] = 10.0
    device.step(1.0, 0)
    device.spend(Stream.COMPUTE, 2.0, "forward", 0)
    assert device.now[Stream.COMPUTE] == 5.0, "over before the step begins"
    device.spend(Stream.COMPUTE, 6.0, "forward", 0)
    assert device.now[Stream.COMPUTE] == 12.0, "beside the step"
    device.spend(Stream.COMPUTE, 1.0, "forward", 0)
    assert device.now[Stream.COMPUTE] == 13.0
