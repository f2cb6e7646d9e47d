"""What the GPU's tests with delays rest on, as far as a CPU can say."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from sp_lightning.core.device.device import Stream, Wait
from tests.support.runs import assert_same, superpipeline
from tests.support.simdevice import Race, simulated
from tests.support.wait_scenarios import CYCLES, NOT_SEEN, OF_RANKS, SCENARIOS, SEEN, Delayed, Slow, ahead, left_out

CPU = torch.device("cpu")


def make(slow: Slow, omit: Wait | None = None) -> tuple[Delayed, mock.Mock]:
    """On a CPU, whose streams do nothing; and a list of what came when."""
    with mock.patch("sp_lightning.core.device.accelerator._side_stream", side_effect=lambda *_: mock.MagicMock()):
        device = Delayed(torch.device("cpu", 0), slow, omit)
    device.on = lambda stream: nullcontext()  # type: ignore[method-assign]
    sleep = mock.Mock()
    return device, sleep


def test_a_slow_copy_sleeps_and_spoils_its_target_first() -> None:
    device, sleep = make("copies")
    target, source = torch.zeros(4), torch.ones(4)

    def copy(*_: Any, **options: Any) -> None:
        sleep(target.isnan().all().item())

    with mock.patch("torch.cuda._sleep", sleep), mock.patch("tests.support.wait_scenarios.Accelerator.copy", copy):
        device.copy([target], [source], Stream.UPLOAD)
        device.access(target, Stream.COMPUTE, write=False)
    assert sleep.call_args_list == [mock.call(CYCLES["copies"]), mock.call(True)]


def test_slow_compute_sleeps_before_it_uses_memory() -> None:
    device, sleep = make("compute")
    target, source = torch.zeros(4), torch.ones(4)
    with mock.patch("torch.cuda._sleep", sleep):
        device.access(target, Stream.COMPUTE, write=False)
        device.access(target, None, write=False)
        device.copy([target], [source], Stream.UPLOAD)
    assert sleep.call_args_list == [mock.call(CYCLES["compute"])]
    assert target.tolist() == [1] * 4


@pytest.mark.parametrize("omit", [None, Wait.APPLY_AFTER_DRAIN])
def test_only_the_wait_that_is_left_out_is_left_out(omit: Wait | None) -> None:
    device, _ = make("copies", omit)
    first, second = mock.Mock(), mock.Mock()
    device.synchronize(first, Wait.APPLY_AFTER_DRAIN)
    device.synchronize(second, Wait.UPDATE_AFTER_FETCH)
    assert first.synchronize.called == (omit is None)
    assert second.synchronize.called
    assert device.waits == {Wait.APPLY_AFTER_DRAIN, Wait.UPDATE_AFTER_FETCH}


def test_unpinning_looks_at_both_side_streams() -> None:
    device, _ = make("copies")
    memory = torch.empty(4096, dtype=torch.uint8)
    busy: Any = device._side[Stream.DOWNLOAD]
    for stream in device._side.values():
        stream.query = mock.Mock(return_value=stream is not busy)  # type: ignore[method-assign]
    device.unpin(memory)
    assert device.early == [Stream.DOWNLOAD.value]
    assert busy.synchronize.called


@pytest.mark.long("takes a second or more")
def test_the_host_runs_ahead_of_a_step_and_must_wait_there() -> None:
    """Forwards right before it, of which nobody has read anything."""
    with simulated():
        ours = ahead(superpipeline(k=1))
    assert_same(ours, ahead("auto"))
    for wait in (Wait.UPDATE_AFTER_FETCH, Wait.UPDATE_AFTER_RESIDENTS):
        with left_out(), pytest.raises(Race), simulated(wait):
            ahead(superpipeline(k=1))


def test_every_wait_is_tried_on_a_gpu_or_has_its_reason_not_to_be() -> None:
    assert {*SCENARIOS, *OF_RANKS} == set(Wait)
    assert all(NOT_SEEN.values())
    assert len(NOT_SEEN) == 5
    assert set(SEEN) <= set(SCENARIOS), "eight waits of several ranks were among them, without a scenario"
