"""The same cases on the simulated device: nothing races, nothing mixes, and the result is the same to the bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.models import CASES
from tests.support.runs import Outcome, assert_same, fit, superpipeline
from tests.support.simdevice import simulated

_plain: dict[tuple[str, str], Outcome] = {}


def run(name: str, strategy: Any, precision: str = "32-true") -> Outcome:
    case = CASES[name]
    batches = case.batches()
    val = None if any(getattr(batch, "requires_grad", False) for batch in batches) else case.batches()[:2]
    options: dict[str, Any] = {"precision": precision}
    if name not in ("gan", "lbfgs"):
        options |= {"accumulate_grad_batches": 2, "max_epochs": 2}
    return fit(case.make, batches, strategy, val=val, **options)


def check(name: str, k: int, k_prime: int, precision: str) -> None:
    if (name, precision) not in _plain:
        _plain[name, precision] = run(name, "auto", precision)
    with simulated():
        ours = run(name, superpipeline(k=k, k_prime=k_prime), precision)
    assert_same(ours, _plain[name, precision])


@pytest.mark.parametrize(
    ("name", "k", "k_prime"),
    [(name, 1, 1) for name in CASES]
    + [(name, 2, 2) for name in list(CASES)[::3]]
    + [(name, 99, 1) for name in ("stack", "llama-dropout", "gan")],
)
def test_no_race(name: str, k: int, k_prime: int) -> None:
    check(name, k, k_prime, "32-true")


@pytest.mark.parametrize("name", CASES)
def test_no_race_in_mixed_precision(name: str) -> None:
    check(name, 1, 1, "bf16-mixed")
