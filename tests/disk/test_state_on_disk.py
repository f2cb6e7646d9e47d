"""The optimizer's state on a disk: results are those of a run that has it in memory, whatever user code does with it."""

from __future__ import annotations

import copy
import ctypes
import errno
import io
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.capabilities.disk import host_budget, mapped_file
from sp_lightning.capabilities.disk import tier as disk_tier
from sp_lightning.capabilities.disk.away import save
from sp_lightning.capabilities.disk.mapped_file import MappedFile
from sp_lightning.capabilities.disk.state_placement import place_state
from sp_lightning.core.plan import host_memory
from sp_lightning.core.plan.units import parse_bytes
from tests.support.models import Module, Stack, vectors
from tests.support.on_disk import NoBatch, Unfreezes, away, mapped_bytes, on_disk, refusal_in_fork, without_room
from tests.support.runs import assert_equal, assert_same, fit, fused, trainer_for
from tests.support.tiers import first


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    without_room(monkeypatch)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "Adam(amsgrad)": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "SGD(momentum)": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2, foreach=True),
    "Muon": lambda p: torch.optim.Muon([each for each in p if each.ndim == 2], lr=1e-2),
}


def made_with(make_optimizer: Any) -> Any:
    def make() -> Module:
        module = Module(Stack())
        module.configure_optimizers = lambda: make_optimizer(module.parameters())  # type: ignore[method-assign]
        return module

    return make


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("name", first(OPTIMIZERS, "Adam(amsgrad)", why="state of the same kind"))
def test_any_optimizer_of_torch_s(name: str, tmp_path: Path) -> None:
    make = made_with(OPTIMIZERS[name])
    ours = fit(make, vectors(), on_disk(tmp_path))
    assert_same(ours, fit(make, vectors()))


VARIANTS: dict[str, dict[str, Any]] = {
    "clipped by norm": {"gradient_clip_val": 0.01},
    "clipped by value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "accumulated": {"accumulate_grad_batches": 2},
    "mixed": {"precision": "bf16-mixed"},
    "half": {"precision": "bf16-true"},
    "mixed and clipped": {"precision": "bf16-mixed", "gradient_clip_val": 0.01},
}


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("variant", first(VARIANTS, "mixed and clipped", why="a part of these, alone"))
@pytest.mark.parametrize("overlap", first(["off", "forward", "backward"], "forward", why="its other modes"))
def test_every_mode_of_updates(overlap: Any, variant: str, tmp_path: Path) -> None:
    options = VARIANTS[variant]
    if overlap == "backward" and "gradient_clip_val" in options:
        pytest.skip("clipping needs all gradients at once, and is refused")
    make = made_with(OPTIMIZERS["AdamW"]) if overlap == "off" else fused(made_with(OPTIMIZERS["AdamW"]))
    strategy = on_disk(tmp_path, optimizer_overlap=overlap)
    ours = fit(make, vectors(), strategy, recorded="losses", **options)
    assert_same(ours, fit(make, vectors(), recorded="losses", **options))


class Looks(Callback):
    """Notes how many tensors are away after each step, and does something with the state."""

    def __init__(self, look: Any = None) -> None:
        self.away: list[int] = []
        self.look = look

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.away.append(away(trainer.optimizers[0]))
        if self.look is not None:
            self.look(trainer.optimizers[0])


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("overlap", first(["off", "forward", "backward"], "forward", why="its other modes"))
def test_state_is_on_the_disk_between_steps(overlap: Any, tmp_path: Path) -> None:
    looks = Looks()
    make = fused(made_with(OPTIMIZERS["AdamW"]))
    fit(make, vectors(), on_disk(tmp_path, optimizer_overlap=overlap), callbacks=[looks], recorded="nothing")
    count = 2 * len(list(Stack().parameters()))
    assert looks.away == [count] * len(vectors())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.rest("takes tenths of a second")
def test_layers_stay_in_memory_as_far_as_they_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_room(monkeypatch, 60 * 2**10)
    looks = Looks()
    strategy = on_disk(tmp_path)
    ours = fit(made_with(OPTIMIZERS["AdamW"]), vectors(), strategy, callbacks=[looks])
    assert_same(ours, fit(made_with(OPTIMIZERS["AdamW"]), vectors(), callbacks=[Looks()]))
    assert 0 < looks.away[0] < 2 * len(list(Stack().parameters()))


# ---------------------------------------------------------------------- what users do with it


def _reads(optimizer: Any) -> None:
    for state in optimizer.state.values():
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape
        optimizer.norm = float(state["exp_avg"].norm()) + getattr(optimizer, "norm", 0.0)


def _writes(optimizer: Any) -> None:
    for index, state in enumerate(optimizer.state.values()):
        if index % 2:
            state["exp_avg"].mul_(0.5)


def _replaces(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 0.5


def _swaps(optimizer: Any) -> None:
    """Two layers have each other's tensors, which the update of the first one must not overwrite."""
    states = list(optimizer.state.values())
    first = states[0]["exp_avg"].shape
    one, *_, other = (state for state in states if state["exp_avg"].shape == first)
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


def _loads_its_own(optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def _loads_a_copy(optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _forgets(optimizer: Any) -> None:
    for parameter in list(optimizer.state)[::2]:
        del optimizer.state[parameter]


def _pickles(optimizer: Any) -> None:
    torch.save(optimizer.state_dict(), file := io.BytesIO())
    file.seek(0)
    optimizer.load_state_dict(torch.load(file))


def _in_inference_mode(optimizer: Any) -> None:
    with torch.inference_mode():
        _reads(optimizer)


LOOKS = {
    look.__name__.strip("_"): look
    for look in (
        _reads,
        _writes,
        _replaces,
        _swaps,
        _loads_its_own,
        _loads_a_copy,
        _forgets,
        _pickles,
        _in_inference_mode,
    )
}


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "look", first(LOOKS, "writes", "replaces", "pickles", "loads_a_copy", why="other ways to state")
)
@pytest.mark.parametrize(
    "overlap", first(["off", "forward"], "forward", why="the same without updates in the background")
)
def test_user_code_finds_the_state(look: str, overlap: Any, tmp_path: Path) -> None:
    make = fused(made_with(OPTIMIZERS["AdamW"]))
    strategy = on_disk(tmp_path, optimizer_overlap=overlap)
    ours = fit(make, vectors(), strategy, callbacks=[Looks(LOOKS[look])])
    plain = fit(make, vectors(), callbacks=[Looks(LOOKS[look])])
    assert_same(ours, plain)
    assert getattr(ours.trainer.optimizers[0], "norm", 0) == getattr(plain.trainer.optimizers[0], "norm", 0)


@pytest.mark.long("takes a second or more")
def test_several_threads_read_the_state_at_once(tmp_path: Path) -> None:
    norms: list[float] = []

    def reads(optimizer: Any) -> None:
        def norm() -> float:
            return sum(float(value.norm()) for state in optimizer.state.values() for value in state.values())

        with ThreadPoolExecutor(4) as threads:
            norms.extend(each.result() for each in [threads.submit(norm) for _ in range(4)])

    make = made_with(OPTIMIZERS["AdamW"])
    assert_same(
        fit(make, vectors(), on_disk(tmp_path), callbacks=[Looks(reads)]),
        fit(make, vectors(), callbacks=[Looks(reads)]),
    )
    assert norms[: len(norms) // 2] == norms[len(norms) // 2 :]


@pytest.mark.rest("takes tenths of a second")
def test_new_state_is_in_the_order_of_the_groups(tmp_path: Path) -> None:
    def split(parameters: Any) -> Any:
        wide: list[Any] = []
        narrow: list[Any] = []
        for parameter in parameters:
            (wide if parameter.ndim > 1 else narrow).append(parameter)
        return torch.optim.AdamW([{"params": wide}, {"params": narrow, "weight_decay": 0.0}], lr=1e-2)

    assert_same(fit(made_with(split), vectors(), on_disk(tmp_path)), fit(made_with(split), vectors()))


@pytest.mark.rest("takes tenths of a second")
def test_a_view_that_somebody_holds_goes_on_seeing_the_updates(tmp_path: Path) -> None:
    held: list[Tensor] = []

    def holds(optimizer: Any) -> None:
        if not held:
            held.append(next(iter(optimizer.state.values()))["exp_avg"].view(-1)[:3])
        held.append(held[0].clone())

    ours = fit(made_with(OPTIMIZERS["AdamW"]), vectors(), on_disk(tmp_path), callbacks=[Looks(holds)])
    mine = list(held)
    held.clear()
    assert_same(ours, fit(made_with(OPTIMIZERS["AdamW"]), vectors(), callbacks=[Looks(holds)]))
    assert_equal(mine, held, "views")


class Foreign(Callback):
    """Gives the optimizer a tensor whose memory other code has, too, then reads and writes that memory between steps."""

    def __init__(self, with_holder: Any) -> None:
        self._with_holder = with_holder
        self.seen: list[Tensor] = []
        self.held: Any = None

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        state = next(iter(trainer.optimizers[0].state.values()))
        if self.held is None:
            state["exp_avg"], self.held = self._with_holder(state["exp_avg"].numpy().copy())
        else:
            self.seen.append(torch.as_tensor(self.held).clone())
            self.held *= 0.5


def with_view(array: Any) -> tuple[Tensor, Tensor]:
    tensor = torch.tensor(array)
    return tensor, tensor.view(-1)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    "with_holder",
    [lambda array: (torch.from_numpy(array), array), lambda array: (torch.from_dlpack(array), array), with_view],
    ids=["NumPy", "DLPack", "a view"],
)
def test_memory_that_other_code_has_stays_where_it_is(with_holder: Any, tmp_path: Path) -> None:
    ours, theirs = Foreign(with_holder), Foreign(with_holder)
    plain = fit(made_with(OPTIMIZERS["AdamW"]), vectors(4), callbacks=[theirs])
    assert_same(fit(made_with(OPTIMIZERS["AdamW"]), vectors(4), on_disk(tmp_path), callbacks=[ours]), plain)
    assert_equal(ours.seen, theirs.seen, "what other code has seen")


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("disk", [False, True])
def test_state_without_memory_of_its_own(disk: bool, tmp_path: Path) -> None:
    """A sparse tensor has no address."""

    class KeepsSparse(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            for state in trainer.optimizers[0].state.values():
                state["mine"] = torch.eye(4).to_sparse()

    options: Any = {"optimizer_overlap": "forward"}
    strategy = on_disk(tmp_path, **options) if disk else SuperpipelineStrategy(k=1, **options)
    ours = fit(
        fused(made_with(OPTIMIZERS["AdamW"])), vectors(3), strategy, callbacks=[KeepsSparse()], recorded="losses"
    )
    plain = fit(fused(made_with(OPTIMIZERS["AdamW"])), vectors(3), callbacks=[KeepsSparse()], recorded="losses")
    assert_equal(ours.losses, plain.losses, "losses")
    assert_equal(ours.state, plain.state, "weights")


@pytest.mark.long("takes a second or more")
def test_layers_that_are_unfrozen(tmp_path: Path) -> None:
    ours = fit(lambda: Module(Stack()), vectors(), on_disk(tmp_path), callbacks=[Unfreezes()], max_epochs=3)
    assert_same(ours, fit(lambda: Module(Stack()), vectors(), callbacks=[Unfreezes()], max_epochs=3))


@pytest.mark.long("takes a second or more")
def test_parameters_that_are_exchanged(tmp_path: Path) -> None:
    class Exchanges(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:  # the engine is built anew
                pl_module.net.extra = torch.nn.Linear(2, 2)

    ours = fit(lambda: Module(Stack()), vectors(), on_disk(tmp_path), callbacks=[Exchanges()])
    assert_same(ours, fit(lambda: Module(Stack()), vectors(), callbacks=[Exchanges()]))


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("overlap", first(["off", "forward", "backward"], "forward", why="its other modes"))
def test_files_are_plain_lightning_s_and_back(overlap: Any, tmp_path: Path) -> None:
    make = fused(made_with(OPTIMIZERS["AdamW"]))

    def two_halves(first: Any, second: Any, file: Path) -> Any:
        half = fit(make, vectors(), first, recorded="nothing", max_epochs=1)
        looks = away(half.trainer.optimizers[0])
        half.trainer.save_checkpoint(file)
        assert away(half.trainer.optimizers[0]) == looks
        return fit(make, vectors(), second, recorded="losses", max_epochs=2, ckpt_path=file)

    def disk() -> SuperpipelineStrategy:
        return on_disk(tmp_path, optimizer_overlap=overlap)

    plain = two_halves("auto", "auto", tmp_path / "plain.ckpt")
    for one, other, name in ((disk(), disk(), "ours"), ("auto", disk(), "there"), (disk(), "auto", "back")):
        assert_same(two_halves(one, other, tmp_path / f"{name}.ckpt"), plain)
    theirs, ours = (torch.load(tmp_path / f"{name}.ckpt")["optimizer_states"] for name in ("plain", "back"))
    assert_equal(ours, theirs, "optimizer_states")


@pytest.mark.rest("takes tenths of a second")
def test_loaded_state_is_on_the_disk_before_the_first_step(tmp_path: Path) -> None:
    """What is still mapped from the checkpoint is copied to memory then, which must not bring back what was moved."""
    found: list[int] = []

    class Begins(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            found.append(away(trainer.optimizers[0]))

    make = made_with(OPTIMIZERS["AdamW"])
    fit(make, vectors(1), recorded="nothing").trainer.save_checkpoint(tmp_path / "half.ckpt")
    options: Any = {"recorded": "nothing", "max_epochs": 2, "ckpt_path": tmp_path / "half.ckpt"}
    fit(make, vectors(1), on_disk(tmp_path), callbacks=[Begins()], **options)
    assert found == [2 * len(list(Stack().parameters()))]


@pytest.mark.rest("takes tenths of a second")
def test_a_checkpoint_is_written_tensor_by_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors stay away, and the file is the one that ``torch.save`` writes."""
    strategy = on_disk(tmp_path)
    files: list[bytes] = []

    def saves(optimizer: Any) -> None:
        count = away(optimizer)
        save(optimizer.state_dict(), ours := io.BytesIO())
        assert away(optimizer) == count > 0
        torch.save(optimizer.state_dict(), theirs := io.BytesIO())
        files.extend((ours.getvalue(), theirs.getvalue()))

    fit(made_with(OPTIMIZERS["AdamW"]), vectors(1), strategy, callbacks=[Looks(saves)])
    ours, theirs = (torch.load(io.BytesIO(file)) for file in files)
    assert_equal(ours, theirs, "state")
    assert len(files[0]) == len(files[1])


# ---------------------------------------------------------------------- forks, refusals


@pytest.mark.long("takes a second or more")
def test_a_forked_process_says_that_it_cannot_read_it(tmp_path: Path) -> None:
    said: list[str] = []

    def forks(optimizer: Any) -> None:
        state = next(iter(optimizer.state.values()))["exp_avg"]
        assert state.shape == (16, 16)
        said.append(refusal_in_fork(state.norm))

    ours = fit(made_with(OPTIMIZERS["AdamW"]), vectors(), on_disk(tmp_path), callbacks=[Looks(forks)])
    assert_same(ours, fit(made_with(OPTIMIZERS["AdamW"]), vectors(), callbacks=[Looks()]))
    assert said[0].startswith(
        "This optimizer state is on a disk, in a file of the training process. A forked process cannot"
    )


@pytest.mark.rest("takes tenths of a second")
def test_a_system_that_maps_no_files_is_refused_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_file, "supported", lambda: False)
    with pytest.raises(OSError, match=r"disk= needs Linux, because its files are mapped to memory\. Leave disk= out"):
        fit(lambda: Module(Stack()), vectors(), on_disk(tmp_path), callbacks=[NoBatch()])


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("call", "number", "said"),
    [
        (
            "posix_fallocate",
            errno.EOPNOTSUPP,
            r"the file system cannot reserve space \(Operation not supported\). Name a folder",
        ),
        ("mmap", errno.ENODEV, r"of a scratch file could not be mapped \(No such device\)"),
    ],
)
def test_a_file_system_that_lacks_a_call_is_refused_before_work(
    call: str, number: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> int:
        if call == "posix_fallocate":
            raise OSError(number, os.strerror(number))
        ctypes.set_errno(number)
        return 2**64 - 1  # MAP_FAILED

    monkeypatch.setattr(os if call == "posix_fallocate" else mapped_file.libc, call, refuses)
    with pytest.raises(OSError, match=said):
        fit(lambda: Module(Stack()), vectors(), on_disk(tmp_path), callbacks=[NoBatch()])


@pytest.mark.rest("takes tenths of a second")
def test_an_optimizer_that_is_not_known_is_refused(tmp_path: Path) -> None:
    class Mine(torch.optim.AdamW):
        """It could do anything."""

    with pytest.raises(ValueError, match="Mine's is not"):
        fit(made_with(lambda p: Mine(p)), vectors(), on_disk(tmp_path))


@pytest.mark.rest("takes tenths of a second")
def test_sparse_gradients_are_refused(tmp_path: Path) -> None:
    class Sparse(Module):
        def __init__(self) -> None:
            super().__init__(Stack())
            self.table = torch.nn.Embedding(8, 16, sparse=True)

        def loss(self, batch: Any) -> Tensor:
            return self.net(batch + self.table(torch.zeros(len(batch), dtype=torch.long))).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    with pytest.raises(
        RuntimeError, match=r"one by one, but '.*' has sparse gradients. Make embeddings with sparse=False"
    ):
        fit(Sparse, vectors(), on_disk(tmp_path))


class Late(Module):
    """The first batch leaves out the last block, whose momentum begins with the second."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.batches = 0

    def loss(self, batch: Any) -> Tensor:
        self.batches += 1
        net: Any = self.net
        for block in list(net.blocks)[: -1 if self.batches == 1 else None]:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=True)


@pytest.mark.long("takes a second or more")
def test_momentum_that_some_layers_lack_is_refused_with_a_remedy(tmp_path: Path) -> None:
    def train(overlap: Any) -> Any:
        return fit(Late, vectors(), on_disk(tmp_path, optimizer_overlap=overlap), recorded="losses")

    with pytest.raises(
        RuntimeError, match=r"others have none yet. Pass optimizer_overlap='forward', or leave disk= out"
    ):
        train("backward")
    train("forward")


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("given", "remedy"),
    [("64GiB", 'host_memory="65553MiB" is enough'), (None, "free 17MiB")],
)
def test_host_memory_that_does_not_suffice_is_refused(
    given: Any, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "place_state", lambda sizes, _, given: place_state(sizes, 2**10, given))
    with pytest.raises(MemoryError, match=r"CPU memory is 63.0 KiB too small for the process") as raised:
        fit(lambda: Module(Stack()), vectors(), on_disk(tmp_path, host_memory=given))
    assert f": {remedy}." in str(raised.value)
    assert re.search(r"the process, which itself takes \d+\.\d [MG]iB, for data", str(raised.value))
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    ours = [
        frame.name
        for frame in raised.traceback
        if "sp_lightning" in str(frame.path) and "/tests/" not in str(frame.path)
    ]
    assert ours == ["setup"]


@pytest.mark.parametrize("given", [2**28, 2**33])
@pytest.mark.parametrize("missing", [2**20, 2**31])
def test_the_host_memory_that_is_named_is_no_more_than_is_needed(
    given: int, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,045 MiB were named where 1,000 ran: a sixteenth was added although 96 MiB are kept for the process anyway."""
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: 2**29)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: None)
    room = host_budget.room_for(given)
    assert room is not None
    (named,) = re.findall(r'"(.+)"', host_budget.remedy_for(missing, given))
    enough = host_budget.room_for(parse_bytes("host_memory", named))
    assert enough is not None
    assert room + missing <= enough <= room + missing + 18 * 2**20


@pytest.mark.rest("takes tenths of a second")
def test_optimizers_without_state_have_nothing_on_the_disk(tmp_path: Path) -> None:
    strategy = on_disk(tmp_path)
    fit(made_with(lambda p: torch.optim.SGD(p, lr=0.1)), vectors(), strategy, recorded="nothing")
    assert "The optimizers have no state that could be on the disk." in "".join(strategy.remarks())


@pytest.mark.rest("takes tenths of a second")
def test_the_plan_says_what_is_where(tmp_path: Path) -> None:
    strategy = on_disk(tmp_path)
    trainer = trainer_for(strategy)
    said: list[str] = []

    class Asks(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            said.extend(strategy.remarks())

    trainer.callbacks.append(Asks())
    module = Module(Stack())
    trainer.fit(module, torch.utils.data.DataLoader(vectors(), batch_size=None))  # type: ignore[arg-type]
    assert any("of optimizer state, of 7 layers, are on the disk" in line for line in said)


@pytest.mark.rest("takes tenths of a second")
def test_the_ledger_has_the_disk_s_traffic(tmp_path: Path) -> None:
    strategy = on_disk(tmp_path)
    fit(made_with(OPTIMIZERS["AdamW"]), vectors(), strategy, recorded="nothing")
    ledger = strategy.ledger
    assert ledger.state == ledger.on_disk  # all of it
    assert ledger.nbytes == ledger.weights + ledger.gradients + ledger.staging
    pages = ledger.disk_traffic / (2 * ledger.on_disk)  # tensors of small models are in whole pages
    assert 1 < pages < 6
    assert "of the optimizer state are on a disk" in str(ledger)
    assert "in each step except the first: " in str(ledger)


class RollsBack(Callback):
    """Looks at state, then replaces it by that of an earlier step, and looks again after some more steps."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
        optimizer: Any = trainer.optimizers[0]
        if index == 1:
            self.kept = copy.deepcopy(optimizer.state_dict())
        if index in (3, 5):
            self.norms = [state["exp_avg"].norm() for state in optimizer.state.values()]
        if index == 3:
            optimizer.load_state_dict(self.kept)


def deep() -> Module:
    """Layers of one size, more than are in memory at a time, with an optimizer that can step them in backward."""
    module = Module(nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(8))))
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), fused=True)  # type: ignore[method-assign]
    return module


def few(count: int) -> list[Tensor]:
    return list(torch.randn(count, 2, 32, generator=torch.Generator().manual_seed(3)))


@pytest.mark.long("takes a second or more")
def test_what_was_looked_at_and_replaced_does_not_come_back(tmp_path: Path) -> None:
    ours = fit(deep, few(8), on_disk(tmp_path), callbacks=[RollsBack()])
    assert_same(ours, fit(deep, few(8), callbacks=[RollsBack()]))


# ---------------------------------------------------------------------- what is read, what is in memory


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[MappedFile]:
    """The files of state of every run, to look at afterwards."""
    made: list[MappedFile] = []

    def noted(*arguments: Any) -> MappedFile:
        made.append(MappedFile(*arguments))
        return made[-1]

    monkeypatch.setattr(disk_tier, "MappedFile", noted)
    return made


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("overlap", first(["off", "forward", "backward"], "forward", why="its other modes"))
def test_nothing_is_read_in_vain(overlap: Any, tmp_path: Path, files: list[MappedFile]) -> None:
    """There is no state to be read in the first step. Each other step reads each layer's state once."""
    read: list[int] = []

    class Notes(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            assert trainer.optimizers[0].state  # waits for the updates
            read.append(files[-1].read_bytes)

    strategy = on_disk(tmp_path, optimizer_overlap=overlap)
    fit(deep, few(6), strategy, callbacks=[Notes()], recorded="nothing")
    whole = 8 * 4 * 4096  # four tensors, of a page each
    stay = 2 * whole // 8  # two layers are in memory when a step begins, and are updated first or last
    steps = [after - before for before, after in pairwise([0, *read])]
    assert steps[0] == 0
    assert all(whole - stay <= each <= whole for each in steps[1:])
    assert files[-1].written_bytes >= 5 * whole - stay


class Wide(Module):
    """Eight layers with two MiB of state each."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("overlap", first(["off", "forward", "backward"], "backward", why="its other modes"))
def test_few_layers_are_in_memory(overlap: Any, tmp_path: Path) -> None:
    """What user code reads is mapped until the next update of its layer; a checkpoint reads one tensor at a time."""
    sizes: list[tuple[int, ...]] = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            states = trainer.optimizers[0].state.values()
            stepped = mapped_bytes(tmp_path)
            assert sum(float(state["exp_avg_sq"].sum()) for state in states) > 0
            read = mapped_bytes(tmp_path)
            trainer.save_checkpoint(tmp_path / "saved.ckpt")
            sizes.append((stepped, read, mapped_bytes(tmp_path)))

    batches = list(torch.randn(3, 2, 512))
    options: Any = {"recorded": "nothing", "callbacks": [Looks()]}
    fit(Wide, batches, on_disk(tmp_path, optimizer_overlap=overlap), **options)
    for stepped, read, saved in sizes:
        assert 0 < stepped <= 3 * 2 * 2**20 + 2**16
        assert read >= 8 * 2**20
        assert saved < 2**20


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
def test_layers_that_come_in_another_order(overlap: Any, tmp_path: Path) -> None:
    ours = fit(Skips, few(12), on_disk(tmp_path, optimizer_overlap=overlap), recorded="losses")
    assert_same(ours, fit(Skips, few(12), recorded="losses"))


class Meanwhile(Callback):
    """Does something in another thread, again and again, while a model trains."""

    def __init__(self, does: Any) -> None:
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
@pytest.mark.parametrize("does", [forks, reads])
def test_another_thread_forks_or_reads_state_while_layers_are_updated(does: Any, tmp_path: Path) -> None:
    meanwhile = Meanwhile(does)
    strategy = on_disk(tmp_path, optimizer_overlap="forward")
    ours = fit(deep, few(10), strategy, callbacks=[meanwhile], recorded="losses")
    assert not meanwhile.errors
    assert meanwhile.count
    assert_same(ours, fit(deep, few(10), recorded="losses"))


@pytest.mark.rest("takes tenths of a second")
def test_memory_and_disk_space_of_replaced_state_are_free_again(tmp_path: Path, files: list[MappedFile]) -> None:
    """User code gives each layer a new average after each batch."""

    class Replaces(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            for state in trainer.optimizers[0].state.values():
                state["exp_avg"] = state["exp_avg"] * 0.5

    strategy = on_disk(tmp_path)
    ours = fit(deep, few(12), strategy, callbacks=[Replaces()])
    assert_same(ours, fit(deep, few(12), callbacks=[Replaces()]))
    whole = 8 * 4 * 4096
    assert os.fstat(files[0]._file.descriptor).st_size <= 2 * whole + 4096
