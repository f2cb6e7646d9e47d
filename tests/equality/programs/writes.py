"""Weights that user code writes: who keeps what, when it is written, in which mode.

Plain autograd keeps the *old* values of a weight that is given a tensor (``param.data = other``) where it saved a view of it (a
linear layer saves its transpose), and sees the *new* ones where it saved the weight itself (a convolution does). Here the
tensor is copied, which autograd refuses. ``views.py`` has views that are taken at one moment and written at another one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from tests.equality.rows import program
from tests.support.models import Copies, vectors
from tests.support.moments import (
    WRITES,
    At,
    CastBlock,
    Checkpointed,
    Code,
    Convolutions,
    GivesItsOwnValues,
    Linears,
    Scalars,
    add_then_multiply,
    each,
    in_8_bits,
    multiply,
    multiply_then_rebind,
    rebind,
    rebind_then_multiply,
    rebind_twice,
)
from tests.support.runs import Make

USERS = ("users, k=1", "users, k=all")
MODES = (
    *USERS, "offload, k=1", "recompute, k=2", "stays: net", "stays: **.second", "keep, k=1, bf16-mixed", "k=1",
    "keep, k=1, simulated",
)  # fmt: skip
HOSTS = tuple(mode for mode in MODES if mode != "k=1")
"""For code that holds the host's weights, which the poison overwrites."""
_numbers = count()


def row(
    name: str, make: Make, refused: str | Mapping[str, str] = "", modes: Sequence[str] = MODES, **more: Any
) -> None:
    """Every third row is in the first tier, in the modes that other modes are like; the second has every other mode."""
    if isinstance(refused, str):
        refused = {mode: refused for mode in modes if refused}
    refused = {mode: f".*{said}" for mode, said in refused.items() if mode in modes}
    number = next(_numbers)
    quick = number % 3 == 0 and not name.endswith(("convolution", "scalar"))
    tiers = {
        mode: 1 if quick and mode in (modes[0], *refused) else 2 if (number + place) % 2 or len(modes) < 4 else 3
        for place, mode in enumerate(modes)
    }
    tiers.update({mode: 3 for mode in modes if mode.endswith(("simulated", "bf16-true"))})
    covers = more.pop("covers", "weights that user code writes at a moment of its own")
    program(f"writes: {name}", tiers, refused=refused, covers=covers, **more)(make)


def at(
    name: str,
    refused: str | Mapping[str, str] = "",
    modes: Sequence[str] = MODES,
    *,
    options: Any = None,
    **moments: Any,
) -> None:
    """A row of code at moments of a training; ``options`` are those of the trainer."""
    row(name, partial(At, **moments), refused, modes, **(options or {}))


IN_PLACE = "modified by an inplace operation"
"""Autograd's own error: a weight was given a tensor between its forward and its backward."""
CASTS = {"keep, k=1, bf16-mixed": IN_PLACE}
"""Plain autograd has casts of its own, which a write of the weight does not change."""
HELD = r"was given a tensor inside a step .*param\.data\.clone\(\)"
APART = r"was given a tensor inside a step .*other\.clone\(\)"
MORE = ("bf16-true", "stays: **.second, offload, simulated")
GIVES = (rebind, rebind_twice, rebind_then_multiply, multiply_then_rebind)
"""The writes that give a weight a tensor."""
MODIFIED = {"recompute, k=2": r"'\w+\.\w+' of 'net\.\d' has been modified .*\"offload\""}
"""The second run of a layer would compute with other weights than the first one."""
AS_CHECKPOINTED = {"checkpointed": True}
TWO_EPOCHS = {"max_epochs": 2}
BLOCKS = {"linear": Linears, "convolution": Convolutions, "scalar": Scalars}

# ---------------------------------------------------------------------- all weights, between forward and backward

for write in WRITES:
    refused = {**(dict.fromkeys((*MODES, *MORE), IN_PLACE) if write in GIVES else CASTS), **MODIFIED}
    for kind, block in BLOCKS.items():
        more = MORE if block is Linears else MORE[:1]
        at(
            f"{write.__name__} after the forward, {kind}",
            refused,
            (*MODES, *more),
            block=block,
            after_forward=each(write),
        )
    # The layer that is written last is the first to be called.
    last_first = lambda m, write=write: [write(p) for p in reversed(list(m.net.parameters()))]  # noqa: E731
    at(f"{write.__name__} before the forward", start=last_first)
    at(  # the last layer is in use when its second run begins
        f"{write.__name__} of the last layer",
        refused,
        after_forward=lambda m, write=write: write(m.net[3].second.weight),
    )


def by_references(m: At) -> None:
    """Through an optimizer of one's own, made before the run: it holds the host's parameters."""
    m.seen.append([p.detach().norm() for p in m.net[-1].parameters()])  # the layer is in use from here on
    for p in m.kept[0]:
        rebind(p)


def keep(m: At) -> None:
    m.kept.append(list(m.net.parameters()))


def twice(m: At, batch: Tensor) -> Tensor:
    first = m.net(batch).square().mean()
    m.at("after_forward")
    return first + m.net(2 * batch).square().mean()


def standardize(layer: Any, *_: Any) -> None:
    """Weight standardisation before each call: the call saves memory that the weight was given."""
    weight = layer.first.weight
    weight.data = (weight.data - weight.data.mean()) / (weight.data.std() + 0.5)


def standardized(m: At) -> None:
    for layer in m.net:
        layer.register_forward_pre_hook(standardize)


for kind in ("linear", "convolution"):
    here = partial(at, block=BLOCKS[kind])
    gives = {**dict.fromkeys(MODES, IN_PLACE), **MODIFIED}
    elsewhere = {
        mode: said for mode, said in gives.items() if mode != "stays: net"
    }  # the host's weights are given the tensors
    here(f"references from before, {kind}", elsewhere, HOSTS, init=keep, after_forward=by_references)
    here(f"a hook before backward, {kind}", gives, on_before_backward=each(rebind))
    here(f"rebind after each of two forwards, {kind}", gives, loss=twice, after_forward=each(rebind))
    for write in (multiply, add_then_multiply):
        refused = {**CASTS, **MODIFIED}
        here(
            f"given other memory, then {write.__name__}, {kind}", refused, start=each(rebind), after_forward=each(write)
        )
        here(f"standardized, then {write.__name__}, {kind}", MODIFIED, init=standardized, after_forward=each(write))


def writes_group(m: At) -> None:
    for p in m.optimizer.param_groups[0]["params"]:
        p.data.mul_(0.9)


def blended_by_detached(m: At) -> None:
    """The write was counted twice: by its version, and when the host took it over, perhaps after the first run."""
    p, q = m.net[0].first.weight, m.net[2].first.weight
    p.detach().add_(q.detach(), alpha=0.1)
    p.data = p.data * 0.9
    with torch.no_grad():
        p.add_(q, alpha=0.1)


def other_leaves(m: At, batch: Tensor) -> Tensor:
    """Leaves that are not streamed weights: a free tensor, a buffer, a parameter that the module does not list."""
    if not hasattr(m, "scale"):
        m.register_buffer("scale", torch.full((16,), 2.0))
        m.kept.append(nn.Parameter(torch.ones(16)))
    free = torch.full((16,), 1.5, requires_grad=True)
    x = m.net(batch) * m.scale * free * m.kept[0]
    loss = (x * x.detach()).mean()
    for leaf in (free, m.scale, m.kept[0]):
        leaf.data = leaf.data * 0.5
    return loss


def inside_checkpoint(m: At, batch: Tensor) -> Tensor:
    """Inside a user's checkpoint the engine packs nothing, and each use releases its layer at once."""

    def run(x: Tensor) -> Tensor:
        weight = m.net[3].second.weight
        m.seen.append(weight.data.norm())
        if len(m.seen) % 2:
            weight.data = weight.data * 0.5
        return m.net[0](x)

    y = checkpoint(run, batch, use_reentrant=False)
    m.seen.append(m.net[3].second.weight.data.norm())
    return m.net(y).square().mean()


def through_old_views(m: At, batch: Tensor) -> Tensor:
    """An average over ``[p.detach() for p in …]``, taken before a forward and written after it."""
    views = [layer.second.weight.detach() for layer in m.net] + [m.net[1].first.weight.data]
    m.net(batch)
    if m.batch == 2:
        torch._foreach_mul_(views, 0.5)
    return m.net(batch).square().mean()


def captured_in_place(m: At, batch: Tensor) -> Tensor:
    """Writes in place through references from before the step change a version, and are seen within the step."""
    with torch.no_grad():
        m.net(batch)
        for p in m.kept[0]:
            p.mul_(0.9)
    return m.net(batch).square().mean()


at("a hook before gradients are set to None", CASTS, options=AS_CHECKPOINTED, on_before_zero_grad=each(multiply))
at("the optimizer's weights before backward", CASTS, options=AS_CHECKPOINTED, on_before_zero_grad=writes_group)
at("only read", after_forward=lambda m: m.seen.append([p.data.norm() for p in m.net.parameters()]))
at("a detached weight before the forward", start=blended_by_detached)
at("old views between two forwards", loss=through_old_views)
at("captured weights in place", modes=HOSTS, init=keep, loss=captured_in_place)
at("other leaves", modes=("users, k=1", "offload, k=1"), loss=other_leaves)
at("inside a checkpoint", modes=(*USERS, "offload, k=1", "keep, k=1, bf16-mixed"), loss=inside_checkpoint)

# ---------------------------------------------------------------------- averages: BYOL, MoCo


def followed(m: At, batch: Tensor) -> Tensor:
    return F.mse_loss(m.net(batch), m.target(batch)) + m.net(batch * 2).square().mean()


def with_target(trained: bool, m: At) -> None:
    """Adds a target network."""
    m.target = copy.deepcopy(m.net).requires_grad_(trained)
    m.kept += [list(m.net.parameters()), list(m.target.parameters())]


def pairs(m: At) -> Iterator[tuple[Any, Any]]:
    return zip(m.net.parameters(), m.target.parameters(), strict=True)


def byol(m: At) -> None:
    for p, pt in pairs(m):
        pt.data = 0.9 * pt.data + 0.1 * p.data


def blends_in_place(m: At) -> None:
    """Reading ``p`` released the layer of ``pt``, and the write to the new memory was lost."""
    for p, pt in pairs(m):
        pt.data = pt.data * 0.9
        pt.data.add_(p.data, alpha=0.1)


def by_state_dict(m: At) -> None:
    """Its tensors are detached: writes of their ``.data`` were lost."""
    new = m.net.state_dict()
    for name, value in m.target.state_dict().items():
        value.data.copy_(value.data * 0.9 + new[name].data * 0.1)


def by_detach(m: At) -> None:
    for p, pt in pairs(m):
        pt.detach().data.lerp_(p.detach(), 0.1)


def by_old_references(m: At) -> None:
    for p, pt in zip(*m.kept, strict=True):
        pt.data = pt.data * 0.9 + p.data * 0.1


# Residents are plain parameters within a step, and no class notices that they are detached: such writes are not detected.
DETACHED = tuple(mode for mode in MODES if mode != "stays: **.second")
MODES_OF_AVERAGES = {
    byol: (*MODES, "stays: target"), blends_in_place: (*MODES, "stays: target"), by_state_dict: DETACHED, by_detach: DETACHED,
    by_old_references: (*HOSTS, "stays: target"),
}  # fmt: skip
for (follow, modes), trained, moment in product(MODES_OF_AVERAGES.items(), (True, False), ("start", "after_forward")):
    if moment == "start" or follow in (byol, blends_in_place):
        at(
            f"{follow.__name__}, {'trained' if trained else 'frozen'}, {moment}",
            {**dict.fromkeys(modes, IN_PLACE), "recompute, k=2": r"of 'target\.\d' has been modified"}
            if trained and moment == "after_forward" else {},
            modes, init=partial(with_target, trained), loss=followed, **{moment: follow},
        )  # fmt: skip

# ---------------------------------------------------------------------- between batches, and between two backwards


def swaps_data(m: At) -> None:
    """Weights and their running mean are exchanged by ``.data`` for validation, and back."""
    for p, mean in pairs(m):
        mean.data.lerp_(p.data, 0.1)
        p.data, mean.data = mean.data, p.data
    m.seen.append(m.net(torch.ones(2, 16)).sum().item())
    one, other = m.net[0].second.weight, m.net[2].second.weight
    one.data, other.data = other.data, one.data


def in_batch(number: int, code: Code) -> Code:
    return lambda m: code(m) if m.batch == number else None


def transposes(m: At) -> None:
    """Same address, shape and dtype, other strides."""
    weight = m.net[3].second.weight
    weight.data = weight.data.t()


def calls_then_writes(m: At) -> None:
    """A transfer that the call began must not be reading the weights any more."""
    with torch.no_grad():
        m.seen.append(m.net(torch.ones(2, 16)).sum().item())
    m.net[1].first.weight.data.mul_(0.5)


def in_place(m: At) -> None:
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(0.97)


def keeps_old_memory(m: At) -> None:
    weight = m.net[2].norm.weight
    m.kept[:] = [weight.data]
    weight.data = weight.data.clone()


class OptimizerWrites(At):
    """Weight noise around the closure: after ``on_train_batch_start``, before ``training_step``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self.how == "hook":
            each(multiply)(self)
        super().optimizer_step(*args, **kwargs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        shake = lambda *_: each(multiply)(self) and None  # noqa: E731

        class Shakes(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                shake()
                return super().step(closure)

        optimizer = (Shakes if self.how == "optimizer" else torch.optim.SGD)(self.parameters(), lr=0.1)
        if self.how == "pre-hook":
            optimizer.register_step_pre_hook(shake)
        return optimizer


class Sharpness(At):
    """SAM by hand: weights are moved along the gradient between two backwards of one step."""

    def __init__(self) -> None:
        super().__init__(manual=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.move()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.back()
        optimizer.step()
        return loss

    def move(self) -> None:
        self.moves = [0.1 * p.grad for p in self.parameters()]
        for p, move in zip(self.parameters(), self.moves, strict=True):
            p.data.add_(move)

    def back(self) -> None:
        for p, move in zip(self.parameters(), self.moves, strict=True):
            p.data.sub_(move)


class Adversarial(Sharpness):
    """FGM by hand: a weight is moved along its gradient for a second backward, and given its old values as other memory."""

    def move(self) -> None:
        weight: Any = self.net[0].first.weight
        self.before = weight.data.clone()
        weight.data.add_(0.5 * weight.grad / weight.grad.norm())

    def back(self) -> None:
        self.net[0].first.weight.data = self.before


def called(m: At) -> Any:
    m.seen.append(m.net(torch.ones(1, 16)).sum().item())


rebound = lambda m: (each(rebind)(m), called(m))  # noqa: E731
at("rebound at an epoch's start, then called", options=TWO_EPOCHS, on_train_epoch_start=rebound)
at("data is exchanged with an average", "", HOSTS, options=TWO_EPOCHS, init=partial(with_target, False),
   on_train_batch_end=swaps_data)  # fmt: skip
at("memory is shared in place", start=in_batch(1, lambda m: m.net[1].first.weight.detach().share_memory_()))
at("transposed between batches", on_train_batch_start=in_batch(0, transposes))
at("called, then written, after a batch", on_train_batch_end=calls_then_writes)
row("copied", Copies, modes=(*USERS, "offload, k=1", "keep, k=1, bf16-mixed", "keep, k=1, simulated"))
at("a norm's old memory is kept", MODIFIED, block=Convolutions, on_before_zero_grad=keeps_old_memory)
row("between two backwards", Sharpness)
row("moved for a second backward", Adversarial)
for how in ("hook", "optimizer", "pre-hook"):
    row(f"the optimizer's {how}", partial(OptimizerWrites, how))
for hook in ("on_validation_batch_end", "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end"):
    at(f"written in {hook}", options={"validated": True, **TWO_EPOCHS}, **{hook: in_place})

# ---------------------------------------------------------------------- refused


def ties(one: str, other: str) -> Code:
    return lambda m: setattr(m.net.get_parameter(one), "data", m.net.get_parameter(other).data)


def new_memory_for_two(one: str, other: str) -> Code:
    def tie(m: At) -> None:
        p, q = m.net.get_parameter(one), m.net.get_parameter(other)
        p.data = q.data = torch.ones_like(p)

    return tie


def given(value: Callable[[Tensor], Tensor]) -> Code:
    """Gives a weight other data within a step."""
    return lambda m: setattr(m.net[1].first.weight, "data", value(m.net[1].first.weight.data))


SECOND_AND_THIRD = r"'net\.2\.second\.weight' was given the memory of 'net\.3\.second\.weight'.*data\.clone\(\)"
TIED = r"was given the memory of 'net\.\d\.(first|second)\.weight'.*data\.clone\(\)"
WITHIN = (*USERS, "stays: net", "stays: **.second")
at("tied within a step", SECOND_AND_THIRD, WITHIN, after_forward=ties("2.second.weight", "3.second.weight"))
at("tied after a batch", TIED, WITHIN, on_train_batch_end=ties("2.second.weight", "0.second.weight"))
for one, other in (("1.first", "3.second"), ("2.first", "2.second")):
    two = new_memory_for_two(f"{one}.weight", f"{other}.weight")
    at(f"new memory for {one} and {other}", TIED, USERS, on_train_batch_start=two)
at(
    "another order within a step", r"'net\.1\.first\.weight' has strides \(16, 1\) and was given .*\(1, 16\).*empty_like",
    (*USERS, "stays: net"), loss=lambda m, x: (m.net(x), given(Tensor.t)(m), m.net(x).square().mean())[2],
)  # fmt: skip
at(  # plain's backward raises as well
    "another shape within a step", r"'net.1.first.weight' is torch.float32 of shape \(16, 16\) and was given", USERS,
    options={"repairable": False}, after_forward=given(lambda data: data.view(-1)),
)  # fmt: skip
for dtype in (
    torch.bfloat16,
    torch.float64,
):  # plain's backward finds the new weight where it saved the old one, and raises
    other_dtype = given(lambda data, dtype=dtype: data.to(dtype))  # type: ignore[misc]
    at(f"{dtype} before backward", r"'net.1.first.weight' was given torch.* used it as torch.float32", USERS,
       after_forward=other_dtype)  # fmt: skip
# The weight travels as its cast.
at("another dtype in mixed precision",
   {"keep, k=1, bf16-mixed": r"and was given torch.bfloat16.*keep_on_gpu=\['net.1.first.weight'\]"},
   ("keep, k=1, bf16-mixed", "stays: net.1.first, bf16-mixed"), start=lambda m: m.net[1].first.to(torch.bfloat16))  # fmt: skip

# ---------------------------------------------------------------------- memory that a weight had, or was given


class WritesWhatItHad(Linears):
    """Gives a weight a copy of its own values, and writes the memory that it had before."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.second.weight
        old = weight.data
        weight.data = weight.detach().clone()
        old.mul_(0.5)
        return super().forward(x)


def binarizes(keep: Callable[[Tensor], Tensor], m: At) -> None:
    """XNOR-Net: weights of one bit in forward and backward, whose gradients update the real weights."""
    m.kept[:] = [keep(p.data) for p in m.net.parameters()]
    for p in m.net.parameters():
        p.data = p.data.sign() * 0.1


def gives_back(m: At) -> None:
    for p, kept in zip(m.net.parameters(), m.kept, strict=True):
        p.data = kept


class Averaged(At):
    """Validates with other weights, which it gives its parameters inside of the step."""

    def __init__(self, keep: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.keep = keep

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.kept[:] = [self.keep(p.data) for p in self.net.parameters()]
        for p in self.net.parameters():
            average = 0.9 * p.data
            p.data = average
        super().validation_step(batch, batch_idx)
        gives_back(self)


class WidensItself(nn.Module):
    """Gives its weight the same values in float64, and keeps that memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        self.wide = self.weight.detach().double()
        self.weight.data = self.wide
        return torch.tanh(F.linear(x, self.weight.float())) * self.scale


def writes_wide(m: At, batch: Tensor) -> Tensor:
    m.net(batch)
    for block in m.net:
        block.wide.data.mul_(0.5)
    return m.net(batch).square().mean()


def frozen_but_for_a_shift(within: bool) -> At:
    """Frozen weights get other values in the second step, after their block, or the whole forward, has used them."""

    def exchange(m: At, block: nn.Module) -> None:
        for p in block.parameters() if m.batch == 1 else ():
            p.data = p.detach() * 0.5

    def init(m: At) -> None:
        m.net.requires_grad_(False)
        m.shift = nn.Parameter(torch.zeros(16))
        for block in m.net if within else ():
            block.register_forward_hook(lambda block, *_: exchange(m, block))

    loss = lambda m, x: m.net(x + m.shift).square().mean()  # noqa: E731
    return At(init=init, loss=loss, **({} if within else {"after_forward": lambda m: exchange(m, m.net)}))


class SetsToItself(nn.Module):
    """Sets its weight to itself in each call; transposes it once, in evaluation, by a view of the weight's own memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.done = False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight
        with torch.no_grad():
            assert weight.set_(weight) is weight  # type: ignore[call-overload]  # torch takes a tensor, too
        if not (self.training or self.done):
            self.done = True
            weight.set_(weight, 0, weight.shape, weight.stride()[::-1])
        return torch.tanh(self.inner(x))


EXCHANGED: dict[str, Callable[[Any], Any]] = {
    "weight": lambda layer: setattr(layer.second, "weight", nn.Parameter(layer.second.weight.detach() * 0.5)),
    "tied": lambda layer: setattr(layer.second, "weight", layer.first.weight),
    "module": lambda layer: setattr(layer, "second", nn.Linear(16, 16)),
    "pruned": lambda layer: prune.l1_unstructured(layer.second, "weight", 0.5),
    "bias": lambda layer: setattr(layer.second, "bias", None),
}
for what, exchange in EXCHANGED.items():
    said = r"'second(\.\w+)?' of 'net\.1' has been exchanged between.*\"offload\""
    at(f"{what} is exchanged before the second run", "" if what == "module" else said, ("recompute, k=2",),
       options={"repairable": False, **AS_CHECKPOINTED},
       after_forward=lambda m, exchange=exchange: exchange(m.net[1]))  # fmt: skip


class WritesWhatItGave(At):
    """A hook between forward and backward finds the host's weights, and writes memory that the forward has given one of them."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.kept[0].mul_(0.5)


def gives_and_keeps(m: At) -> None:
    weight = m.net.get_parameter("1.second.weight")
    m.kept[:] = [0.5 * weight.data]
    weight.data = m.kept[0]


class WritesItsWeight(At):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.net.get_parameter("1.second.weight").data.mul_(0.5)


def copies_other(m: At) -> None:
    weight = m.net.get_parameter("1.second.weight")
    weight.data.copy_(0.5 * weight.data)


row(
    "memory that was given is written between forward and backward",
    partial(WritesWhatItGave, after_forward=gives_and_keeps),
    IN_PLACE,
    USERS,
    repairable=False,
)
row(
    "a weight is written in place, and again between forward and backward",
    partial(WritesItsWeight, after_forward=copies_other),
    modes=USERS,
)
at("memory that a weight had is written", HELD, (*USERS, "recompute, k=2", "stays: net"),
   options={"repairable": False, **AS_CHECKPOINTED}, block=WritesWhatItHad)  # fmt: skip
at("memory of another dtype", APART, USERS, options={"repairable": False}, block=WidensItself, loss=writes_wide)
for what, outer in product(("held", "held.data", "weight", "other"), (Checkpointed, nn.Sequential)):
    said = "" if what == "other" else APART
    at(f"{what} is written after it was given, {outer.__name__}", said, USERS,
       options={"repairable": False}, block=lambda what=what, outer=outer: outer(GivesItsOwnValues(what)))  # fmt: skip
# After backward the weights are on the host: there, memory of the device is another device's.
PLACES = {"keep, k=1, simulated": "Mixed: Expected all tensors to be on the same device"}
for what, keep_as, refused_as in (("memory", lambda data: data, HELD), ("a copy", torch.clone, "")):
    at(f"binarized for a step, {what} given back", refused_as or PLACES, MODES, options={"repairable": False},
       start=partial(binarizes, keep_as), on_after_backward=gives_back)  # fmt: skip
    row(f"averages in a validation step, {what} given back", partial(Averaged, keep_as), refused_as, MODES,
        repairable=False, validated=True, **TWO_EPOCHS)  # fmt: skip
for within in (True, False):
    row(f"frozen weights after their {'block' if within else 'forward'}", partial(frozen_but_for_a_shift, within),
        IN_PLACE, ("users, k=1", "keep, k=1, bf16-mixed", "keep, k=1, simulated"), repairable=False)  # fmt: skip
at("set to itself", modes=USERS, options={"validated": True, **TWO_EPOCHS}, block=SetsToItself)

# ---------------------------------------------------------------------- what it costs


def stay_where_they_are(ours: Any) -> None:
    """Each weight was copied to the host after each use. A view in the graph kept all the copies of 8 bits, too."""
    stats = ours.trainer.strategy.stats()
    assert stats.host_waits <= 4 * 4 * len(vectors())  # one comparison a weight
    assert stats.fetched_layers <= 2 * 4 * len(vectors())
    assert not stats.extra_slots


row("weights in 8 bits", partial(in_8_bits, CastBlock), also=stay_where_they_are,
    modes=("users, k=1", "users, k=1, bf16-mixed", "bf16-true", "keep, k=1, simulated"))  # fmt: skip


def few_bytes(ours: Any) -> None:
    stats = ours.trainer.strategy.stats()
    assert stats.fetched_bytes <= 2.4 * sum(p.nbytes for p in ours.module.parameters()) * len(vectors())
    assert not stats.extra_slots


# Each use in a block that ran again wrote all such weights of the block back, and fetched the block anew.
at("own values again", modes=("users, k=1", "users, k=1, simulated"), options={"also": few_bytes},
   block=lambda: Checkpointed(*(GivesItsOwnValues() for _ in range(3))))  # fmt: skip
