"""The threads of what runs in the background: of one accelerator all but two, of several those of all processes."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from sp_lightning.device.device import Device
from sp_lightning.engine.placement import update_threads


@pytest.fixture
def device() -> Iterator[Device]:
    before = torch.get_num_threads()
    device = Device(torch.device("cpu"))
    yield device
    device.close()
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("own", "on_host", "given", "expected"),
    [(4, True, None, 4), (4, False, None, 2), (3, False, None, 1), (1, False, None, 1), (1, True, 3, 3)],
)
def test_operators_in_the_background_take_so_many(
    device: Device, own: int, on_host: bool, given: int | None, expected: int
) -> None:
    torch.set_num_threads(own)
    device.computes_on_host = on_host
    device.background_threads = given
    found: list[int] = []
    device.later(lambda: found.append(torch.get_num_threads())).result()
    assert found == [expected]
    assert torch.get_num_threads() == own


@pytest.mark.parametrize(
    ("own", "processes", "cores", "expected"),
    [
        (12, 8, 96, 88),  # Lightning's part of the processors for each of eight
        (1, 8, 96, 8),  # torchrun's
        (12, 8, 12, 11),  # each process is bound to processors of its own
        (1, 2, 2, 1),
    ],
)
def test_updates_take_the_threads_of_all_processes(own: int, processes: int, cores: int, expected: int) -> None:
    with (
        mock.patch("torch.get_num_threads", return_value=own),
        mock.patch("os.sched_getaffinity", return_value=set(range(cores))),
    ):
        assert update_threads(processes) == expected
