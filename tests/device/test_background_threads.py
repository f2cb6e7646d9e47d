"""The threads of what runs in the background: of one accelerator all but two, of several those of all processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sp_lightning.core.device.device import Device


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
