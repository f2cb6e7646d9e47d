"""The optimizer's state on a disk is read before an update asks for it, and nothing in vain."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from sp_lightning.capabilities.disk import tier as disk_tier
from sp_lightning.capabilities.disk.direct_file import ScratchFile
from sp_lightning.capabilities.disk.state_on_disk import StateOnDisk
from sp_lightning.capabilities.disk.state_placement import StatePlacement
from sp_lightning.capabilities.disk.state_transfers import StateTransfers
from sp_lightning.core.device.device import Device
from tests.support.engine import streamed
from tests.support.models import Module, Stack, vectors
from tests.support.on_disk import Unfreezes, on_disk, without_room
from tests.support.runs import assert_same, fit, fused
from tests.support.tiers import first


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    without_room(monkeypatch)


def make() -> Module:
    module = Module(Stack())
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=1e-2)  # type: ignore[method-assign]
    return module


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[StateOnDisk]:
    """The optimizers' state of every run, to look at afterwards."""
    made: list[StateOnDisk] = []

    def noted(*arguments: Any) -> StateOnDisk:
        made.append(StateOnDisk(*arguments))
        return made[-1]

    monkeypatch.setattr(disk_tier, "StateOnDisk", noted)
    return made


def nbytes_of(state: StateOnDisk) -> int:
    """All bytes of an optimizer's state on the disk."""
    return sum(stored.extent.nbytes for stored in state._stored.values())


@pytest.mark.long("takes a second or more")
def test_the_ledger_s_traffic_is_that_of_the_steps_after_the_first(tmp_path: Path, states: list[StateOnDisk]) -> None:
    """There is no state to be read in the first step. What the next step needs first may have been read ahead."""
    moved = []

    class Notes(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            moved.append(trainer.strategy.ledger.disk_traffic)

    fit(make, vectors(6), on_disk(tmp_path), callbacks=[Notes()], recorded="nothing")
    whole, ahead = nbytes_of(states[-1]), states[-1]._transfers.limit
    assert ahead < whole
    for steps, each in enumerate(moved):
        assert 0 <= steps * each - steps * 2 * whole <= ahead


@pytest.mark.rest("takes tenths of a second")
def test_nothing_is_read_in_vain(tmp_path: Path, states: list[StateOnDisk]) -> None:
    """Each step reads and writes each layer's state once."""
    fit(make, vectors(), on_disk(tmp_path), recorded="nothing")
    state, steps = states[-1], len(vectors())
    whole = nbytes_of(state)
    assert state._transfers.file.written_bytes == whole * steps
    assert (
        whole * (steps - 1) <= state._transfers.file.read_bytes <= whole * steps
    )  # and what was read ahead for a next step


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("overlap", first(["off", "forward", "backward"], "forward", why="its other modes"))
def test_the_first_step_reads_nothing(overlap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no state yet; what was read ahead would take the memory in which the optimizer makes it."""
    read, asked, steps = ScratchFile.begin_read, list[int](), list[int]()

    def noted(self: Any, offset: int, memory: Any) -> Any:
        asked.append(memory.nbytes)
        return read(self, offset, memory)

    monkeypatch.setattr(ScratchFile, "begin_read", noted)

    class Counts(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            steps.append(len(asked))

    fit(
        make if overlap == "off" else fused(make),
        vectors(4),
        on_disk(tmp_path, optimizer_overlap=overlap),
        recorded="nothing",
        callbacks=[Counts()],
    )
    assert steps[:2] == [0, 0]
    assert steps[-1] > 0


def deep() -> Module:
    """Layers of one size, more than the ring has memory for, with an optimizer that asks for them in backward."""
    module = Module(nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(8))))
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), fused=True)  # type: ignore[method-assign]
    return module


def slow(call: Callable[..., int], seconds: float) -> Callable[..., int]:
    """A call of the system that takes so much longer."""

    def slowly(*arguments: Any) -> int:
        time.sleep(seconds)
        return call(*arguments)

    return slowly


class Waits(Callback):
    """Counts the layers that were read ahead when a batch begins, once nothing is on its way any more."""

    def __init__(self, states: list[StateOnDisk], least: int) -> None:
        self.states = states
        self.least = least
        self.counts: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        until = time.monotonic() + 2 * (len(self.counts) > 1)  # nothing is read in the first step
        while self.ahead < self.least and time.monotonic() < until:
            time.sleep(0.001)
        self.counts.append(self.ahead)

    @property
    def ahead(self) -> int:
        return sum(len(each._transfers.ahead) for each in set(self.states) if each is not None)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("overlap", first(["off", "backward"], "backward", why="without updates in the background"))
def test_the_ring_is_full_when_a_batch_begins(
    overlap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: list[StateOnDisk]
) -> None:
    """Although nothing asks for state once the last layer is updated: as soon as it is written, its memory is read into."""
    monkeypatch.setattr(os, "pwritev", slow(os.pwritev, 0.02))
    waits = Waits(states, 3)
    batches = list(torch.randn(4, 2, 32))
    ours = fit(deep, batches, on_disk(tmp_path, optimizer_overlap=overlap), callbacks=[waits], recorded="losses")
    assert waits.counts[2:] == [3, 3]
    assert states[-1]._transfers.peak_bytes <= states[-1]._transfers.limit
    assert_same(ours, fit(deep, batches, recorded="losses"))


class Alternates(Module):
    """Two optimizers with a half of the layers each, which step in turn."""

    def __init__(self) -> None:
        super().__init__(deep().net)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        halves = list(self.net.parameters())[:8], list(self.net.parameters())[8:]
        return [torch.optim.AdamW(half, fused=True) for half in halves]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()


@pytest.mark.rest("takes tenths of a second")
def test_the_ring_is_full_with_two_optimizers_as_with_one(tmp_path: Path, states: list[StateOnDisk]) -> None:
    waits = Waits(states, 3)
    batches = list(torch.randn(5, 2, 32))
    ours = fit(Alternates, batches, on_disk(tmp_path), callbacks=[waits])
    assert waits.counts[2:] == [3, 3, 3]
    assert states[-1]._transfers.peak_bytes <= states[-1]._transfers.limit
    assert_same(ours, fit(Alternates, batches))


class Skips(Module):
    """Uses its layers in an order of each batch's own, and not all of them."""

    def __init__(self) -> None:
        super().__init__(deep().net)
        self.batches = 0

    def loss(self, batch: Any) -> Any:
        self.batches += 1
        order = torch.randperm(8, generator=torch.Generator().manual_seed(self.batches))
        for index in order[: 3 + self.batches % 6].tolist():
            batch = self.net[index](batch)  # type: ignore[index]
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("overlap", first(["off", "forward", "backward"], "forward", why="its other modes"))
def test_layers_that_come_in_another_order(overlap: Any, tmp_path: Path, states: list[StateOnDisk]) -> None:
    batches = list(torch.randn(12, 2, 32))
    ours = fit(Skips, batches, on_disk(tmp_path, optimizer_overlap=overlap), recorded="losses")
    assert_same(ours, fit(Skips, batches, recorded="losses"))
    assert states[-1]._transfers.peak_bytes <= states[-1]._transfers.limit


@pytest.mark.long("takes a second or more")
def test_a_process_forks_while_bytes_are_on_their_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: list[StateOnDisk]
) -> None:
    """The pages that the disk reads and writes are shared ones, of which a fork makes no copies."""
    monkeypatch.setattr(os, "preadv", slow(os.preadv, 0.005))
    monkeypatch.setattr(os, "pwritev", slow(os.pwritev, 0.005))
    under_way: list[int] = []

    class Forks(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            if not (child := os.fork()):
                transfers = [each.transfer for each in (*states[-1]._transfers.ahead, *states[-1]._transfers.behind)]
                os._exit(sum(each is not None and not each.done for each in transfers))
            under_way.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    batches = list(torch.randn(6, 2, 32))
    ours = fit(deep, batches, on_disk(tmp_path), callbacks=[Forks()])
    assert any(under_way)
    assert_same(ours, fit(deep, batches))


class Exchanges(Callback):
    """Gives each layer averages of its own and of the next two layers."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        states = [state for state in trainer.optimizers[0].state.values() if state["exp_avg"].dim() > 1]
        moments = [(state["exp_avg"], state["exp_avg_sq"]) for state in states]
        for index, state in enumerate(states):
            state["exp_avg"] = moments[index - 1][0]
            state["exp_avg_sq"] = moments[index - 2][1]


@pytest.mark.long("takes a second or more")
def test_an_update_that_needs_more_than_the_ring_has_gets_it_and_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: list[StateOnDisk]
) -> None:
    """Users have exchanged tensors, so that a layer's state is in three places; the ring has memory for two."""
    monkeypatch.setattr(
        disk_tier, "place_state", lambda sizes, *_: StatePlacement({}, sizes, room := 2 * max(sizes.values()), room)
    )
    batches = list(torch.randn(5, 2, 32))
    ours = fit(deep, batches, on_disk(tmp_path), callbacks=[Exchanges()], recorded="losses")
    ring = states[-1]._transfers
    assert ring.peak_bytes > ring.limit
    assert ring.nbytes <= ring.limit
    assert_same(ours, fit(deep, batches, callbacks=[Exchanges()], recorded="losses"))


class Meanwhile(Callback):
    """Does something in another thread, again and again, while a model trains."""

    def __init__(self, does: Callable[[Any], None]) -> None:
        self.does = does
        self.count = 0
        self.errors: list[Exception] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run, args=(trainer,), daemon=True)
        self.thread.start()

    def run(self, trainer: Any) -> None:
        try:
            while not self.over.is_set():
                self.does(trainer)
                self.count += 1
        except Exception as error:
            self.errors.append(error)

    def on_train_end(self, *_: Any) -> None:
        self.over.set()
        self.thread.join()


def forks(_: Any) -> None:
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)


def reads(trainer: Any) -> None:
    for state in list(trainer.optimizers[0].state.values()):
        for value in list(state.values()):
            value.sum()


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("make", first([deep, Alternates], deep, why="with two optimizers"))
@pytest.mark.parametrize("does", [forks, reads])
def test_another_thread_forks_or_reads_state_while_layers_are_updated(
    does: Any, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", slow(os.preadv, 0.002))
    monkeypatch.setattr(os, "pwritev", slow(os.pwritev, 0.002))
    meanwhile, batches = Meanwhile(does), list(torch.randn(10, 2, 32))
    ours = fit(make, batches, on_disk(tmp_path, optimizer_overlap="forward"), callbacks=[meanwhile], recorded="losses")
    assert not meanwhile.errors
    assert meanwhile.count
    assert_same(ours, fit(make, batches, recorded="losses"))


def test_no_update_begins_while_somebody_looks() -> None:
    begun: list[None] = []
    with streamed(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Device(torch.device("cpu")), k=1, k_prime=1
    ) as streamer:
        updates, layer = streamer.updates, next(iter(streamer.updating.order()))
        updates.submit(layer, partial(time.sleep, 0.05))
        with updates.still():
            assert layer.update is None
        submits = threading.Thread(target=updates.submit, args=(layer, partial(begun.append, None)))
        with updates.still():
            submits.start()
            submits.join(0.1)
            assert submits.is_alive()
            assert not begun
        submits.join()
        updates.finish()
    assert begun


class Some(Module):
    """Two layers are in no forward, and so have no state."""

    def __init__(self) -> None:
        super().__init__(deep().net)

    def loss(self, batch: Any) -> Any:
        for index in (0, 1, 2, 4, 5, 7):
            batch = self.net[index](batch)  # type: ignore[index]
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


class Half(Module):
    """Every second layer has no momentum."""

    def __init__(self) -> None:
        super().__init__(deep().net)

    def configure_optimizers(self) -> Any:
        halves: tuple[list[Any], list[Any]] = ([], [])
        for index, parameter in enumerate(self.parameters()):
            halves[index // 2 % 2].append(parameter)  # a weight and a bias for each layer
        groups = [{"params": half, "momentum": momentum} for half, momentum in zip(halves, (0.9, 0.0), strict=True)]
        return torch.optim.SGD(groups, lr=0.1, fused=True)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("make", first([Some, Half], Some, why="another reason not to have state"))
def test_layers_without_state_have_nobody_read_in_vain(make: Any, tmp_path: Path, states: list[StateOnDisk]) -> None:
    read = []

    class Notes(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            read.append(states[-1]._transfers.file.read_bytes)

    fit(make, list(torch.randn(8, 2, 32)), on_disk(tmp_path), callbacks=[Notes()], recorded="nothing")
    whole, ahead = nbytes_of(states[-1]), states[-1]._transfers.limit
    assert all(steps * whole <= each <= steps * whole + ahead for steps, each in enumerate(read))


class Six(Alternates):
    """So many optimizers that the ring has memory for the layers of three."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(block.parameters(), fused=True) for block in list(self.net)[:6]]  # type: ignore[call-overload]


@pytest.mark.rest("takes tenths of a second")
def test_the_ring_s_limit_is_that_of_all_optimizers(tmp_path: Path, states: list[StateOnDisk]) -> None:
    batches = list(torch.randn(5, 2, 32))
    ours = fit(Six, batches, on_disk(tmp_path), recorded="losses")
    assert states[-1]._transfers.peak_bytes <= states[-1]._transfers.limit
    assert_same(ours, fit(Six, batches, recorded="losses"))


class Scaled(Module):
    """A number beside the layers is trained, too. It is a resident, and its state stays in memory."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.scale = nn.Parameter(torch.ones(1))

    def loss(self, batch: Any) -> Any:
        return super().loss(batch * self.scale)


@pytest.mark.long("takes a second or more")
def test_new_state_finds_the_memory_of_the_ring_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: list[StateOnDisk]
) -> None:
    """In the first step, and when layers are unfrozen. Layers whose state is small have it in memory, and need no room."""
    makes_room, made = StateTransfers.make_room, list[tuple[int, int]]()
    steps = iter(range(100))

    def noted(self: Any) -> None:
        makes_room(self)
        made.append((step.now, self.nbytes))

    class Step(Unfreezes):
        now = -1

        def on_train_batch_start(self, *_: Any) -> None:
            self.now = next(steps)

    step = Step()
    monkeypatch.setattr(StateTransfers, "make_room", noted)
    ours = fit(Scaled, vectors(), on_disk(tmp_path), callbacks=[step], max_epochs=2)
    assert {now for now, _ in made} == {0, len(vectors())}
    assert {nbytes for _, nbytes in made} == {0}
    steps = iter(range(100))
    assert_same(ours, fit(Scaled, vectors(), callbacks=[Step()], max_epochs=2))


# ---------------------------------------------------------------------- the buffers


def transfers(limit: int) -> StateTransfers:
    nothing: Any = None
    return StateTransfers(nothing, limit, tuple)


def test_buffers_take_no_more_than_their_limit() -> None:
    ring = transfers(4 * 4096)
    first, second = ring.lend(2 * 4096), ring.lend(5000)
    assert first is not None
    assert second is not None
    assert ring.lend(1) is None
    ring.give_back(first)
    assert ring.lend(2 * 4096) is first
    ring.give_back(first)
    third = ring.lend(4096)  # of another size, for which the idle one goes
    assert third is not None
    assert ring.nbytes == 3 * 4096
    assert ring.peak_bytes == 4 * 4096


def test_one_buffer_may_be_larger_than_the_limit() -> None:
    ring = transfers(4096)
    assert ring.lend(3 * 4096) is not None
    assert ring.lend(1) is None


def test_what_was_lent_beyond_the_limit_is_freed() -> None:
    ring = transfers(2 * 4096)
    buffers = [ring.lend(4096), ring.lend(4096), ring.lend_more(4096)]
    assert ring.nbytes == ring.peak_bytes == 3 * 4096
    for buffer in buffers:
        assert buffer is not None
        ring.give_back(buffer)
    assert ring.nbytes == 2 * 4096
    ring.make_room()
    assert ring.nbytes == 0
