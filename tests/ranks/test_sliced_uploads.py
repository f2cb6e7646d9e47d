"""Sliced uploads along random paths, at random speeds: nobody waits for ever, and nobody gets another weight.

The ranks are threads of one process. Their gathers are done here, and matched as a process group matches them, by their order
alone: what one rank gathers is mixed with whatever the others gather as their next.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from random import Random
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sp_lightning.ranks.rank_status import LOST, RankError
from torch import Tensor

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.device.layout import whole_pages
from sp_lightning.device.lease import Lease
from sp_lightning.device.pages import create
from sp_lightning.engine.placement import Placement
from sp_lightning.layers.layer import Slot
from sp_lightning.layers.slots import Slots
from sp_lightning.layers.uploads import Uploads
from sp_lightning.ranks import gather_log, sliced_uploads
from sp_lightning.ranks.gather_log import gather_log_bytes
from sp_lightning.ranks.shared_memory import SharedMemory
from sp_lightning.ranks.sliced_uploads import PendingGather, SlicedUploads
from tests.equality.cases import CASES
from tests.support.runs import assert_same, fit, fused, superpipeline
from tests.support.simdevice import poison
from tests.support.tiers import first

SECONDS = 20.0
"""After which a wait counts as endless."""

LAYERS, NBYTES = 8, 5000
"""How many there are, and bytes of each: no multiple of what its parts are aligned to."""


class Hang(AssertionError):
    """Somebody has waited for too long."""


class Together:
    """What the ranks of one node have in common."""

    def __init__(self, size: int) -> None:
        self.size = size
        nbytes = whole_pages(gather_log_bytes(size))
        descriptor = create(nbytes, "status")
        self.memories = [SharedMemory(descriptor, nbytes) for _ in range(size)]
        os.close(descriptor)
        self.barrier = threading.Barrier(size, timeout=SECONDS)
        self.sent: list[dict[int, Tensor]] = []  # of each gather, what the ranks have
        self.lock = threading.Lock()


class FakeStatus:
    """What a rank waits at, without anything else to do meanwhile."""

    def __init__(self, rank: int, together: Together) -> None:
        self.rank, self.together = rank, together

    def wait_until(self, reached: Callable[[], bool], why: Any) -> None:
        began = monotonic()
        while not reached():
            if monotonic() - began > SECONDS or self.together.barrier.broken:
                raise Hang(f"rank {self.rank} waits for {why}")
            sleep(1e-4)


class FakeRanks:
    """One rank, as :class:`SlicedUploads` sees it."""

    def __init__(self, rank: int, together: Together) -> None:
        self.rank, self.size = rank, together.size
        self.together, self.status = together, FakeStatus(rank, together)
        self.sums = self.gathers = 0
        self.meanwhile: Callable[[], None] = lambda: None
        self.uploads = None

    def share(self, nbytes: int, name: str) -> SharedMemory:
        return self.together.memories[self.rank]

    def until(self, reached: Callable[[], bool], why: Any) -> None:
        def look() -> bool:
            if reached():
                return True
            self.meanwhile()
            return False

        self.meanwhile()
        self.status.wait_until(look, why)

    def gather(self, everybody: Tensor, group: Any, what: str) -> None:
        together, number = self.together, self.gathers
        self.gathers += 1
        with together.lock:
            if len(together.sent) == number:
                together.sent.append({})
            sent = together.sent[number]
            sent[self.rank] = everybody.chunk(self.size)[self.rank].clone()
        self.until(lambda: len(sent) == self.size, what)
        everybody.copy_(torch.cat([sent[rank] for rank in range(self.size)]))


@dataclass
class Batch:
    """What the ranks do in a batch.

    Attributes:
        paths: the layers that each rank uses, in order; None: all wait for each other, by a collective of the user's own.
        window: how many layers are fetched ahead.
        ends: how the batch ends: all sum gradients, or rank 0 writes weights as well, or each goes on as it likes.
        own: of each rank, the layers of which it has values of its own.
        slow: of each rank, the most seconds that it takes for a layer.
        extra: how many layers each fetches in addition, and does not use.
    """

    paths: list[list[int | None]]
    window: int
    ends: str
    own: list[set[int]]
    slow: list[float] = field(default_factory=list)
    extra: int = 0


def random_batch(random: Random, size: int) -> Batch:
    path: list[int | None] = [random.randrange(LAYERS) for _ in range(random.randint(1, 12))]
    if random.random() < 0.3:
        path.insert(random.randrange(len(path)), None)
    paths = [list(path) for _ in range(size)]
    for each in paths:
        if random.random() < 0.25:  # this rank parts from the others
            change = random.choice(("leaves out", "brings forward", "adds", "does nothing"))
            used = [at for at, layer in enumerate(each) if layer is not None]
            at = random.choice(used) if used else 0
            if change == "adds":
                each.insert(at, random.randrange(LAYERS))
            elif change == "does nothing":
                each[:] = [layer for layer in each if layer is None]
            elif used:
                layer = each.pop(at)
                if change == "brings forward":
                    each.insert(random.randint(0, at), layer)
    own = [{random.randrange(LAYERS)} if random.random() < 0.05 else set() for _ in range(size)]
    slow = [random.choice((0.0, 0.0, 1e-4, 1e-3, 0.03)) for _ in range(size)]
    ends, extra = random.choice(("sum", "write", "go on")), random.choice((0, 0, 2))
    return Batch(paths, random.randint(1, 4), ends, own, slow, extra)


class Rank(threading.Thread):
    """One rank, which goes through batches."""

    def __init__(self, rank: int, together: Together, weights: Tensor, batches: list[Batch]) -> None:
        super().__init__(daemon=True)
        self.rank, self.together, self.weights, self.batches = rank, together, weights, batches
        self.random = Random(rank)
        self.ranks: Any = FakeRanks(rank, together)
        self.mine: set[int] = set()
        self.error: BaseException | None = None
        self.lock = threading.RLock()
        self.uploads = SlicedUploads(Device(torch.device("cpu")), self.ranks, self.lock, self.is_own, None)

    def is_own(self, layer: Any) -> bool:
        return layer.index in self.mine

    def run(self) -> None:
        try:
            for batch in self.batches:
                self.mine = batch.own[self.rank]
                self.go_through(batch)
                self.end(batch)
        except BaseException as error:
            self.error = error
            self.together.barrier.abort()
        finally:
            self.uploads.close()

    def go_through(self, batch: Batch) -> None:
        path = batch.paths[self.rank]
        ahead: dict[int, tuple[Tensor, Any]] = {}
        fetched = 0
        for at, layer in enumerate(path):
            while fetched < len(path) and fetched < at + batch.window:
                if path[fetched] is not None:
                    ahead[fetched] = self.send(path[fetched])
                fetched += 1
            sleep(self.random.random() * batch.slow[self.rank])
            if layer is None:
                self.together.barrier.wait()  # as a collective of the user's own, in which this class has no say
                continue
            target, coming = ahead.pop(at)
            with self.lock:
                self.uploads.go_on()
                if coming is not None:
                    self.uploads.finish(coming)
            assert torch.equal(target, self.value(layer)), f"rank {self.rank} has other weights"

    def send(self, layer: Any) -> tuple[Tensor, Any]:
        target, source = torch.full((NBYTES,), 255, dtype=torch.uint8), self.value(layer)
        stands_for: Any = SimpleNamespace(index=layer, name=str(layer), planned=SimpleNamespace(ring=0))
        with self.lock:
            return target, self.uploads.send(stands_for, target, source, lambda: None)

    def value(self, layer: int) -> Tensor:
        return 255 - self.weights[layer] if layer in self.mine else self.weights[layer]

    def end(self, batch: Batch) -> None:
        unused = [self.send(layer)[0] for layer in range(batch.extra)]
        with self.lock:
            self.uploads.end_round()
        for layer, target in enumerate(unused):
            assert torch.equal(target, self.value(layer)), f"rank {self.rank} has other weights that it has not used"
        if batch.ends == "go on":
            return
        self.together.barrier.wait()
        self.ranks.sums += 1
        if batch.ends == "write":
            if self.rank == 0:
                self.weights.random_(0, 255)
            self.together.barrier.wait()


def go_through(batches: list[Batch], size: int, *, patience: float) -> list[Rank]:
    """Lets ranks go through batches, and returns them."""
    together = Together(size)
    weights = torch.randint(0, 255, (LAYERS, NBYTES), dtype=torch.uint8)
    with (
        mock.patch.object(gather_log, "PATIENCE", patience),
        mock.patch.object(sliced_uploads, "CHECK_SECONDS", 0.002),
        mock.patch.object(sliced_uploads, "_EVERY", 2),
    ):
        ranks = [Rank(rank, together, weights, batches) for rank in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    for rank in ranks:
        if rank.error is not None and not isinstance(rank.error, threading.BrokenBarrierError):
            raise rank.error
    assert all(rank.error is None for rank in ranks), "a barrier was not reached"
    assert len({rank.ranks.gathers for rank in ranks}) == 1, "each gather has all ranks"
    return ranks


@pytest.mark.parametrize(
    ("size", "count"),
    first(
        [(2, 30), (3, 30), (4, 100), (2, 2000), (3, 2000), (4, 2000)],
        (2, 30),
        second=[(3, 30)],
        why="random batches, of which the first tier has some",
    ),
)
def test_random_paths_never_hang_and_never_mix_layers(size: int, count: int) -> None:
    random = Random(size + count)
    batches = [random_batch(random, size) for _ in range(count)]
    ranks = go_through(batches, size, patience=0.02)
    assert all(rank.ranks.gathers for rank in ranks), "they have not gathered at all"


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_on_one_path_gather_all_of_it(size: int) -> None:
    """All but what is left behind the last part; whoever is slow is waited for."""
    paths: list[list[int | None]] = [[0, 1, 2, None, 1, 0] for _ in range(size)]
    batches = [Batch(paths, 2, end, [set()] * size, [0.0, 0.01, 0.0][:size]) for end in ("sum", "go on", "write") * 3]
    part = NBYTES // size // 512 * 512
    for rank in go_through(batches, size, patience=10):
        assert rank.ranks.gathers == 5 * len(batches)
        assert rank.uploads.gathered_bytes == 5 * len(batches) * (size - 1) * part


@pytest.mark.parametrize("lost_in", ["gather", "wait for the other rank"])
def test_an_upload_that_has_failed_is_not_waited_for_again(lost_in: str) -> None:
    """Each wait takes as long as a process group is patient, and the end of a run asks for all layers several times."""
    together = Together(2)
    weights = torch.randint(0, 255, (LAYERS, NBYTES), dtype=torch.uint8)
    first, other = (Rank(rank, together, weights, []) for rank in range(2))
    asked = []
    error = ConnectionError if lost_in == "gather" else RankError

    def lost(*_: Any) -> None:
        asked.append(1)
        raise error("rank 1 does not answer")

    with first.lock, other.lock:
        if lost_in == "gather":
            first.ranks.gather = other.ranks.gather = lost
        sent = [first.send(layer) for layer in range(3)]
        if lost_in == "gather":
            with pytest.raises(error):
                other.send(0)
        else:
            first.uploads._gathers._until = lost
        with pytest.raises(error):
            first.uploads.finish(sent[0][1])
        first.uploads.finish()
        first.uploads.end_round()
    assert len(asked) == (2 if lost_in == "gather" else 1)  # each rank has gathered once
    for layer, (target, _) in enumerate(sent):
        assert torch.equal(target, weights[layer])
    first.uploads.close()
    other.uploads.close()


@pytest.mark.parametrize("after_error", [True, False])
@pytest.mark.parametrize("error", LOST)
def test_an_error_of_this_rank_comes_before_that_of_another(error: type[BaseException], after_error: bool) -> None:
    """The end of a step issues all uploads, and another rank may have failed meanwhile: this rank's own error is raised."""
    together = Together(2)
    weights = torch.randint(0, 255, (LAYERS, NBYTES), dtype=torch.uint8)
    ranks = [Rank(rank, together, weights, []) for rank in range(2)]

    def lost(*_: Any) -> None:
        raise error("rank 1 has failed")

    first = ranks[0]
    with first.lock:
        target, _ = first.send(0)
        first.uploads._gathers._until = lost
        with nullcontext() if after_error else pytest.raises(error):
            first.uploads.end_round(after_error=after_error)
        assert torch.equal(target, weights[0])
    for rank in ranks:
        rank.uploads.close()


# ---------------------------------------------------------------------- slots wait for what is on its way


class Late(Uploads):
    """Copies the second half of a layer when somebody waits for it, and not before."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.pending: deque[PendingGather] = deque()
        self.waited = 0

    def send(self, layer: Any, target: Tensor, source: Tensor, landed: Callable[[], None]) -> PendingGather | None:
        poison(target)
        half = source.nbytes // 2
        self.device.copy((target[:half],), (source[:half],), Stream.UPLOAD)
        self.pending.append(PendingGather(layer, 0, target, source, 0, landed))
        return self.pending[-1]

    def finish(self, last: PendingGather | None = None) -> None:
        while self.pending and (last is None or last in self.pending):
            coming = self.pending.popleft()
            half = coming.source.nbytes // 2
            self.device.copy((coming.target[half:],), (coming.source[half:],), Stream.UPLOAD)
            coming.landed()
            self.waited += 1

    def end_round(self, *, after_error: bool = False) -> None:
        self.finish()


@pytest.mark.parametrize("k_prime", [1, 2])
@pytest.mark.parametrize("overlap", ["off", "forward", "backward"])
@pytest.mark.parametrize(
    "name", first(["llama-dropout", "conditional", "reused"], "conditional", "reused", why="a larger model")
)
def test_nobody_reads_or_overwrites_what_is_on_its_way(
    name: str, overlap: Any, k_prime: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Late] = []

    def late(self: Any, device: Device, *_: Any) -> Uploads:
        made.append(Late(device))
        return made[-1]

    monkeypatch.setattr(Placement, "uploads", late)
    case = CASES[name]
    make = case.make if overlap == "off" else fused(case.make)
    options = {"max_epochs": 2, "accumulate_grad_batches": 1 if overlap == "backward" else 2, **case.options({})}
    strategy = superpipeline(
        k=1, k_prime=k_prime, optimizer_overlap=overlap, **({} if overlap == "off" else {"fused_optimizer": True})
    )
    ours = fit(make, case.batches(), strategy, **options, recorded="losses")
    assert_same(ours, fit(make, case.batches(), **options, recorded="losses"))
    assert made[0].waited > 10
    assert not made[0].pending


@pytest.mark.parametrize("of_one_layer", [True, False])
def test_the_host_writes_nothing_that_is_on_its_way(of_one_layer: bool) -> None:
    """Neither a layer that is updated early, nor any in an optimizer's step. No other rank gets half of it from before."""
    device = Device(torch.device("cpu"))
    late, slots = Late(device), Slots.__new__(Slots)
    slots._device, slots.uploads, slots._latest = device, late, None  # of all that slots have, these send and wait
    slot, layer = (
        Slot(0, torch.zeros(8, dtype=torch.uint8), Lease(torch.zeros(8, dtype=torch.uint8))),
        SimpleNamespace(),
    )
    layer.slot, layer.transfer = slot, None
    stands_for: Any = layer
    slot.pending = late.send(
        layer, slot.memory, torch.ones(8, dtype=torch.uint8), lambda: slots._all_issued(stands_for, slot)
    )
    slots.synchronize(Wait.UPDATE_AFTER_FETCH, stands_for if of_one_layer else None)
    assert slot.pending is None
    assert slot.memory.sum() == 8
