"""Weights that a step writes on the device: what it costs to copy them to the host."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sp_lightning.core.store.block import HostBlock
from tests.support.models import Module, vectors
from tests.support.runs import assert_same, fit, superpipeline


class Clamps(nn.Module):
    """Writes its four weights in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for weight in self.parameters():
                weight.clamp_(-0.1, 0.1)
        return x + self.second(self.first(x))


def module() -> Module:
    return Module(nn.Sequential(*(Clamps() for _ in range(4))))


class Reads(TorchDispatchMode):
    """Counts operators that read a tensor's memory."""

    def __init__(self, read: Tensor) -> None:
        super().__init__()
        self._address, self.count = read.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        reads = not func.is_view and func is not torch.ops.aten.detach.default
        self.count += reads and any(each.untyped_storage().data_ptr() == self._address for each in tensors)
        return func(*args, **(kwargs or {}))


def test_a_written_weight_is_downloaded_once_and_the_host_waits_once_for_a_layer() -> None:
    """It was downloaded to be compared, and again to be copied; and the host waited once for each weight."""
    write, reads = HostBlock.write, list[int]()

    def counted(self: HostBlock, index: int, value: Tensor) -> bool:
        with Reads(value) as mode:
            written = write(self, index, value)
        reads.append(mode.count)
        return written

    strategy = superpipeline(k=1)
    with mock.patch.object(HostBlock, "write", counted):
        ours = fit(module, vectors(2), strategy)
    assert_same(ours, fit(module, vectors(2)))
    assert set(reads) == {1}
    assert len(reads) == 2 * 4 * 4
    assert strategy.stats().host_waits == 2 * 4
