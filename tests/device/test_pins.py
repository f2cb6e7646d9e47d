"""Page locks: given back after the last copy, whoever lets go of the memory and whenever; and all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from sp_lightning.core.device.device import Stream, Wait
from sp_lightning.core.device.host_memory import PinnedMemory
from tests.support.models import CASES, Module, Stack, vectors
from tests.support.runs import fit, loader, superpipeline, trainer_for
from tests.support.simdevice import Race, SimDevice, settled, simulated
from tests.support.tiers import needs


def test_memory_that_a_copy_reads_may_be_let_go_of() -> None:
    device = SimDevice(torch.device("cpu"))
    memory, target = PinnedMemory(device, 64, pin=True), settled(device, 64)
    memory.bytes[:64].fill_(7)
    device.copy([target], [memory.bytes[:64]], Stream.UPLOAD)
    del memory
    assert target.tolist() == [7] * 64, "the copy had to be through before the page lock was given back"
    assert not device.pinned
    assert not device.early


@pytest.mark.parametrize("stream", [Stream.UPLOAD, Stream.DOWNLOAD])
def test_unpinning_too_early_is_noticed(stream: Stream) -> None:
    """The simulation has to see what a finalizer does, too."""
    device = SimDevice(torch.device("cpu"), omit=Wait.UNPIN_AFTER_COPY)
    memory, other = PinnedMemory(device, 64, pin=True), settled(device, 64)
    source, target = (memory.bytes[:64], other) if stream is Stream.UPLOAD else (other, memory.bytes[:64])
    device.copy([target], [source], stream)
    del memory
    assert "unpinned by host" in str(device.early[0])
    assert stream.value in str(device.early[0])


def test_a_forked_worker_leaves_the_locks_alone() -> None:
    """It can neither wait for the device nor unpin, and its collector may come past memory of the parent's."""
    device = SimDevice(torch.device("cpu"))
    memory = PinnedMemory(device, 64, pin=True)
    child = os.fork()
    if not child:
        del memory
        os._exit(0 if device.pinned and not device.waits else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del memory
    assert not device.pinned


class Lookup(Stack):
    """Each batch looks up more rows than the last, so that the rows' outgoing memory is exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(400, 16)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        wide = torch.cat([x * (i + 1) for i in range(self.calls**2)], dim=1)
        return super().forward(self.table(wide.abs().mul(50).long() % 400).sum(1))


class SwapsThenPredicts(Module):
    """The host block of one layer takes new memory, because the other's parameter has the old."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int) -> None:
        net: Any = self.net
        a, b = net.blocks[0].inner.weight, net.blocks[2].inner.weight
        a.data, b.data = b.data, a.data


class Fails(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx:
            self.net.blocks[2].inner.weight.register_hook(self.fail)
        return loss

    def fail(self, gradient: Tensor) -> None:
        raise KeyError("in backward")


def predicted(make: Callable[[], pl.LightningModule], **options: Any) -> None:
    pl.seed_everything(7, verbose=False)
    trainer_for(superpipeline(k=1, **options)).predict(make(), loader(vectors()), return_predictions=False)


def fails() -> None:
    with pytest.raises(KeyError):
        fit(lambda: Fails(Stack()), vectors(), superpipeline(k=1), recorded="losses")


ENDS: dict[str, Callable[[], Any]] = {
    "training": lambda: fit(CASES["vit"].make, CASES["vit"].batches(), superpipeline(k=1)),
    "offload": lambda: fit(lambda: Module(Stack()), vectors(), superpipeline(k=1, activations="offload")),
    "mixed precision": lambda: fit(lambda: Module(Stack()), vectors(), superpipeline(k=1), precision="bf16-mixed"),
    "residents": lambda: predicted(lambda: Module(Stack()), keep_on_gpu=["net"]),
    "rows of a table": lambda: predicted(lambda: Module(Lookup()), keep_on_gpu=["net.stem", "net.blocks", "net.head"]),
    "exchanged weights": lambda: predicted(lambda: SwapsThenPredicts(Stack())),
    "failure": fails,
}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("end", ENDS)
def test_a_run_gives_every_lock_back_after_the_last_copy(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sp_lightning.capabilities.activations.offload.WORTH_MOVING", 1)
    with simulated() as made:
        ENDS[end]()
    assert made[0].pinned == set()


@pytest.mark.parametrize("end", ["residents", "rows of a table"])
def test_the_wait_for_it_is_needed(end: str) -> None:
    """In other runs, the host has waited for every transfer by then, for another reason."""
    if end == "rows of a table":
        needs("capabilities.experts")
    with pytest.raises(Race, match="unpinned by host"), simulated(Wait.UNPIN_AFTER_COPY):
        ENDS[end]()
