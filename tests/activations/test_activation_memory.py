"""Activations take as much memory as the formula says, on the device and on the host."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.capabilities.activations import offload
from sp_lightning.capabilities.activations.calls import UnitModes
from sp_lightning.capabilities.activations.offload import Offload
from sp_lightning.capabilities.activations.policy import Call, peak_bytes
from sp_lightning.capabilities.activations.recompute import Recompute
from sp_lightning.core.device.layout import PAGE
from tests.support.models import CASES, Module, Stack, twice, vectors
from tests.support.runs import Outcome, assert_same, fit, superpipeline
from tests.support.saving import MODES, Saves, rows, saving
from tests.support.simdevice import SimDevice, simulated
from tests.support.tiers import first

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")


def train_saving(counts: Sequence[int], mode: Any) -> tuple[Outcome, SimDevice]:
    """Blocks are named as layers: two blocks alone are networks of an ensemble, which are divided into their parts."""
    strategy = superpipeline(k=2, k_prime=1, layers=["net.blocks.*"], activations=mode)
    with simulated(capacity=2**40) as devices:
        ours = fit(lambda: saving(counts), rows(), strategy)
    return ours, devices[0]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "counts",
    first(
        [[1] * 8, [3, 1, 2, 1, 3, 3, 1, 2], [1, 1, 1, 1, 1, 5, 1, 1], [2, 1]],
        [2, 1],
        why="the formula with more layers",
    ),
    ids=str,
)
def test_peak_memory_is_that_of_the_formula(
    counts: list[int], seen: list[UnitModes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In units of what is saved, exactly; weights and everything else take less than half of one here."""
    monkeypatch.setattr(offload, "WORTH_MOVING", Saves.SIZE)
    mixed: dict[str, Any] = {"net.blocks.0": "offload", "net.blocks.1": "recompute", "net.blocks.5": "offload"}
    later: dict[str, Any] = {f"net.blocks.{index}": "offload" for index in (2, 3, 6)}
    choices = ["offload", "keep", "recompute"] + ([mixed, {**later, "**": "recompute"}] if len(counts) == 8 else [])
    reference = fit(lambda: saving(counts), rows())
    calls: tuple[Call, ...] = ()
    for choice in choices:
        ours, device = train_saving(counts, choice)
        assert_same(ours, reference)
        calls = calls or seen[-1].calls
        assert [call.saved for call in calls] == [count * Saves.SIZE for count in counts]
        predicted = peak_bytes(calls, seen[-1].modes)
        assert predicted <= device.peak < predicted + Saves.SIZE / 2, choice


@pytest.mark.long("takes a second or more")
def test_the_savings_are_what_the_method_promises(seen: list[UnitModes]) -> None:
    """More than 60 % below keeping, in both ways."""
    peaks = {mode: train_saving([1] * 8, mode)[1].peak for mode in ("keep", *MODES)}
    assert max(peaks[mode] for mode in MODES) < 0.4 * peaks["keep"]


def handwritten() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Tanh())


class Handwritten(nn.Module):
    """Its blocks have no class of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(handwritten() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def peak_of(make: Any, mode: Any, **options: Any) -> int:
    """Of many rows, so that activations outweigh weights; and the results are plain Lightning's."""
    batches = [torch.randn(2048, 16, generator=torch.Generator().manual_seed(1))] * 2
    with simulated(capacity=2**40) as devices:
        ours = fit(make, batches, superpipeline(k=1, k_prime=1, activations=mode, **options))
    assert_same(ours, fit(make, batches))
    return devices[0].peak


@pytest.mark.long("takes a second or more")
def test_blocks_that_are_sequences_of_bare_modules_are_recomputed() -> None:
    """A block saves 160 numbers of a row, of which 16 are its input: one block, the inputs and gradients are left of 8."""
    peaks = {mode: peak_of(lambda: Module(Handwritten()), mode) for mode in ("keep", "recompute")}
    assert peaks["recompute"] < 0.35 * peaks["keep"]


def flat() -> Module:
    return Module(nn.Sequential(*(each for _ in range(8) for each in handwritten())))


@pytest.mark.long("takes a second or more")
def test_what_is_to_be_grouped_is_said_and_helps(caplog: pytest.LogCaptureFixture) -> None:
    """Where no layer has parts, recomputing them frees nothing."""
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        kept, again = (peak_of(flat, mode) for mode in ("keep", "recompute"))
    assert again > 0.95 * kept
    (said,) = [record.getMessage() for record in caplog.records if "bare modules" in record.getMessage()]
    assert "name the groups in layers=" in said

    def grouped() -> Module:
        model = flat()
        model.net = nn.Sequential(*(model.net[i : i + 8] for i in range(0, 32, 8)))
        return model

    assert peak_of(grouped, "recompute", layers=["net.*"]) < 0.45 * kept


class Views(nn.Module):
    """Saves one storage four times: whole, a part, turned, and again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        first, second = y[:, :8], y[:, 8:]
        return x + torch.cat([first * second, y.t()[:8].t() * second], dim=1) * y


@pytest.mark.rest("takes tenths of a second")
def test_views_and_duplicates_of_one_storage_travel_once(
    seen: list[UnitModes], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = fit(twice(Views), vectors(1), superpipeline(activations="offload"))
    assert_same(ours, fit(twice(Views), vectors(1)))
    x, y = 4 * 16 * 4, 4 * 16 * 4
    of_blocks = [call.saved for call in seen[0].calls if "blocks" in call.unit]
    assert all(saved <= x + 2 * y + y for saved in of_blocks)  # x, y, and the product's two factors
    assert seen[0].offload.stats.offloaded_activation_bytes == sum(call.saved for call in seen[0].calls[:-2])
    assert seen[0].offload.stats.uploaded_activation_bytes == seen[0].offload.stats.offloaded_activation_bytes


@pytest.mark.rest("takes tenths of a second")
def test_small_tensors_buffers_and_residents_stay(seen: list[UnitModes], monkeypatch: pytest.MonkeyPatch) -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)
            self.register_buffer("table", torch.randn(4, 16))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.table

    monkeypatch.setattr(offload, "WORTH_MOVING", 4 * 16 * 4)  # vectors() is as large as that
    fit(twice(Buffered), vectors(1), superpipeline(activations="offload"))
    assert {call.saved for call in seen[0].calls if "blocks" in call.unit} == {4 * 16 * 4}, "x, and not the table"
    monkeypatch.setattr(offload, "WORTH_MOVING", 4 * 16 * 4 + 1)
    fit(twice(Buffered), vectors(1), superpipeline(activations="offload"))
    assert seen[1].offload.stats.offloaded_activation_bytes == 0


@pytest.mark.rest("takes tenths of a second")
def test_the_last_units_of_a_forward_are_exempt(seen: list[UnitModes]) -> None:
    fit(lambda: Module(Stack()), vectors(), superpipeline(activations="offload"))
    calls = seen[0].calls
    assert [call.unit for call in calls][-2:] == ["net.blocks.4", "net.head"]
    assert seen[0].offload.stats.offloaded_activation_bytes == 3 * sum(call.saved for call in calls[:-2])


@pytest.mark.long("takes a second or more")
def test_nothing_comes_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unit's saved tensors are on their way before backward comes to it."""
    pre_backward, seen = Offload.pre_backward, 0

    def noted(self: Offload, call: Any) -> None:
        nonlocal seen
        storages = call.needed()
        assert all(each.returned is not None or each.source is not None for each in storages), call.unit
        seen += len(storages)
        pre_backward(self, call)

    monkeypatch.setattr(Offload, "pre_backward", noted)
    case = CASES["llama-dropout"]
    fit(case.make, case.batches(), superpipeline(activations="offload"))
    assert seen > 10


# ---------------------------------------------------------------------- the host's memory


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(SuperpipelineStrategy.log, "warning", lambda text, *values: messages.append(text % values))
    return messages


@pytest.mark.parametrize("room", [0, 3 * Saves.SIZE])
def test_a_host_without_room_keeps_the_rest(
    room: int, said: list[str], seen: list[UnitModes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No forward runs twice, because the user has not asked for it."""
    monkeypatch.setattr(offload, "WORTH_MOVING", Saves.SIZE)
    monkeypatch.setattr("sp_lightning.trainer.run.check_host", lambda *_: room)
    counts: list[int] = [1] * 8
    monkeypatch.setattr(Recompute, "run", lambda *_: pytest.fail("a forward runs twice"))
    ours, _ = train_saving(counts, "offload")
    assert_same(ours, fit(lambda: saving(counts), rows()))
    assert seen[0].ring.peak_bytes <= room
    assert len([each for each in said if "the CPU has no room for the activations of 'net.blocks." in each]) == 1


@pytest.mark.rest("takes tenths of a second")
def test_the_ring_is_used_again_and_given_back(seen: list[UnitModes]) -> None:
    """Batch after batch in the same memory, whatever their sizes."""
    batches = [torch.randn(size, 16) for size in (4, 4, 3, 4, 2, 4, 4)]
    fit(lambda: Module(Stack()), batches, superpipeline(activations="offload"))
    (activations,) = seen
    pages = sum(-(-call.saved // PAGE) * 4 for call in activations.calls[:-2])  # a unit saves at most four
    assert activations.ring.peak_bytes <= pages * PAGE
    assert not activations.ring._idle
    assert not activations.ring._returned


class Masked(Module):
    """Multiplies by a buffer, which autograd saves. ``exchanges``: before each batch it is another tensor of the same values."""

    def __init__(self, *, exchanges: bool) -> None:
        super().__init__(Stack())
        self.exchanges, self.others = exchanges, []  # type: ignore[var-annotated]
        self.net.blocks[1].register_buffer("mask", torch.full((4, 16), 2.0))
        forward = self.net.blocks[1].forward
        self.net.blocks[1].forward = lambda x: forward(x) * self.net.blocks[1].mask

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.exchanges:
            self.others.append(self.net.blocks[1].mask)
            self.net.blocks[1].mask = self.net.blocks[1].mask.clone()


@pytest.mark.rest("takes tenths of a second")
def test_a_buffer_that_was_exchanged_stays_as_the_first_one_did() -> None:
    """Buffers were known by the addresses that they had at first: a new one left with the activations, and an activation in
    the memory of an old one stayed."""
    stored = []
    for exchanges in (False, True):
        ours = fit(
            partial(Masked, exchanges=exchanges), vectors(), superpipeline(k=2, k_prime=1, activations="offload")
        )
        stored.append(ours.trainer.strategy.stats().offloaded_activation_bytes)
    assert stored[0] == stored[1] > 0
