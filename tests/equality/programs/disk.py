"""User code that meets optimizer state, trained weights or gradients that are on a disk."""

from __future__ import annotations

import copy
import ctypes
import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn

from sp_lightning.capabilities.disk import mapped_file
from sp_lightning.capabilities.disk import tier as disk_tier
from sp_lightning.capabilities.disk.mapped_file import is_on_disk
from sp_lightning.capabilities.disk.state_placement import StatePlacement
from tests.equality.rows import program, tiers
from tests.equality.variants import CLIPPED
from tests.support.engine import taken_apart
from tests.support.models import CASES, Module, Stack, vectors
from tests.support.moments import At
from tests.support.on_disk import MODELS, NoBatch, Unfreezes, away, fill_disk, refusal_in_fork, without_room
from tests.support.runs import Make, Outcome

STATE = tiers(rest=["state on a disk, forward"], long=["state on a disk, off"])
EACH_STATE = {**STATE, "state on a disk, backward": 3}
OFF = tiers(rest=["state on a disk, off"])
WEIGHTS = tiers(rest=["weights on a disk, forward"], long=["weights on a disk, off"])
BOTH = tiers(rest=["everything on a disk, forward"], long=["everything on a disk, off"])
LATE = ("off", "forward")
Deep = partial(At, depth=6)


def at_step(name: str, variants: Any = STATE, **more: Any) -> Callable[[Any], Any]:
    """Code between two steps."""
    return program(f"disk: {name}", variants, at="on_train_batch_end", on=Deep, **more)


def states(m: Any) -> list[dict[str, Any]]:
    return list(m.optimizer.state.values())


# ---------------------------------------------------------------------- every way to a step

for place in ("state", "weights", "gradients", "everything"):
    named = [f"{place} on a disk, {mode}, {way}" for mode in ("off", "forward", "backward") for way in CLIPPED
             if not (mode == "backward" and "clip" in way) and "simulated" not in way]  # fmt: skip
    quick = {
        "state": "bf16-mixed, clipped", "weights": "accumulated", "gradients": "bf16-mixed, clipped, accumulated",
        "everything": "bf16-true",
    }[place]  # fmt: skip
    program(
        f"disk: {place} in every way to a step",
        {**dict.fromkeys(named, 3), f"{place} on a disk, forward, {quick}": 2},
        covers=f"{place} that is read and written for each step",
    )(lambda: Module(Stack()))


def gradients_there(ours: Outcome) -> None:
    assert ours.trainer.strategy.ledger.gradients_on_disk > 0


for model in MODELS:
    one = model == "gpt2-tied"
    program(
        f"disk: weights of {model}",
        {"weights on a disk, forward, simulated": 2 if one else 3, "weights on a disk, forward": 3},
        batches=CASES[model].batches, covers="a model whose weights are on the disk, where nothing may be late",
    )(CASES[model].make)  # fmt: skip
    one = model == "conditional"
    program(
        f"disk: gradients of {model}",
        {"gradients on a disk, forward, accumulated, simulated": 2 if one else 3,
         **tiers(long=[f"gradients on a disk, forward{way}" for way in ("", ", simulated", ", accumulated")])},
        batches=CASES[model].batches, covers="a model whose gradients are on the disk, and are added to", also=gradients_there,
    )(CASES[model].make)  # fmt: skip


def optimized(make: Callable[[Any], Any]) -> Make:
    def made() -> Module:
        module = Module(Stack())
        module.configure_optimizers = lambda: make(module.parameters())  # type: ignore[method-assign]
        return module

    return made


OPTIMIZERS: dict[str, Any] = {
    "Adam(amsgrad)": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "SGD(momentum)": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2, foreach=True),
    "Muon": lambda p: torch.optim.Muon([each for each in p if each.ndim == 2], lr=1e-2),
}
for name, make in OPTIMIZERS.items():
    program(
        f"disk: {name}", OFF if name == "Adam(amsgrad)" else tiers(long=OFF), covers="state of another kind"
    )(optimized(make))  # fmt: skip


@program("disk: groups in an order of their own", OFF, of=optimized)
def _(parameters: Any) -> Any:
    """New state is in the order of the groups."""
    both: tuple[list[Any], list[Any]] = [], []
    for parameter in parameters:
        both[parameter.ndim > 1].append(parameter)
    return torch.optim.AdamW([{"params": both[1]}, {"params": both[0], "weight_decay": 0.0}], lr=1e-2)


def says_that_there_is_none(ours: Outcome) -> None:
    said = "".join(ours.trainer.strategy.remarks())
    assert "The optimizers have no state that could be on the disk." in said


program(
    "disk: no state", OFF, of=optimized, covers="an optimizer that has no state", also=says_that_there_is_none
)(lambda p: torch.optim.SGD(p, lr=0.1))  # fmt: skip

# ---------------------------------------------------------------------- what is where


def all_away(ours: Outcome) -> None:
    assert ours.module.noted == [2 * len(list(ours.module.parameters()))] * 3


@at_step("all state away between steps", EACH_STATE, also=all_away)
def counts(m: Any) -> None:
    """Whatever the mode of updates is."""
    m.noted.append(away(m.optimizer))


@contextmanager
def room(nbytes: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        without_room(patch, nbytes)
        yield


def some_away(ours: Outcome) -> None:
    assert 0 < ours.module.noted[0] < 2 * len(list(ours.module.parameters()))


@at_step("layers in memory as far as they fit", OFF, inside=partial(room, 40 * 2**10), also=some_away)
def _(m: Any) -> None:
    """State of some layers is on the disk, that of others is not."""
    counts(m)


def says_how_much(ours: Outcome) -> None:
    assert "of optimizer state, of 6 layers, are on the disk" in ours.module.noted[0]


@program("disk: a plan that says what is where", OFF, at="on_train_start", on=Deep, also=says_how_much)
def _(m: Any) -> None:
    """Remarks of a strategy name bytes and layers."""
    m.noted.append("".join(getattr(m.trainer.strategy, "remarks", list)()))


# ---------------------------------------------------------------------- state: reads, writes, exchanges


@at_step("state read")
def reads(m: Any) -> None:
    """What is read is what was written for the last step."""
    m.seen.append([float(each["exp_avg"].norm() + each["exp_avg_sq"].norm()) for each in states(m)])


@at_step("state read in inference mode")
def _(m: Any) -> None:
    """Tensors that are made then are others than those of a step."""
    with torch.inference_mode():
        reads(m)


@at_step("state written in place")
def _(m: Any) -> None:
    """Of every second layer."""
    for each in states(m)[::2]:
        each["exp_avg"].mul_(0.5)


@at_step("state replaced")
def _(m: Any) -> None:
    """By tensors that are in memory."""
    for each in states(m):
        each["exp_avg"] = each["exp_avg"] * 0.5


@at_step("state exchanged between two layers")
def _(m: Any) -> None:
    """The update of the first one must not overwrite what it has given away."""
    one, *_, other = (each for each in states(m) if each["exp_avg"].ndim == 2)
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


@at_step("state loaded from its own dictionary")
def _(m: Any) -> None:
    """The dictionary has the tensors themselves."""
    m.optimizer.load_state_dict(m.optimizer.state_dict())


@at_step("state loaded from a copy")
def _(m: Any) -> None:
    """The copy is in memory."""
    m.optimizer.load_state_dict(copy.deepcopy(m.optimizer.state_dict()))


@at_step("state of every second parameter forgotten")
def _(m: Any) -> None:
    """It begins anew."""
    for parameter in list(m.optimizer.state)[::2]:
        del m.optimizer.state[parameter]


@at_step("state pickled")
def _(m: Any) -> None:
    """And loaded from the file."""
    torch.save(m.optimizer.state_dict(), file := io.BytesIO())
    file.seek(0)
    m.optimizer.load_state_dict(torch.load(file))


@at_step("state read by four threads at once", OFF)
def _(m: Any) -> None:
    """Each thread asks for all of it."""

    def norm() -> float:
        return sum(float(value.norm()) for each in states(m) for value in each.values())

    with ThreadPoolExecutor(4) as threads:
        m.seen += [each.result() for each in [threads.submit(norm) for _ in range(4)]]


@at_step("a view of state held", EACH_STATE)
def _(m: Any) -> None:
    """It goes on seeing the updates, while all state is read."""
    m.kept[:] = m.kept or [states(m)[0]["exp_avg"].view(-1)[:3]]
    m.seen.append(m.kept[0].clone())
    reads(m)


def shared_with(name: str, both: Callable[[Any], tuple[Tensor, Any]]) -> None:
    @at_step(f"state whose memory {name} has, too", OFF, batches=lambda: vectors(4))
    def _(m: Any) -> None:
        """It stays where it is, because other code reads and writes it between steps."""
        if not m.kept:
            states(m)[0]["exp_avg"], held = both(states(m)[0]["exp_avg"].numpy().copy())
            m.kept.append(held)
        else:
            m.seen.append(torch.as_tensor(m.kept[0]).clone())
            m.kept[0] *= 0.5


shared_with("NumPy", lambda array: (torch.from_numpy(array), array))
shared_with("DLPack", lambda array: (torch.from_dlpack(array), array))
shared_with("a view", lambda array: ((tensor := torch.tensor(array)), tensor.view(-1)))


@at_step("sparse state", {"state on a disk, forward": 2, "forward, accumulated, clipped, two epochs": 2})
def _(m: Any) -> None:
    """It has no memory of its own, and no address. It goes before it would be compared."""
    for each in states(m):
        each["mine"] = torch.eye(4).to_sparse()
        if m.batch == 2:
            del each["mine"]


@at_step("state replaced by that of an earlier step", OFF, batches=lambda: vectors(8))
def _(m: Any) -> None:
    """What was looked at meanwhile does not come back."""
    if m.batch == 1:
        m.kept[:] = [copy.deepcopy(m.optimizer.state_dict())]
    if m.batch in (3, 5):
        reads(m)
    if m.batch == 3:
        m.optimizer.load_state_dict(m.kept[0])


# ---------------------------------------------------------------------- state: other places within a layer


class TwoAlike(nn.Module):
    """Two weights of one form."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.q(x)) + torch.tanh(self.k(x))


def once(name: str, variants: Any = None, **more: Any) -> Callable[[Any], Any]:
    """Code that runs once, after the third batch, with the net and the optimizer."""

    def register(code: Callable[[Any, Any], object]) -> Any:
        given = {"at": "on_train_batch_end", "on": partial(At, TwoAlike, depth=5), "batches": lambda: vectors(5)}
        program(f"disk: {name}", variants or EACH_STATE, covers=code.__doc__ or "", **given, **more)(
            lambda m: code(m, m.optimizer) if m.batch == 2 else None
        )
        return code

    return register


@once("tensors exchanged within layers")
def _(m: Any, optimizer: Any) -> None:
    """What was moved was copied over what was still to be moved."""
    for block in m.net:
        q, k = optimizer.state[block.q.weight], optimizer.state[block.k.weight]
        q["exp_avg"], k["exp_avg"] = k["exp_avg"], q["exp_avg"]


@once("states exchanged within layers")
def _(m: Any, optimizer: Any) -> None:
    """Whole dictionaries have other keys."""
    for block in m.net:
        q, k = block.q.weight, block.k.weight
        optimizer.state[q], optimizer.state[k] = optimizer.state[k], optimizer.state[q]


@once("state's keys in another order")
def _(m: Any, optimizer: Any) -> None:
    """The place of a tensor is not its number."""
    for state in optimizer.state.values():
        state["exp_avg"] = state.pop("exp_avg")


@once("parameters in another order")
def _(m: Any, optimizer: Any) -> None:
    """The place of a parameter is not its number."""
    optimizer.param_groups[0]["params"].reverse()


@once("parameters in a new group")
def _(m: Any, optimizer: Any) -> None:
    """Half of each layer is stepped with other options."""
    moved = [block.q.weight for block in m.net]
    names = set(map(id, moved))
    group = optimizer.param_groups[0]
    group["params"] = [each for each in group["params"] if id(each) not in names]
    fused = {"fused": True} if group["fused"] else {}
    optimizer.add_param_group({"params": moved, "lr": 1e-4, **fused})


def some_were_away(ours: Outcome) -> None:
    assert 0 < ours.module.noted[0] < 20


@once("state on the disk for a layer in memory", EACH_STATE, inside=partial(room, 18 * 2**10), also=some_were_away)
def _(m: Any, optimizer: Any) -> None:
    """A layer whose state stays in memory kept a tensor that is on the disk."""
    m.noted.append(away(optimizer))
    around = [optimizer.state[block.q.weight] for block in m.net]
    for one, other in zip(around, around[1:] + around[:1], strict=True):
        one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


# ---------------------------------------------------------------------- weights and gradients


@at_step("weights written", WEIGHTS)
def _(m: Any) -> None:
    """In the ways in which user code does it."""
    parameters = list(m.parameters())
    if m.batch == 0:
        parameters[0].data.mul_(0.5)
        with torch.no_grad():
            parameters[-1].copy_(parameters[-1] * 2)
    else:
        m.load_state_dict({name: value * 0.9 for name, value in m.state_dict().items()})
        parameters[1].data = torch.zeros_like(parameters[1])
        copy.deepcopy(m.net)


@program("disk: weights clamped in the step", WEIGHTS, at="start", on=Deep)
def _(m: Any) -> None:
    """Each weight is written where it is needed."""
    with torch.no_grad():
        for parameter in m.parameters():
            parameter.clamp_(-0.2, 0.2)


@at_step("a trainer copied", WEIGHTS)
def _(m: Any) -> None:
    """The copy has the values of the weights on the disk."""
    copied = copy.deepcopy(m.trainer)
    m.seen.append(next(copied.lightning_module.parameters()).detach().clone())


program(
    "disk: averages of weights", WEIGHTS, callbacks=lambda: [EMAWeightAveraging(decay=0.5)],
    covers="a callback reads all weights, and exchanges them in the end",
)(lambda: Module(Stack()))  # fmt: skip


@at_step("modules exchanged between steps", {**OFF, **WEIGHTS})
def _(m: Any) -> None:
    """The engine is built anew."""
    if m.batch == 1:
        m.net.extra = nn.Identity()
        m.net[0].extra = nn.Linear(2, 2)


program(
    "disk: layers unfrozen",
    {**OFF, **tiers(long=["weights on a disk, off", "gradients on a disk, off", "everything on a disk, off"])},
    callbacks=lambda: [Unfreezes()], max_epochs=3, covers="layers that get state in the second epoch",
)(lambda: Module(Stack()))  # fmt: skip


def all_on_disk(ours: Outcome) -> None:
    assert ours.module.noted == [len(list(ours.module.parameters()))] * 6


@at_step("all weights away between steps", {**WEIGHTS, "weights on a disk, backward": 3}, also=all_on_disk)
def _(m: Any) -> None:
    """Whatever the mode of updates is."""
    m.noted.append(sum(map(is_on_disk, m.parameters())))


@program(
    "disk: gradients read and written",
    {**BOTH, "everything on a disk, forward, bf16-mixed": 2, "everything on a disk, off, bf16-mixed": 3},
    at="on_before_optimizer_step", on=Deep,
)  # fmt: skip
def _(m: Any) -> None:
    """Before the step, in the ways in which user code does it; one is held until the next step."""
    parameters = list(m.parameters())
    m.seen += [float(p.grad.norm()) for p in parameters]
    m.seen += [each.clone() for each in m.kept]
    parameters[0].grad.mul_(0.5)
    parameters[1].grad = torch.ones_like(parameters[1])
    parameters[2].grad = None
    m.kept[:] = [parameters[3].grad]


class KeepsGradients(Module):
    """Gradients are set to zero in place, so that each batch's are added to them."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.noted: list[int] = []

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="norm")

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.noted.append(sum(is_on_disk(p.grad) for p in self.parameters() if p.grad is not None))
        optimizer.zero_grad(set_to_none=False)


def some_gradients_away(ours: Outcome) -> None:
    assert ours.module.noted[-1] > 0


program("disk: gradients set to zero in place", BOTH, also=some_gradients_away)(KeepsGradients)


@contextmanager
def nothing_is_forgotten() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped_file.libc, "fallocate", lambda *_: -1)
        yield


program(
    "disk: a file system that cannot forget", tiers(rest=["everything on a disk, forward"]), inside=nothing_is_forgotten,
    covers="gradients that are dropped are overwritten",
)(lambda: Module(Stack()))  # fmt: skip


@program("disk: layers in an order of each batch's own", EACH_STATE, batches=lambda: vectors(12))
class Skips(Module):
    """And not all of them."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(8))))
        self.batches = 0

    def loss(self, batch: Any) -> Any:
        self.batches += 1
        order = torch.randperm(8, generator=torch.Generator().manual_seed(self.batches))
        for index in order[: 3 + self.batches % 6].tolist():
            batch = self.net[index](batch)
        return batch.square().mean()


# ---------------------------------------------------------------------- other threads, other processes


def meanwhile(does: Callable[[Any], None]) -> Callable[[], Any]:
    """A module that trains while another thread does something, again and again."""

    def begins(m: Any) -> None:
        def run() -> None:
            try:
                while not over.is_set():
                    does(m)
                    m.noted.append("once")
            except Exception as error:
                m.noted.append(error)

        over, thread = threading.Event(), threading.Thread(target=run, daemon=True)
        thread.start()
        m.kept += [over, thread]

    def ends(m: Any) -> None:
        over, thread = m.kept
        over.set(), thread.join()

    return lambda: Deep(on_train_start=begins, on_train_end=ends)


def forks(_: Any) -> None:
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)


def reads_all(m: Any) -> None:
    for state in list(m.trainer.optimizers[0].state.values()):
        for value in list(state.values()):
            value.sum()


def nothing_but_that(ours: Outcome) -> None:
    assert set(ours.module.noted) == {"once"}


for does in (forks, reads_all):
    program(
        f"disk: {does.__name__} in another thread", tiers(long=["state on a disk, forward"]), batches=lambda: vectors(10),
        covers="something happens while layers are updated", also=nothing_but_that,
    )(meanwhile(does))  # fmt: skip


def read_in_fork(what: str, said: str, variant: str, value: Callable[[Any], Tensor], at: str) -> None:
    @program(
        f"disk: {what} in a forked process", tiers(long=[variant]), at=at, on=Deep,
        also=lambda ours: ours.module.noted[0].startswith(said) or pytest.fail(ours.module.noted[0]),
    )  # fmt: skip
    def _(m: Any) -> None:
        """It says that it cannot read them."""
        if is_on_disk(value(m)):
            m.noted.append(refusal_in_fork(lambda: value(m).norm()))


read_in_fork(
    "state", "This optimizer state is on a disk, in a file of the training process. A forked process cannot",
    "state on a disk, off", lambda m: states(m)[0]["exp_avg"], "on_train_batch_end",
)  # fmt: skip
read_in_fork(
    "weights",
    "This weight is on a disk",
    "weights on a disk, off",
    lambda m: next(m.parameters()),
    "on_train_batch_end",
)
read_in_fork(
    "gradients", "This gradient is on a disk", "gradients on a disk, off", lambda m: next(m.parameters()).grad,
    "on_before_optimizer_step",
)  # fmt: skip

# ---------------------------------------------------------------------- refused before work


def refused(name: str, said: str, variant: str = "state on a disk, off", **more: Any) -> Callable[[Any], Any]:
    return program(f"disk: {name}", tiers(rest=[variant]), refused={variant: said}, **more)


def lacking(patch_it: Callable[[pytest.MonkeyPatch], None]) -> Callable[[], Any]:
    @contextmanager
    def inside() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch_it(patch)
            yield

    return inside


def unmapped(*_: Any) -> int:
    ctypes.set_errno(errno.ENODEV)
    return 2**64 - 1  # MAP_FAILED


def unreserved(*_: Any) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


for lack, said, where, patch_it in (
    ("a system that maps no files", r"OSError: .*disk= needs Linux, because its files are mapped to memory\. Leave disk= out",
     "state", lambda patch: patch.setattr(mapped_file, "supported", lambda: False)),
    ("a system that refuses to map", r"OSError: .*of a scratch file could not be mapped \(No such device\)",
     "state", lambda patch: patch.setattr(mapped_file.libc, "mmap", unmapped)),
    ("a file system that reserves nothing",
     r"OSError: .*the file system cannot reserve space \(Operation not supported\). Name a folder",
     "state", lambda patch: patch.setattr(os, "posix_fallocate", unreserved)),
    *((f"no room for {what}", rf"OSError: .*of scratch space are needed for {what}, and .* \(No space left on device\)",
       what, fill_disk) for what in ("weights", "gradients")),
):  # fmt: skip
    refused(
        lack, said, f"{where} on a disk, off", inside=lacking(patch_it), callbacks=lambda: [NoBatch()],
        covers="it is refused before work begins",
    )(lambda: Module(Stack()))  # fmt: skip


@refused("an optimizer that is not known", "ValueError: .*Mine's is not", of=optimized)
class Mine(torch.optim.AdamW):
    """It could do anything."""


@refused(
    "sparse gradients", "RuntimeError: .*one by one, but '.*' has sparse gradients. Make embeddings with sparse=False"
)
class Sparse(Module):
    """Their state is not stepped layer by layer."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.table = nn.Embedding(8, 16, sparse=True)

    def loss(self, batch: Any) -> Tensor:
        return self.net(batch + self.table(torch.zeros(len(batch), dtype=torch.long))).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@program(
    "disk: momentum that some layers lack", tiers(rest=["state on a disk, backward"], long=OFF),
    refused={"state on a disk, backward":
             "RuntimeError: .*others have none yet. Pass optimizer_overlap='forward', or leave disk= out"},
)  # fmt: skip
class Late(Module):
    """The first batch leaves out the last block, whose momentum begins with the second."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.batches = 0

    def loss(self, batch: Any) -> Tensor:
        self.batches += 1
        for block in list(self.net.blocks)[: -1 if self.batches == 1 else None]:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


# ---------------------------------------------------------------------- several optimizers


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-2)


@contextmanager
def one_layer_at_a_time() -> Iterator[None]:
    """Memory has room for less than what two layers' state takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_tier, "place_state", lambda sizes, *_: StatePlacement({}, sizes, 2**13, 2**13))
        yield


def takes(name: str, take: Callable[[Any, Any], object], where: str, variants: Any) -> None:
    class Takes(Module):
        def __init__(self) -> None:
            super().__init__(Stack())
            self.before: Any = None

        def configure_optimizers(self) -> Any:
            optimizer = adamw(self.parameters())
            if self.before is not None:
                optimizer.param_groups[0]["fused"] = self.before.param_groups[0]["fused"]
                take(optimizer, self.before)
            self.before = optimizer
            return optimizer

        def exchanges(self) -> None:
            self.trainer.strategy.optimizers = [self.configure_optimizers()]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if where == "in a step" and batch_idx == 1:
                self.exchanges()
            return super().training_step(batch, batch_idx)

        def on_train_epoch_start(self) -> None:
            if where == "between epochs" and self.current_epoch:
                self.exchanges()

    program(
        f"disk: state that a new optimizer {name} {where}", variants, max_epochs=3, inside=one_layer_at_a_time,
        covers="it goes on from the state of the one before, which is on the disk",
    )(Takes)  # fmt: skip


def copies_entries(new: Any, old: Any) -> None:
    for parameter, state in old.state.items():
        new.state[parameter] = dict(state)


for name, take in (
    ("shares", lambda new, old: setattr(new, "state", old.state)),
    ("loads", lambda new, old: new.load_state_dict(old.state_dict())),
    ("copies", copies_entries),
):
    takes(name, take, "in a step", EACH_STATE if name == "loads" else tiers(long=EACH_STATE))
    takes(name, take, "between epochs", tiers(long=EACH_STATE))


class TwoByHand(Module):
    """One optimizer for the first half of the blocks, another one for the rest."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [adamw(each.parameters()) for each in (self.net.blocks[:2], self.net.blocks[2:])]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = self.optimizers()
        for optimizer in (first, second, first) if batch_idx % 2 else (second,):
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
        return loss


class Alternating(TwoByHand):
    """Both optimizers step all blocks, the second one with momentum alone."""

    def configure_optimizers(self) -> Any:
        return [adamw(self.parameters()), torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)]


class OneState(TwoByHand):
    """Both optimizers step all blocks, with one state."""

    def configure_optimizers(self) -> Any:
        one, other = (adamw(self.parameters()) for _ in range(2))
        other.state = one.state
        return [one, other]


BY_HAND = tiers(long=[f"state on a disk, {mode}{way}" for mode in LATE for way in ("", ", bf16-mixed")])
program(
    "disk: two optimizers by hand", {**BY_HAND, "state on a disk, backward": 2}, max_epochs=2, inside=one_layer_at_a_time,
    refused={"state on a disk, backward": r'ValueError: .*optimizer_overlap="backward" cannot be used: optimization is manual'},
)(TwoByHand)  # fmt: skip
program(
    "disk: two optimizers in turn", {**BY_HAND, "state on a disk, forward": 2}, max_epochs=2, inside=one_layer_at_a_time
)(Alternating)  # fmt: skip
program("disk: two optimizers with one state", BY_HAND, max_epochs=2, inside=one_layer_at_a_time)(OneState)


# ---------------------------------------------------------------------- steps of another kind


@program(
    "disk: steps that a scaler skips", tiers(rest=["everything on a disk, forward, simulated"]), precision="16-mixed"
)
class Infinite(Module):
    """The second batch's gradients are infinite."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 1 else loss


def each_layer_by_itself(ours: Outcome) -> None:
    assert len(ours.extra["inside"]) == 7 * 6


program(
    "disk: gradients without state", tiers(rest=["everything on a disk, off"]), of=optimized, inside=taken_apart,
    also=each_layer_by_itself, covers="gradients come by layers, although no state does",
)(lambda p: torch.optim.SGD(p, lr=0.1))  # fmt: skip


def share(name: str, blocks: tuple[int, int], variants: Any, **more: Any) -> None:
    @program(
        f"disk: state that two parameters of {name} share",
        variants,
        on=partial(At, TwoAlike, depth=5),
        at="on_train_batch_end",
        **more,
    )
    def _(m: Any) -> None:
        """What it becomes depends on the order of the updates, which is another one where layers are updated one by one."""
        if m.batch == 1:
            one, other = m.net[blocks[0]].q.weight, m.net[blocks[1]].k.weight
            m.optimizer.state[other]["exp_avg"] = m.optimizer.state[one]["exp_avg"]


SHARED = "RuntimeError: .*disk= updates layers one by one, but two parameters share a state"
share(
    "two layers", (1, 2),
    {**tiers("state on a disk, backward", long=["state on a disk, off", "state on a disk, forward"]),
     "forward, accumulated, clipped, two epochs": 3, "backward, accumulated, two epochs": 2},
    refused={f"state on a disk, {mode}": SHARED for mode in ("off", "forward", "backward")},
)  # fmt: skip
share(
    "a layer", (1, 1),
    {**tiers(rest=["state on a disk, backward"], long=["state on a disk, off", "state on a disk, forward"]),
     "forward, accumulated, clipped, two epochs": 3, "backward, accumulated, two epochs": 2},
    refused={f"state on a disk, {mode}": SHARED for mode in ("off", "forward", "backward")},
)  # fmt: skip
