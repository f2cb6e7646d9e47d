"""Trials over one base where transfers are slow, on a device of clocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.sharing import on_clocks
from tests.sharing.on_clocks import Ran, Workload


@pytest.mark.long("takes a second or more")
def test_kernels_of_all_trials_do_not_wait_for_the_layers_of_one() -> None:
    (three,) = on_clocks.measure(4, [3], Workload(6, 32, 64, 2))
    assert three.bound > 3
    assert three.gain >= 2.3, "2.15 if turns do not change where a forward has nothing left to fetch"


def test_a_trial_that_comes_to_other_losses_on_the_device_of_clocks_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = iter(range(99))

    def trial_of(*_: Any) -> Any:
        return torch.nn.Linear(2, 2).requires_grad_(False), lambda copied, number: [float(next(made))]

    monkeypatch.setattr(on_clocks, "trial_of", trial_of)
    monkeypatch.setattr(on_clocks, "clocked", lambda run, travel: Ran(1.0, 1.0, 1, run()))
    with pytest.raises(RuntimeError, match="other losses than one after the other"):
        on_clocks.measure(1, [2], Workload(2, 32, 64, 2))
