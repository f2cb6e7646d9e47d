"""The order between trials on one device, whose copies come as late as they may."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.experimental.sharing.common import OnDevice
from tests.support.runs import assert_same
from tests.support.simdevice import Race, SimDevice, simulated
from tests.support.trials import RATES, learn, shared


@pytest.mark.long("takes a second or more")
def test_the_device_has_nothing_of_the_base_once_all_trials_are_over() -> None:
    with simulated(watch=False, shared=True) as made:
        base = shared(layers=1)
        base.map(learn, RATES[:2])
        gc.collect()
        assert made[0].in_use == 0
    assert base.fetched_bytes


@pytest.mark.rest("takes tenths of a second")
def test_a_device_is_told_whose_turn_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts memory for the process, and a trial's peak is that of its own turns."""
    told = list[tuple[int, str]]()
    for name in ("begin_turn", "end_turn"):

        def tell(self: Device, *_: Any, name: str = name) -> None:
            told.append((id(self), name))

        monkeypatch.setattr(Device, name, tell)
    shared(layers=1).map(partial(learn, recorded="nothing"), RATES[:2])
    assert len({device for device, _ in told}) == 2
    for (device, name), (other, then) in pairwise(told):
        assert name == "end_turn" or then == "end_turn" or device != other
        assert (then == "end_turn") <= (device == other), "in another one's turn"


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}, {"optimizer_on": "gpu"}], ids=str)
def test_all_that_a_trial_copies_is_page_locked(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its adapters were not: the host waited for each of their copies, in the trial's turn, and the others with it."""
    locked, other = list[tuple[int, int]](), list[int]()
    pin, copy = SimDevice.pin, SimDevice._copy

    def pinning(self: SimDevice, memory: Tensor) -> bool:
        locked.append((memory.data_ptr(), memory.data_ptr() + memory.nbytes))
        return pin(self, memory)

    def copying(self: SimDevice, target: Tensor, source: Tensor, stream: Stream) -> None:
        host = source if stream is Stream.UPLOAD else target
        begin, end = host.data_ptr(), host.data_ptr() + host.nbytes
        if not self.has(host) and not any(first <= begin and end <= last for first, last in locked):
            other.append(host.nbytes)
        copy(self, target, source, stream)

    monkeypatch.setattr(SimDevice, "pin", pinning)
    monkeypatch.setattr(SimDevice, "_copy", copying)
    with simulated(watch=False, shared=True):
        shared(layers=1).map(partial(learn, recorded="nothing", **options), RATES[:2])
    assert not other


@pytest.mark.parametrize("omit", [None, Wait.CLOSE_AFTER_FETCH])
@pytest.mark.parametrize("larger", [False, True], ids=["all are over", "a larger layer comes"])
def test_memory_is_given_back_after_the_copies_to_it(larger: bool, omit: Wait | None) -> None:
    device, on_device = SimDevice(torch.device("cpu"), omit), OnDevice(1)
    small, large = torch.ones(512, dtype=torch.uint8), torch.ones(1024, dtype=torch.uint8)
    on_device.bring("small", small, device)
    give_back = partial(on_device.bring, "large", large, device) if larger else on_device.free
    race = pytest.raises(Race, match=r"written by compute at .* is not ordered after copied to")
    with nullcontext() if omit is None else race:
        give_back()


@pytest.mark.rest("takes tenths of a second")
def test_late_copies_change_nothing() -> None:
    with simulated(watch=False, shared=True) as made:
        ours = shared(layers=1).map(learn, RATES[:2])
    assert len(made) == 1
    for outcome, rate in zip(ours, RATES[:2], strict=True):
        assert_same(outcome, learn(rate))
