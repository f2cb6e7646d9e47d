"""The uploads at the beginning of a batch: the forward waits for those that it needs first, and not for the whole window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.core.device.device import Stream, Wait
from tests.support.models import Module, vectors
from tests.support.runs import assert_same, fit, fused, superpipeline
from tests.support.simdevice import SimDevice, simulated

K, K_PRIME = 3, 1
SLOTS = [Wait.FETCH_AFTER_USE] * (K + K_PRIME)
RESIDENTS = [Wait.RESIDENTS_AFTER_USE, Wait.USE_AFTER_RESIDENTS]


class Watches(Module):
    """Notes the waits between the hooks before a batch and its forward."""

    def __init__(self, devices: Sequence[SimDevice] = ()) -> None:
        super().__init__(nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(6))))
        self._devices = devices
        self.waits: list[list[Wait]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._begin = len(self._devices[-1].waits) if self._devices else 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self._devices:
            self.waits.append(self._devices[-1].waits[self._begin :])
        return self.loss(batch)


def waits(kind: type[Watches] = Watches, **options: Any) -> list[list[Wait]]:
    """The waits of each batch. The run is compared with plain Lightning."""
    with simulated() as devices:
        ours = fit(fused(lambda: kind(devices)), vectors(4), superpipeline(k=K, k_prime=K_PRIME, **options))
    assert_same(ours, fit(fused(kind), vectors(4)))
    found: Any = ours.module.waits
    return found  # type: ignore[no-any-return]


@pytest.mark.rest("takes tenths of a second")
def test_the_host_waits_for_no_prefetch() -> None:
    """Before an optimizer's step the host waits for all uploads. Its closure is the batch, and writes nothing before that."""
    assert waits() == [SLOTS] * 4


@pytest.mark.rest("takes tenths of a second")
def test_residents_are_uploaded_before_the_prefetches() -> None:
    """The first module call waits for them, and they were last in the queue."""
    assert waits(keep_on_gpu=["net.5"], optimizer_overlap="off") == [RESIDENTS + SLOTS] * 4


@pytest.mark.rest("takes tenths of a second")
def test_residents_whose_update_is_under_way_are_uploaded_when_the_step_begins() -> None:
    first, *others = waits(keep_on_gpu=["net.5"], optimizer_overlap="forward")
    assert first == RESIDENTS + SLOTS
    assert all(each[-2:] == RESIDENTS and Wait.UPDATE_AFTER_FETCH not in each for each in others)


class Alternates(Watches):
    """Small and large layers in turns, which have rings of their own."""

    def __init__(self, devices: Sequence[SimDevice] = ()) -> None:
        super().__init__(devices)
        pairs = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4)]
        self.net = nn.Sequential(*(each for pair in pairs for each in (nn.Sequential(nn.Linear(16, 16)), pair)))


@pytest.mark.rest("takes tenths of a second")
def test_the_layer_that_is_used_first_is_uploaded_first() -> None:
    """All prefetches of the first ring were issued before those of the second."""
    sizes, plain = list[int](), SimDevice.copy
    found: list[list[int]] = []

    def copy(self: SimDevice, targets: Any, sources: Any, stream: Stream, **options: Any) -> None:
        if stream is Stream.UPLOAD:
            sizes.append(sum(each.nbytes for each in sources))
        plain(self, targets, sources, stream, **options)

    class Stops(Alternates):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            found.append(list(sizes))
            return super().training_step(batch, batch_idx)

        def on_train_batch_start(self, *_: Any) -> None:
            super().on_train_batch_start()
            sizes.clear()

    with mock.patch.object(SimDevice, "copy", copy), simulated() as devices:
        fit(fused(lambda: Stops(devices)), vectors(3), superpipeline(k=7, k_prime=1, optimizer_overlap="off"))
    assert len(found) == 3
    assert all(each == [min(each), max(each)] * 4 for each in found)


class Hooked(Watches):
    """A hook before the optimizer's step writes weights, before the closure."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()

        def halve(*_: Any) -> None:
            with torch.no_grad():
                self.net[0][0].weight.data.mul_(0.5)

        optimizer.register_step_pre_hook(halve)
        return optimizer


@pytest.mark.rest("takes tenths of a second")
def test_the_host_waits_where_a_hook_may_write_weights() -> None:
    assert all(Wait.UPDATE_AFTER_FETCH in each for each in waits(Hooked))
