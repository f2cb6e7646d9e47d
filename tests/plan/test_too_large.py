"""A model that does not fit is refused with what would."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.device import Device
from tests.support.models import Module, Stack
from tests.support.runs import assert_equal
from tests.support.ways import start


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
            r"need 20480 bytes \(20\.0 KiB\) with k=1 and k_prime=1 \(slots .*, gradients .*\), and 3840 bytes \(3\.8 KiB\) are "
            r"free on cpu.*divide the largest layer, 'net\.blocks\.0', with layers=",
        ),
        (24576, {"k": 2, "k_prime": 1}, r"need 25600 bytes .* with k=2 .*least is 20\.0 KiB.*Strategy\(k=1, k_prime=1\)"),
        (
            2**20, {"gpu_memory": "10KiB"},
            r"need 20480 bytes .* with k=1 .*, and with gpu_memory=\"10KiB\" there are 10240 bytes \(10\.0 KiB\)\. The",
        ),
        (
            40960, {"k": 1, "k_prime": 1, "optimizer_on": "gpu"},
            r'need \d+ bytes .*, steps .*leave optimizer_on="gpu" or names of keep_on_gpu= out, or give it as much memory',
        ),
        (None, {"gpu_memory": "50%"}, r"gpu_memory=\"50%\" is a share of the device's free memory, and cpu has no"),
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


def test_what_other_programs_hold_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the run, and if the device runs out of memory later."""
    monkeypatch.setattr(SmallDevice, "held_by_others", lambda self: (60 << 30, 80 << 30))
    monkeypatch.setattr("sp_lightning.trainer.run.device_for", SmallDevice)
    monkeypatch.setattr(SmallDevice, "free", 4096)
    with pytest.raises(
        ValueError, match=r"Other programs hold 60\.0 GiB of the GPU's 80\.0 GiB\. List them: nvidia-smi"
    ):
        start(SuperpipelineStrategy())
    monkeypatch.setattr(SmallDevice, "free", None)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        start(SuperpipelineStrategy(), Hungry(Stack()))
    assert "Other programs hold 60.0 GiB" in raised.value.__notes__[-1]


class Hungry(Module):
    def loss(self, batch: Any) -> Any:
        raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    ("error", "step"),
    [
        ("The NVIDIA driver on your system is too old (found version 12020)", "Update the driver"),
        ("CUDA error: out of memory", "List them: nvidia-smi"),
        ("Address already in use", None),
    ],
)
def test_a_gpu_that_cannot_be_used(error: str, step: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPUAccelerator, "setup_device", mock.Mock(side_effect=RuntimeError(error)))
    with pytest.raises(RuntimeError, match=error[:20]) as raised:
        start(SuperpipelineStrategy(), Module(Stack()))
    assert [step in note for note in getattr(raised.value, "__notes__", []) if step] == [True] * (step is not None)
