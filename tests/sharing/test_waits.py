"""The order between trials on a device whose copies come as late as they may, and whose uploads have a stream for each trial."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from sp_lightning import SharedBase
from sp_lightning.device.device import Stream, Wait
from tests.support.runs import Outcome, assert_same
from tests.support.simdevice import Race, SimDevice
from tests.support.trials import RATES, learn
from tests.support.wait_scenarios import OF_TRIALS, left_out

UPLOADS = (Stream.UPLOAD, Stream.REDUCE)  # ranks alone have the second one


class OfTrial:
    """One simulated device as a trial has it, whose uploads are another stream of it than the other trial's."""

    def __init__(self, device: SimDevice, uploads: Stream) -> None:
        self._device = device
        self._uploads = uploads

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._device, name)
        if name not in ("copy", "record", "wait", "on", "access", "mark"):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            return found(*(self._uploads if each is Stream.UPLOAD else each for each in args), **kwargs)

        return call


@contextmanager
def one_device(omit: Wait | None = None) -> Iterator[SimDevice]:
    """Two trials inside run on one simulated device."""
    device, uploads = SimDevice(torch.device("cpu"), omit), iter(UPLOADS)

    def make(_: torch.device) -> OfTrial:
        return OfTrial(device, next(uploads))

    with mock.patch("sp_lightning.trainer.run.device_for", make):
        yield device


def assert_all_same(ours: list[Outcome], alone: list[Outcome]) -> None:
    for outcome, its in zip(ours, alone, strict=True):
        assert_same(outcome, its)


def run() -> list[Outcome]:
    return SharedBase(layers=1).map(learn, RATES[:2])


def test_late_copies_change_nothing() -> None:
    with one_device() as device:
        ours = run()
    assert set(OF_TRIALS) <= set(device.waits)
    assert_all_same(ours, [learn(rate) for rate in RATES[:2]])


@pytest.mark.parametrize("wait", OF_TRIALS, ids=lambda wait: wait.name)
def test_every_wait_between_trials_is_needed(wait: Wait) -> None:
    alone = [learn(rate) for rate in RATES[:2]]
    with left_out(), pytest.raises((Race, AssertionError)), one_device(wait):
        assert_all_same(run(), alone)
