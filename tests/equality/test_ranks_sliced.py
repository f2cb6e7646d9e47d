"""Layers that come from the host in slices, and from device to device: weights, gradients and predictions stay what they are."""

from __future__ import annotations

import logging
from time import sleep
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from sp_lightning import SuperpipelineStrategy
from sp_lightning.device.device import Device
from sp_lightning.observe import messages
from sp_lightning.ranks import gather_log, sliced_uploads, transfer
from sp_lightning.ranks.ranks import Ranks
from tests.equality.on_ranks import TRAINED, compare, reference
from tests.support.models import Module
from tests.support.ranks import in_ranks, rank
from tests.support.runs import fit, trainer_for
from tests.support.tiers import some

MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alone": ({"k": 1}, {}),
    "under forward": (
        {"k": 2, "k_prime": 2, "optimizer_overlap": "forward"},
        {"precision": "bf16-mixed", "gradient_clip_val": 0.3, "accumulate_grad_batches": 2},
    ),
    "in backward": ({"k": 1, "optimizer_overlap": "backward"}, {}),
    "scaled": ({"k": 1, "activations": "recompute"}, {"precision": "16-mixed", "gradient_clip_val": 0.1}),
}
FEW = ("vit", "conditional", "gan", "rows/written", "clamped-in-forward", "lbfgs")


@pytest.mark.rest("the first tier has random paths, and what is gathered")
@pytest.mark.parametrize("name", some(TRAINED, *FEW, why="some of each kind are in the second tier"))
def test_two_ranks_are_lightnings_ddp(name: str) -> None:
    compare(name, 2, {"k": 1, "transfer": "sharded"}, reference=reference(name, 2))


@pytest.mark.rest("the first tier has random paths, and what is gathered")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", some(["llama-dropout", "conditional", "experts/mixture"], "llama-dropout", why="as one")
)
def test_modes(name: str, mode: str) -> None:
    strategy, options = MODES[mode]
    compare(name, 2, {**strategy, "transfer": "sharded"}, options, reference(name, 2))


@pytest.mark.rest("the same on simulated devices")
@pytest.mark.parametrize("mode", some(MODES, "alone", "under forward", why="two show the order of streams"))
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_devices_of_their_own(size: int, mode: str) -> None:
    strategy, options = MODES[mode]
    compare(
        "llama-dropout", size, {**strategy, "transfer": "sharded"}, options, reference("vit", size), on_devices=True
    )


@pytest.mark.rest("four processes")
@pytest.mark.parametrize("name", some(["vit", "conditional", "t5"], "conditional", why="one shows it"))
def test_nodes(name: str) -> None:
    compare(name, (2, 2), {"k": 1, "transfer": "sharded"}, reference=reference(name, (2, 2)))


# ---------------------------------------------------------------------- what is gathered


class Wide(Module):
    """Layers of more bytes than what their parts are aligned to."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))))


class Parts(Wide):
    """Rank 1 leaves out a layer in every other batch, behind a collective of the user's own."""

    def training_step(self, batch: Any, index: int) -> Any:
        x = batch
        layers: Any = self.net
        for number, layer in enumerate(layers):
            if number == 2:
                dist.all_reduce(torch.ones(1))
            if not (number == 2 and rank() == 1 and index % 2):
                x = layer(x)
        return x.square().mean()


def train(kind: type[Module], transfer: str) -> tuple[dict[str, Any], int, int]:
    torch.manual_seed(1)
    strategy = SuperpipelineStrategy(k=1, transfer=transfer, fused_optimizer=False)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:  # the process stays for the next test
        patch.setattr(gather_log, "PATIENCE", 2.0)  # on a busy machine ranks come late to what they agree on
        outcome = fit(kind, list(torch.randn(8, 2, 32)), strategy, devices=2)
    stats = strategy.stats()
    return outcome.state, stats.gathered_bytes, stats.fetched_bytes


def test_half_of_each_layer_comes_from_the_other_device() -> None:
    whole, sliced = (in_ranks(2, train, Wide, transfer) for transfer in ("full", "sharded"))
    for (state, gathered, fetched), (plain, nothing, before) in zip(sliced, whole, strict=True):
        assert all(torch.equal(state[name], value) for name, value in plain.items())
        assert nothing == 0
        assert fetched == before
        assert 0.3 * fetched < gathered < 0.5 * fetched  # the head is in another ring


def train_without_hooks() -> int:
    strategy = SuperpipelineStrategy(k=1, transfer="sharded")
    with pytest.MonkeyPatch.context() as patch:  # the process stays for the next test
        if rank() == 0:
            patch.setattr(sliced_uploads, "CHECK_SECONDS", 1000.0)  # no thread issues what the engine does not come by
        trainer_for(strategy, devices=2).fit(Wide(), DataLoader(list(torch.randn(16, 32)), 2))
    return strategy.stats().gathered_bytes


def test_ranks_count_alike_what_came_for_a_step_that_does_not() -> None:
    first, second = in_ranks(2, train_without_hooks)
    assert first == second > 0


def test_ranks_that_part_in_a_batch_agree_in_the_next() -> None:
    whole, sliced = (in_ranks(2, train, Parts, transfer) for transfer in ("full", "sharded"))
    for (state, gathered, fetched), (plain, _, _) in zip(sliced, whole, strict=True):
        assert all(torch.equal(state[name], value) for name, value in plain.items())
        assert gathered > 0.1 * fetched


# ---------------------------------------------------------------------- predictions


class Uneven(IterableDataset[Any]):
    """Rank 1 has more batches, and takes longer for each."""

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        for _ in range(3 + 4 * rank()):
            sleep(0.05 * rank())
            yield torch.randn(2, 32, generator=generator)


def predict(transfer: str) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(3)
    strategy = SuperpipelineStrategy(k=1, transfer=transfer)  # type: ignore[arg-type]
    made = trainer_for(strategy, devices=2)
    outputs: Any = made.predict(Wide(), DataLoader(Uneven(), batch_size=None))
    return outputs, strategy.stats().gathered_bytes


def test_predictions_of_uneven_length() -> None:
    whole, sliced = (in_ranks(2, predict, transfer) for transfer in ("full", "sharded"))
    for number, ((outputs, gathered), (plain, _)) in enumerate(zip(sliced, whole, strict=True)):
        assert len(outputs) == 3 + 4 * number
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(outputs, plain, strict=True))
        assert gathered > 0


# ---------------------------------------------------------------------- which is faster


def measured() -> tuple[float, float, bool]:
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=rank(), world_size=2)
    ranks = Ranks(torch.device("cpu"))
    device = Device(torch.device("cpu"))
    log = logging.getLogger()
    return *transfer.measure_uploads(device, ranks, 1 << 20), transfer.takes_slices(
        "auto", device, ranks, log, trains=False
    )


def test_what_is_faster_is_measured() -> None:
    for whole, sliced, faster in in_ranks(2, measured):
        assert whole > 0
        assert sliced > 0
        assert not faster  # on a CPU nothing is uploaded


class UploadsFaster(Device):
    """An accelerator as far as the choice goes."""

    computes_on_host = False


def chosen() -> tuple[bool, bool]:
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=rank(), world_size=2)
    ranks, log = Ranks(torch.device("cpu")), logging.getLogger()
    device = UploadsFaster(torch.device("cpu"))
    with mock.patch.object(transfer, "measure_uploads", return_value=(2.0, 1.0)):
        training, prediction = (
            transfer.takes_slices("auto", device, ranks, log, trains=trains) for trains in (True, False)
        )
    return training, prediction


def test_auto_takes_no_slices_in_training() -> None:
    """Sums of gradients run beside them there, in another process group, and no order of the two is promised by NCCL."""
    assert in_ranks(2, chosen) == [(False, True)] * 2


def test_another_transfer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"transfer must be one of .*, found 'half'"):
        SuperpipelineStrategy(transfer="half")  # type: ignore[arg-type]


def test_slices_of_one_device_are_said_to_change_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(messages, "_SAID", set())
    caplog.set_level(logging.INFO, "lightning.pytorch")
    fit(Wide, list(torch.randn(2, 2, 32)), SuperpipelineStrategy(k=1, transfer="sharded"))
    assert caplog.text.count('transfer="sharded" changes nothing') == 1
