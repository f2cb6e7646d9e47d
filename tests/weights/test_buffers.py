"""Buffers that a step sends to the device, by themselves. ``tests/equality/programs/buffers.py`` has them in training."""

from __future__ import annotations

import copy
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.core.torch_compat.moved import move_module
from sp_lightning.core.weights.buffers import AveragesOnDevice, find_averages
from tests.equality.programs.buffers import Average
from tests.support.models import Module, Stack


def test_a_method_within_a_step_is_on_the_device() -> None:
    """``cpu:0`` stands for another device than ``cpu``; what is asked for stays there until the step is over."""
    average = Average(Stack())
    host = dict(average.named_buffers())
    step = [True]
    listener = AveragesOnDevice(average, torch.device("cpu:0"), lambda: step[0])
    name = next(iter(average.names.values()))
    sent = getattr(average, name)
    assert sent is not host[name]
    assert all(buffer is not host[each] for each, buffer in average.named_buffers())
    assert copy.deepcopy(average).get_buffer(name) is not sent
    sent.add_(1)
    assert not torch.equal(host[name], sent)
    step[0] = False
    listener.send_back()
    assert average.get_buffer(name) is host[name]
    assert torch.equal(host[name], sent)
    listener.close()
    assert type(average._buffers) is dict
    assert type(copy.deepcopy(average)._buffers) is dict


def test_no_buffer_is_sent_where_the_device_has_no_memory_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were sent before the error counted as all: what the next call wrote to the others was lost."""
    average, empty_like = Average(Stack()), torch.empty_like
    host, numbers, seen = dict(average.named_buffers()), count(), list[list[bool]]()
    listener = AveragesOnDevice(average, torch.device("cpu:0"), lambda: True)

    def has_no_memory(*args: Any, **options: Any) -> Tensor:
        if next(numbers) == 3:
            raise torch.OutOfMemoryError("full")
        return empty_like(*args, **options)

    monkeypatch.setattr(torch, "empty_like", has_no_memory)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        average(Stack())
    assert all(buffer is host[name] for name, buffer in dict.items(average._buffers))
    average.register_forward_pre_hook(
        lambda *_: seen.append([buffer is host[n] for n, buffer in average.named_buffers()])
    )
    average(Stack())
    assert seen == [[False] * len(host)]
    listener.send_back()
    assert all(buffer is host[name] for name, buffer in dict.items(average._buffers))


@pytest.mark.parametrize("fixed", [False, True])
def test_averages_stay_where_the_weights_are(fixed: bool) -> None:
    module = Module(Stack())
    module.net.stem.requires_grad_(not fixed)
    module.average = Average(module.net)
    module.norm = nn.BatchNorm1d(16, affine=False)
    module.more = nn.ModuleDict({"average": Average(module.net), "norm": nn.BatchNorm1d(16, affine=False)})
    move_module(module, torch.device("meta"), module.parameters(), find_averages(module))
    assert all(buffer.device.type == "cpu" for buffer in (*module.average.buffers(), *module.more["average"].buffers()))
    assert all(buffer.is_meta for buffer in (*module.norm.buffers(), *module.more["norm"].buffers()))
    assert module.device.type == "meta"
