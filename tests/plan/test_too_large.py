"""A model that does not fit is refused with what would."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from sp_lightning import SuperpipelineStrategy
from sp_lightning.device.device import Device
from tests.support.models import Module, Stack
from tests.support.runs import assert_equal
from tests.support.starts import start


class SmallDevice(Device):
    """A device with little memory."""

    free: int | None = 0

    def free_bytes(self) -> int | None:
        return self.free


@pytest.mark.parametrize(
    ("free", "options", "message"),
    [
        (
            4096, {},
            r"need 20480 bytes \(20\.0 KiB\) with k=1 and k_prime=1, and 3840 bytes \(3\.8 KiB\) are free on cpu.*"
            r"layer, 'net\.blocks\.0', takes 5120 bytes.*layers=\[\"net\.blocks\.\*\.\*\"\]\), whose least is",
        ),
        (24576, {"k": 2, "k_prime": 1}, r"need 25600 bytes .* with k=2 .*least is 20\.0 KiB.*Strategy\(k=1, k_prime=1\)"),
        (
            2**20, {"gpu_memory": "10KiB"},
            r"need 20480 bytes .* with k=1 .*, and with gpu_memory=10240 there are 10240 bytes \(10\.0 KiB\)\. The",
        ),
        (
            40960, {"k": 1, "k_prime": 1, "optimizer_on": "gpu"},
            r"need \d+ bytes .*The two slots in which layers are stepped take \d+ bytes \(.*\) of that: leave "
            'optimizer_on="gpu" out, or give it as much memory',
        ),
        (None, {"gpu_memory": 0.5}, r"gpu_memory=0\.5 is a share of the device's free memory, and cpu has no"),
    ],
)  # fmt: skip
def test_too_large_for_the_device(free: int | None, options: dict[str, Any], message: str) -> None:
    module = Module(Stack())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with (
        mock.patch.object(SmallDevice, "free", free),
        mock.patch("sp_lightning.trainer.run.device_for", lambda device: SmallDevice(device)),
        pytest.raises(ValueError, match=message),
    ):
        start(SuperpipelineStrategy(**options), module)
    assert_equal(dict(module.state_dict()), before, "nothing is lost")
