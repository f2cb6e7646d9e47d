"""Each wait, left out on a GPU where everything comes late: the results must show it.

What the simulated device reasons about (``tests/device/test_waits.py``) the hardware does here, but for some
(``examples/results/README.md``, On an H100).
"""

from __future__ import annotations

from typing import Any

import pytest

from sp_lightning.core.device.device import Wait
from tests.support.runs import Outcome, assert_same, superpipeline
from tests.support.wait_scenarios import REGIMES, SCENARIOS, SEEN, Slow, ahead, delayed, left_out

pytestmark = [
    pytest.mark.gpu("delays on streams of CUDA; tests/device/test_waits.py leaves waits out on a simulated device"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("deterministic", "everything_is_worth_moving"),
]


def run(scenario: Any, slow: Slow, omit: Wait | None) -> tuple[Outcome, list[Any]]:
    with delayed(slow, omit) as made:
        outcome = scenario(superpipeline(k=1))
    return outcome, made


def is_seen(wait: Wait, scenario: Any, slow: Slow) -> bool:
    expected, made = run(scenario, slow, None)
    assert not made[0].early
    with left_out():
        ours, made = run(scenario, slow, wait)
        try:
            assert_same(ours, expected)
        except AssertionError:
            return True
    return bool(made[0].early)


@pytest.mark.parametrize("wait", SEEN, ids=lambda wait: wait.name)
def test_a_wait_that_is_left_out_is_seen(wait: Wait) -> None:
    """In one of the two regimes, in its own scenario or in the one where the host runs far ahead."""
    assert any(is_seen(wait, scenario, slow) for scenario in (SCENARIOS[wait], ahead) for slow in REGIMES)


@pytest.mark.parametrize("slow", REGIMES)
@pytest.mark.parametrize("scenario", [ahead, *dict.fromkeys(SCENARIOS.values())], ids=lambda each: each.__name__)
def test_delays_change_nothing(scenario: Any, slow: Slow) -> None:
    """And nothing is unpinned while a copy is under way."""
    other = next(each for each in REGIMES if each != slow)
    ours, made = run(scenario, slow, None)
    assert not made[0].early
    assert_same(ours, run(scenario, other, None)[0])
