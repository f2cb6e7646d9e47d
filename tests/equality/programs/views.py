"""Weights that have other memory, or are written through what somebody has taken within a step and kept.

A view of a plain weight is the weight's memory. Here a view that was taken in a step is device memory, and the optimizer
writes the host's. A write through such a view while modules hold the host's weights is an error. WGAN's clipping loop over
``list(self.net.parameters())``, taken in the first step and run in ``on_train_batch_end``, writes the weights themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from tests.equality.rows import program, tiers
from tests.support.loops import tie
from tests.support.models import Block, Module, Stack, vectors
from tests.support.moments import At, net_of, rebind
from tests.support.nets import Does

TAKE: dict[str, Any] = {
    "data": lambda weights: [w.data for w in weights],
    "detach": lambda weights: [w.detach() for w in weights],
    "view": lambda weights: [w[0] for w in weights],
    "data of a view": lambda weights: [w[0].data for w in weights],
    "parameters": lambda weights: list(weights),
    "data of parameters": lambda weights: list(weights),
    "numpy": lambda weights: [w.detach().numpy() for w in weights],
    "storage": lambda weights: [(w.untyped_storage(), w.storage_offset(), w.shape) for w in weights],
}
NOTED = ("keep, k=1", "users, k=all", "stays: net.1")
EACH = tiers(rest=NOTED, long=[f"{each}, simulated" for each in ("keep, k=1", "stays: net.1")])
FOUR = partial(vectors, 4)


def views(name: str, variants: Any = EACH, **more: Any) -> Any:
    covers = more.pop("covers", "the weight itself, or its memory, was kept")
    return program(f"views: {name}", variants, batches=more.pop("batches", FOUR), covers=covers, **more)


def scale(kept: Any, kind: str) -> Any:
    with torch.no_grad():
        for each in kept:
            if kind == "numpy":
                each *= 0.9
            elif kind == "storage":
                torch.empty(0).set_(*each).mul_(0.9)
            else:
                (each.data if kind == "data of parameters" else each).mul_(0.9)


def keeps(kind: str, taken: str, written: str, manual: bool) -> At:
    """Takes weights at one moment of a batch, writes them at another one, and drops them then."""

    def take(m: At) -> None:
        if not m.kept:
            m.kept.append(TAKE[kind]([layer.first.weight for layer in m.net]))

    def write(m: At) -> None:
        if m.kept:
            scale(m.kept.pop(), kind)

    # By moment, what is done there first and second.
    done = {
        "start": ((written == "next batch", write), (taken == "start", take)),
        "after_forward": ((taken == "after forward", take), (written == "before backward", write)),
        "after_backward": ((taken == "after backward", take), (written == "before step", write)),
        "after_step": ((written == "after step", write),),
        "on_train_batch_end": ((written == "batch end", write),),
    }
    moments = {moment: [code for now, code in each if now] for moment, each in done.items()}
    return At(
        manual=manual,
        **{moment: lambda m, codes=codes: [code(m) for code in codes] for moment, codes in moments.items() if codes},
    )


LATE = r"RuntimeError: .*'net\.\d\.first\.weight' was written through a view .*module\.weight\.data"
LATELY = {**tiers("users, k=1", rest=NOTED), "k=1": 2}
for kind, taken, written, manual in (
    ("data", "start", "before step", True), ("view", "start", "batch end", False), ("data", "start", "batch end", False)
):  # fmt: skip
    views(f"{kind}, taken at {taken}, written at {written}", LATELY, refused=dict.fromkeys(LATELY, LATE),
          repairable=False)(partial(keeps, kind, taken, written, manual))  # fmt: skip
for kind, taken, written, manual in (
    ("detach", "after forward", "after step", True), ("data", "start", "after step", True),
    ("detach", "start", "next batch", False),
):  # fmt: skip
    views(f"{kind}, taken at {taken}, written at {written}", {**EACH, "k=1": 2})(
        partial(keeps, kind, taken, written, manual)
    )


def writes_in_place(whose: str, m: At) -> None:
    """After a forward of the same step, which may be going on on a device: the write did not wait for the transfers.

    Schedule-free optimizers' ``train()``, averages that are put back, and evolution strategies write so within a step.
    """
    with torch.no_grad():
        m.net(torch.ones(2, 16))
        for p in m.optimizer.param_groups[0]["params"] if whose == "optimizer" else m.parameters():
            p.add_(0.01)


for whose in ("optimizer", "module"):
    views(f"written in place in a step, the {whose}'s", covers="a forward may read them")(
        partial(At, manual=True, start=partial(writes_in_place, whose))
    )


def take_once(m: At) -> None:
    if not m.kept:
        m.kept.append(list(m.net.parameters()))


def clip(m: At) -> None:
    """WGAN: weights are taken lazily, in the first step, and clipped after each batch."""
    for p in m.kept[0]:
        p.data.clamp_(-0.1, 0.1)
    torch._foreach_mul_([p.data for p in m.kept[0]], 0.9)
    with torch.no_grad():
        m.kept[0][0].add_(m.kept[0][0].grad)
    assert torch.equal(m.kept[0][0], next(m.net.parameters()))  # it is the weight that modules hold


def take(kind: str, m: At) -> None:
    if not m.kept:
        m.kept.append(TAKE[kind]([layer.first.weight for layer in m.net]))


def writes_both(m: At) -> None:
    """The host's weight is written through ``.data``, and a view of the device's that was taken before."""
    if m.kept:
        m.net[1].first.weight.data.add_(0.1)
        scale(m.kept.pop(), "data")


def sums(m: At) -> None:
    """It is read in each batch, and never written."""
    m.seen.append([view.sum().item() for view in m.kept[0]])


views("parameters clipped between steps", {**EACH, "keep, k=1, bf16-mixed": 3}, covers="they are the hosts' then")(
    partial(At, start=take_once, on_train_batch_end=clip)
)
ways = tiers("users, k=1", rest=["stays: net.1"])
views("written in both ways", ways, refused=dict.fromkeys(ways, LATE), repairable=False)(
    partial(At, start=partial(take, "data"), on_train_batch_end=writes_both)
)
views("kept for long", covers="it follows its weight")(
    partial(At, start=partial(take, "data"), on_train_batch_end=sums)
)


@views("read after a step of the user's")
class ReadsAfterStep(At):
    """And after a write of the weight: the slots are uploaded again then, and computation has to wait for it."""

    def __init__(self) -> None:
        super().__init__(manual=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        kept = TAKE["view"]([self.net[at].first.weight for at in (0, 2)])
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.seen.append([view.sum().item() for view in kept])
        with torch.no_grad():
            self.net[0].first.weight.mul_(0.5)
        self.seen.append([view.sum().item() for view in kept])
        optimizer.zero_grad()


def writes_in_backward(kind: str, taken: int, written: int) -> At:
    """Writes a kept view in a hook of the first layer, when backward has updated the last one."""

    def loss(m: At, batch: Tensor) -> Tensor:
        if m.batch == taken:
            m.kept.append(TAKE[kind]([m.net[-1].first.weight]))
        hidden = m.net[0](batch)
        if m.batch == written:
            hidden.register_hook(lambda _: scale(m.kept.pop(), kind))
        return m.net[1:](hidden).square().mean()

    return At(loss=loss)


# The update leaves nothing that may have been written, but a view does not end with it: the layer is updated after backward then.
LATE, FREED = "backward, accumulated, two epochs", "one pass under backward"
for kind, (before, after) in product(("data", "detach", "view"), ((0, 0), (0, 1))):
    views(
        f"{kind} of batch {before} written in a backward of batch {after} that updates", tiers(rest=[LATE, FREED]),
        precision="32-true", max_epochs=1, accumulate_grad_batches=1,
    )(partial(writes_in_backward, kind, before, after))  # fmt: skip


def gives_a_neighbour_memory(m: At) -> None:
    """Keeps a view of one weight, and gives another one of the layer other memory in the same step."""
    if m.batch == 1:
        one, other = m.net[1].first.weight, m.net[1].second.weight
        m.kept.append(TAKE["data"]([other]))
        one.data = one.data * 0.5


views("data of a neighbour is written", tiers("users, k=1", rest=NOTED[1:]))(
    partial(At, start=gives_a_neighbour_memory, after_forward=lambda m: m.kept and scale(m.kept.pop(), "data"))
)

# ---------------------------------------------------------------------- other memory before a run and between two epochs


class Permuted(nn.Module):
    """A block of a flow: a permutation, and its transpose for the way back, are views of one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        permutation = torch.eye(16)[torch.randperm(16)]
        self.forth = nn.Parameter(permutation, requires_grad=False)
        self.back = nn.Parameter(permutation.t(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x @ self.forth)) @ self.back


views("frozen parameters over one memory", tiers(rest=["keep, k=1"]), validated=True, covers="they get a copy each")(
    partial(At, Permuted)
)
views(
    "parameters over one memory that are thawed", tiers("keep, k=1"), max_epochs=2, repairable=False,
    refused={"keep, k=1": r"ValueError: .*'net.1.*' are two Parameter objects over the same memory"},
)(partial(At, Permuted, on_train_epoch_start=lambda m: m.net[1].back.requires_grad_(m.current_epoch == 1)))  # fmt: skip


class Tied(At):
    """A net outside of the module has its weights, and acts before each batch."""

    def __init__(self, moment: str) -> None:
        def tie_it(m: Any) -> None:
            m.kept[:] = [net_of()]
            tie(m.kept[0], m.net)

        super().__init__(**{moment: tie_it, "on_train_batch_start": self.act})

    def act(self, _: Any) -> None:
        with torch.no_grad():
            self.seen.append(self.kept[0](vectors(1)[0]))


views("a net outside of the module, tied at set-up", tiers("users, k=1", rest=["keep, k=1, simulated"]),
      covers="the memory has moved, so the tie holds")(partial(Tied, "on_fit_start"))  # fmt: skip
views("a net outside of the module, tied before", tiers("users, k=1"), repairable=False,
      refused={"users, k=1": r"ValueError: .*'net.0.first.weight' shares its memory with 'weight' of a Linear.*on_fit_start"},
)(partial(Tied, "init"))  # fmt: skip


class Rebinds(Module):
    """Gives weights other memory before the second epoch: the layers are packed again."""

    def __init__(self, how: str) -> None:
        super().__init__(Stack())
        self.how = how

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            PACKED[self.how](self.net)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch.to(next(self.net.parameters()).dtype))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


PACKED: dict[str, Any] = {
    "to": lambda net: net.blocks[1].to(torch.float64).to(torch.float32),
    "assign": lambda net: net.load_state_dict({n: 0.5 * v.clone() for n, v in net.state_dict().items()}, assign=True),
    "replace": lambda net: net.blocks.__setitem__(2, Block().requires_grad_(False)),
    "double": lambda net: net.double(),
}
for how in PACKED:
    views(
        f"other memory between two epochs, {how}",
        tiers(rest=["users, k=1"]),
        max_epochs=3,
        covers="layers are packed again",
    )(partial(Rebinds, how))
views(
    "other dtypes outside a step", tiers("users, k=1"), repairable=False,
    callbacks=lambda: [Does(on_fit_start=lambda trainer, m: (m.net.double(), m.net(torch.ones(2, 16).double())))],
    covers="layers are not packed again in the middle of a step, or outside of any",
    refused={"users, k=1": r".*'net\.stem\.weight' is torch\.float64 .*Expected torch\.float32 .*between two batches"},
)(lambda: Module(Stack()))  # fmt: skip
views(
    "other memory before a prediction", tiers("users, k=2", rest=["stays: net"]), run="predict",
    callbacks=lambda: [Does(on_predict_start=lambda trainer, m: [rebind(p) for p in m.parameters()])],
    covers="before the first batch, in inference mode",
)(lambda: Module(net_of()))  # fmt: skip

# ---------------------------------------------------------------------- tensors of a state_dict() that are kept


class KeepsState(At):
    """Keeps a layer's ``state_dict()``, which gives references, and views of it; gives weights other memory later."""

    def __init__(self, names: tuple[str, ...] = (), *, writes: bool = False, **moments: str) -> None:
        at = {moment: lambda m, name=name: m.batch == 3 and m.exchange(name) for moment, name in moments.items()}
        super().__init__(**at)
        self.names, self.writes = names, writes

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            state = self.net[0].state_dict()
            self.kept = [state, {name: value[:2] for name, value in state.items()}]

    def on_train_batch_end(self, *_: Any) -> None:
        if self.batch == 3:
            if self.writes:
                self.kept[0]["first.weight"].mul_(0.5)
            for name in self.names:
                self.exchange(name)
            if self.writes:
                self.kept[0]["first.bias"].fill_(3.0)
        self.seen.append([value.clone() for each in self.kept for value in each.values()])

    def exchange(self, name: str) -> None:
        rebind(self.net[0].get_parameter(name))


# Those of a layer's other weights did not; and where a step had exchanged a weight, its old tensor showed new values.
for name, make in {
    "one": partial(KeepsState, ("first.bias",)),
    "two": partial(KeepsState, ("first.bias", "second.weight")),
    "all": partial(KeepsState, ("first.weight", "first.bias", "second.weight", "second.bias")),
    "written, too": partial(KeepsState, ("first.bias",), writes=True),
}.items():
    views(
        f"a kept state, {name}",
        tiers(rest=["users, k=1, bf16-mixed, simulated"], long=["users, k=1, simulated", "stays: net, simulated"]),
        batches=partial(vectors, 6), covers="kept tensors follow the weights that keep their memory",
    )(make)  # fmt: skip
KEPT_STATE = r"RuntimeError: Parameter 'net\.0\.first\.bias' was given a tensor .*a state_dict\(\)"
views("a kept state, in a step", tiers("users, k=1", rest=["users, k=1, bf16-mixed"]), batches=partial(vectors, 6),
      refused=dict.fromkeys(["users, k=1", "users, k=1, bf16-mixed"], KEPT_STATE), repairable=False,
      covers="it has the host's memory of the weight")(partial(KeepsState, start="first.bias"))  # fmt: skip


class KeepsTheOldMemory(At):
    """Gives a weight other memory between two steps and keeps the old, as a swap of averages does; writes it in the next."""

    def __init__(self, write: Any) -> None:
        super().__init__(start=lambda m: write(m.net[1].first.weight.data, m.net[2].first.weight.data))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        weight = self.net[1].first.weight
        if batch_idx == 1:
            self.kept.append(weight.data)
            rebind(weight)


def not_out_of_date_for_ever(ours: Any) -> None:
    fetches = ours.trainer.strategy.fetches()
    assert fetches.get("net.1", 0) <= fetches["net.2"] + 2


for name, write in {"copy": lambda one, other: one.copy_(other), "mul": lambda one, other: one.mul_(0.9)}.items():
    views(f"old memory left to user code, {name}", tiers(rest=["users, k=1", "stays: net.1"]), batches=partial(vectors, 5),
          also=not_out_of_date_for_ever)(partial(KeepsTheOldMemory, write))  # fmt: skip


class Given(nn.Module):
    """Gives its weight other memory in the first call of a step, and keeps that memory.

    Args:
        scale: the new values in relation to the old ones.
        first: runs in the first call after that, and the second one in later calls. It gets the block and the memory.
    """

    def __init__(
        self, scale: float, first: Callable[[Any, Tensor], object], later: Callable[[Any, Tensor], object]
    ) -> None:
        super().__init__()
        self.linear, self.scale, self.moments = nn.Linear(16, 16), scale, (first, later)
        self.given, self.other = list[Tensor](), list[nn.Linear]()

    def forward(self, x: Tensor) -> Tensor:
        first, later = self.moments
        if not self.given:
            self.given.append(self.linear.weight.data * self.scale)
            self.linear.weight.data = self.given[0]
            first(self, self.given[0])
        else:
            later(self, self.given[0])
        return torch.tanh(self.linear(x))


def nothing(block: Any, given: Tensor) -> None: ...


def halves(block: Any, given: Tensor) -> None:
    given.mul_(0.5)


def between_calls(changes: bool, m: Any, batch: Tensor) -> Tensor:
    for block in m.net:
        block.given.clear()
    with torch.no_grad():
        m.net(batch)
        for block in m.net if changes else ():
            block.given[0].mul_(0.5)
        m.seen.append(m.net(batch).clone())
    return m.net(batch).square().mean()  # type: ignore[no-any-return]


APART = r"RuntimeError: Parameter 'net\.\d\.linear\.weight' was given a tensor .*other\.clone\(\)"
for changes, writes in ((True, False), (False, True)):
    views(
        f"given memory {'written' if changes else 'left'} between two calls, {'and in them' if writes else 'alone'}",
        tiers("keep, k=1", rest=["keep, k=1, bf16-mixed"]), repairable=False,
        refused=dict.fromkeys(("keep, k=1", "keep, k=1, bf16-mixed"), APART),
    )(partial(At, partial(Given, 0.5, nothing, halves if writes else nothing), loss=partial(between_calls, changes)))  # fmt: skip


class Scaled(nn.Module):
    """Backward reads the scale as autograd has saved it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(16, 16), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)) * self.scale


def for_a_while(m: At) -> None:
    """Calls a layer in another dtype, and gives it its own dtype back: later backwards read the values from before."""
    if m.batch == 1:
        with torch.no_grad():
            m.net[1].double()
            m.net[1](torch.ones(2, 16, dtype=torch.double))
            m.net[1].float()


for moment in ("start", "after_forward"):
    views(f"another dtype for a while, {moment}", tiers(rest=["keep, k=1, simulated"]))(
        partial(At, Scaled, **{moment: for_a_while})
    )

# ---------------------------------------------------------------------- what is given or kept, and written in a later call


def two_calls(m: At, batch: Tensor) -> Tensor:
    blocks: list[Any] = [*m.net.children()]
    for block, other in zip(blocks, [*blocks[1:], blocks[0]], strict=True):
        block.given.clear()
        block.other[:] = [other.linear]
    m.seen.append(m.net(batch).detach().clone())
    result: Tensor = m.net(batch).square().mean()
    return result


WINDOWS = tiers("users, k=1, two epochs", "bf16-mixed, k=1", rest=["users, k=all, two epochs", "simulated, bf16-mixed"])


def replaced(block: Any, given: Tensor) -> None:
    block.linear.weight.data.copy_(0.5 * given)


@program("given memory: a copy is written in a later call", WINDOWS, on=partial(At, loss=two_calls), at="block")
def _() -> nn.Module:
    """As the error for given memory advises: the weight is written, and the tensor that it was given stays as it was."""

    def forgets(block: Any, given: Tensor) -> None:
        block.given[0] = given.clone()

    return Given(0.5, forgets, replaced)


RESIDENT = tiers("users, k=1, two epochs", rest=["simulated, k=1"])


class OutsideAllLayers(At):
    """The first block belongs to no layer. User code has its first weight from ``__init__``."""

    def __init__(self, *, manual: bool = False, **moments: Any) -> None:
        super().__init__(manual=manual, **moments)
        self.captured = [self.net[0].first.weight]

    @property
    def weight(self) -> Any:
        return self.net[0].first.weight


@program(
    "kept parameter: written between a backward and its step", tiers("users, k=1, two epochs"),
    on=partial(OutsideAllLayers, manual=True), strategy={"keep_on_gpu": ["net.0"]}, at="start",
)  # fmt: skip
def _(m: OutsideAllLayers) -> None:
    """Modules hold host parameters then, so the write is copied to the host at once, and the next one is noticed."""
    m.moments["after_backward"] = after_backward
    m.kept[:] = [m.weight]


def after_backward(m: Any) -> None:
    with torch.no_grad():
        for _ in range(2):
            m.kept[0].mul_(0.9)
            m.seen.append(m.weight.detach().clone())


@program(
    "captured parameter: read after a write of the module's", RESIDENT, on=OutsideAllLayers,
    strategy={"keep_on_gpu": ["net.0"]}, at="start",
)  # fmt: skip
@torch.no_grad()
def _(m: OutsideAllLayers) -> None:
    """The weight is on the device alone until the host's is read."""
    m.weight.mul_(0.9)
    m.seen.append(m.captured[0].clone())


@program(
    "kept view: of a weight outside all layers, read after the step", RESIDENT, on=OutsideAllLayers,
    strategy={"keep_on_gpu": ["net.0"]}, at="start",
)  # fmt: skip
def _(m: Any) -> None:
    """The step has written the host's weight, and the view has to show it."""
    if not m.kept:
        m.kept.append(m.weight.data)
        m.on_train_batch_end = lambda *_: m.seen.append(m.kept[0].clone())
