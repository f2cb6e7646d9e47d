"""Benchmarks of trials over one base, at their smallest."""

from __future__ import annotations

from typing import Any

import pytest

from examples.benchmarks import clocked_trials, shared_base
from examples.demos.language import small_llama

SMALL = shared_base.Workload(6, 32, 64, 2)


@pytest.mark.long("tests/sharing has trials in the first tier")
def test_trials_at_once_are_measured_beside_the_same_one_after_the_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared_base.main(["--tiny", "--rounds", "1", "--trials", "1", "3"])
    _, head, _, one, three = (line.split(" | ") for line in capsys.readouterr().out.strip().splitlines()[1:])
    assert len(head) == len(one) == len(three) == len(shared_base.COLUMNS)
    assert [one[1], three[1]] == ["1", "3"]
    assert one[6] == one[7]
    assert three[6] == three[7]
    assert all(float(number) > 0 for number in (*one[2:6], *three[2:6]))

    found = shared_base.at_once(trial := shared_base.trial_of(shared_base.TINY), 3)
    (slots,) = {each.slot_bytes for each in found.trained}
    # Adapters, of rank 8, are each trial's own: of a block at most this share. A head has none.
    block = small_llama(1, shared_base.TINY.hidden).model.layers[0]
    base = sum(parameter.numel() for parameter in block.parameters())
    adapters = sum(8 * sum(p.shape) for p in block.parameters() if p.ndim == 2)
    assert base / (base + adapters) < found.wire_bytes / slots < 1, "the base has come once for three trials"

    monkeypatch.setattr(shared_base, "at_once", lambda *_: shared_base.Figures(1.0, 1.0, 0, [trial(1), trial(0)]))
    with pytest.raises(RuntimeError, match="2 trials at once have other losses"):
        shared_base.measure(shared_base.TINY, [2], 1)


@pytest.mark.long("takes a second or more")
def test_kernels_of_all_trials_do_not_wait_for_the_layers_of_one() -> None:
    (three,) = clocked_trials.measure(4, [3], workload=SMALL)
    assert three.bound > 3
    assert three.gain >= 2.3, "2.15 if turns do not change where a forward has nothing left to fetch"


def test_a_trial_that_comes_to_other_losses_on_the_device_of_clocks_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload, made = shared_base.Workload(2, 32, 64, 2), iter(range(99))

    def trial_of(*_: Any) -> Any:
        return lambda number: shared_base.Trained([float(next(made))], 1.0, 1)

    monkeypatch.setattr(clocked_trials, "trial_of", trial_of)
    monkeypatch.setattr(clocked_trials, "clocked", lambda run, travel: clocked_trials.Ran(1.0, 1.0, 1, run()))
    with pytest.raises(RuntimeError, match="other losses than one after the other"):
        clocked_trials.measure(1, [2], workload=workload)
