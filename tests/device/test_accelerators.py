"""Accelerators that are not CUDA (XPU): page locks and counters through torch's own, at the seam and without one."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from sp_lightning.device.accelerator import Accelerator
from sp_lightning.device.device import Wait
from sp_lightning.device.host_memory import PinnedMemory

EMPTY = torch.empty


class Allocator:
    """Stands for torch's pinned allocator of an accelerator that this machine lacks."""

    def __init__(self, most: float = math.inf) -> None:
        self.most = most
        self.taken: list[int] = []  # addresses

    def empty(self, *size: int, pin_memory: bool = False, **options: Any) -> Tensor:
        memory = EMPTY(*size, **options)
        if pin_memory:
            if memory.nbytes > self.most:
                raise RuntimeError("out of pinned memory")
            self.taken.append(memory.data_ptr())
        return memory


@pytest.fixture
def xpu() -> Accelerator:
    """The seam of an XPU: without streams, which it would make at once."""
    device = object.__new__(Accelerator)
    with mock.patch("torch.Stream"):
        device.__init__(torch.device("xpu", 0))  # type: ignore[misc]
    return device


def pinned(device: Accelerator, allocator: Allocator, nbytes: int) -> PinnedMemory:
    with (
        mock.patch("torch.empty", allocator.empty),
        mock.patch.object(Tensor, "is_pinned", lambda memory: memory.data_ptr() in allocator.taken),
    ):
        return PinnedMemory(device, nbytes, pin=True)


def test_torch_pins_where_nothing_can_be_registered(xpu: Accelerator) -> None:
    memory = pinned(xpu, Allocator(), 5000)
    assert memory.pinned
    assert memory.bytes.shape == (8192,)
    with mock.patch.object(xpu, "record"), mock.patch.object(xpu, "synchronize") as waited:
        memory.unpin()  # CUDA's runtime, which there is none of, is left alone
    assert {call.args[1] for call in waited.call_args_list} == {Wait.UNPIN_AFTER_COPY}


def test_where_torch_can_pin_no_more_it_goes_on_without(xpu: Accelerator) -> None:
    memory = pinned(xpu, Allocator(most=0), 5000)
    assert not memory.pinned
    assert memory.bytes.shape == (8192,)


def test_what_is_not_to_be_pinned_is_not(xpu: Accelerator) -> None:
    allocator = Allocator()
    with mock.patch("torch.empty", allocator.empty):
        assert not PinnedMemory(xpu, 5000, pin=False).pinned
    assert allocator.taken == []


def test_budget_and_peak_are_what_torch_counts(xpu: Accelerator) -> None:
    counters: dict[str, Any] = {
        name: mock.Mock(return_value=value)
        for name, value in {
            "get_memory_info": (600, 1000),
            "memory_reserved": 300,
            "memory_allocated": 100,
            "max_memory_allocated": 250,
            "reset_peak_memory_stats": None,
        }.items()
    }
    with mock.patch.multiple("torch.accelerator", **counters):
        assert xpu.free_bytes() == 600 + 300 - 100
        assert xpu.peak_bytes() == 250
        xpu.reset_peak()
    for asked in counters.values():
        asked.assert_called_once_with(torch.device("xpu", 0))


@pytest.mark.parametrize("missing", [AttributeError("torch 2.9"), RuntimeError("not supported on this backend")])
def test_where_torch_counts_nothing_there_is_no_budget_and_no_peak(xpu: Accelerator, missing: Exception) -> None:
    refused = mock.Mock(side_effect=missing)
    with mock.patch.multiple("torch.accelerator", get_memory_info=refused, max_memory_allocated=refused):
        assert xpu.free_bytes() is None
        assert xpu.peak_bytes() is None
