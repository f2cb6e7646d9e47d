"""Weights that user code writes: who keeps what, when it is written, in which mode. Equal to plain Lightning, or refused by name.

Plain autograd keeps the *old* values of a weight where it saved a view of it (a linear layer saves its transpose), and sees the
*new* ones where it saved the weight itself (a convolution does). Here a view that was taken within a step is device memory, and
the optimizer writes the host's. ``test_kept_views.py`` has views that are taken at one moment and written at another one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from tests.support.models import Copies, Module, vectors
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
    hold_and_put_back,
    in_8_bits,
    multiply,
    rebind,
    rebind_twice,
)  # fmt: skip
from tests.support.poison import poisoned
from tests.support.runs import Outcome, assert_equal, assert_same, fit, superpipeline
from tests.support.simdevice import simulated

pytestmark = [pytest.mark.usefixtures("everything_is_worth_moving"), pytest.mark.states]

MODES: dict[str, dict[str, Any]] = {
    "k=1": {
        "k": 1,
        "recorded": "nothing",
    },  # as users train: copies are kept, and the next batch's layers are fetched early
    "k=8": {"k": 8, "recorded": "nothing"},
    "offload": {"k": 1, "activations": "offload"},
    "recompute": {"k": 2, "activations": "recompute"},
    "resident": {"k": 1, "keep_on_gpu": ["net"]},
    "half resident": {"k": 2, "keep_on_gpu": ["**.second"]},
    "mixed": {"k": 1, "precision": "bf16-mixed"},
    "poisoned": {"k": 1, "inside": poisoned},
    "simulated": {"k": 1, "inside": simulated},
}
SOME: dict[str, dict[str, Any]] = {
    "half": {"k": 1, "precision": "bf16-true"},
    "mixed, resident": {"k": 1, "precision": "bf16-mixed", "keep_on_gpu": ["net.1.first"]},
    "simulated, offload": {"k": 1, "activations": "offload", "keep_on_gpu": ["**.second"], "inside": simulated},
    "target resident": {"k": 2, "keep_on_gpu": ["target"]},
}
"""Modes of some rows."""
HOSTS = tuple(mode for mode in MODES if mode != "poisoned")
"""Modes of rows whose code holds the host's weights, which the poison overwrites."""


class Row(NamedTuple):
    """A training.

    Attributes:
        make: makes the module.
        errors: by mode, the error; ``*`` for all other modes.
        modes: the modes in which it is run.
        options: options of the trainer; ``val`` has batches of validation.
    """

    make: Callable[..., Module]
    errors: Mapping[str, str] = {}
    modes: tuple[str, ...] = tuple(MODES)
    options: Mapping[str, Any] = {}


ROWS: dict[str, Row] = {}
MODIFIED = {"recompute": r"'\w+\.\w+' of 'net\.\d' has been modified .*\"offload\""}
"""The second run of a layer would compute with other weights than the first one."""
OTHER_VALUES = {"recompute": r"The forward of 'net\.3' computed other values in backward"}
TWO_EPOCHS = {"max_epochs": 2}
BLOCKS = {"linear": Linears, "convolution": Convolutions, "scalar": Scalars}

# ---------------------------------------------------------------------- all weights, between forward and backward

for write in WRITES:
    for name, block in BLOCKS.items():
        ROWS[f"{write.__name__} after the forward, {name}"] = Row(
            lambda block=block, write=write: At(block, after_forward=each(write)),
            {} if write is hold_and_put_back else MODIFIED,
            (*MODES, "half", *(["simulated, offload"] if block is Linears else [])),
        )
    ROWS[f"{write.__name__} before the forward"] = Row(
        # The layer that is written last is the first to be called.
        lambda write=write: At(start=lambda m: [write(p) for p in reversed(list(m.net.parameters()))])
    )
    if write is not hold_and_put_back:
        ROWS[f"{write.__name__} of the last layer"] = Row(  # it is in use when its second run begins
            lambda write=write: At(after_forward=lambda m: write(m.net[3].second.weight)),
            {"recompute": r"'second\.weight' of 'net\.3' has been modified"},
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


for name in ("linear", "convolution"):
    made = lambda name=name, **moments: lambda: At(BLOCKS[name], **moments)  # noqa: E731
    ROWS[f"references from before, {name}"] = Row(made(init=keep, after_forward=by_references), MODIFIED, HOSTS)
    ROWS[f"a hook before backward, {name}"] = Row(made(on_before_backward=each(rebind)), MODIFIED)
    for write in (rebind, rebind_twice):
        ROWS[f"{write.__name__} after each of two forwards, {name}"] = Row(
            made(loss=twice, after_forward=each(write)), MODIFIED
        )
    for write in (multiply, add_then_multiply, hold_and_put_back):
        ROWS[f"given other memory, then {write.__name__}, {name}"] = Row(
            made(start=each(rebind), after_forward=each(write)), {} if write is hold_and_put_back else MODIFIED
        )
        ROWS[f"standardized, then {write.__name__}, {name}"] = Row(
            made(init=standardized, after_forward=each(write)), {} if write is hold_and_put_back else MODIFIED
        )


def first_step_puts_back(m: At) -> None:
    """Then the memory of residents counted as memory that a step had been given, and was offloaded in the next one."""
    if m.batch == 0:
        each(hold_and_put_back)(m)


def writes_group(m: At) -> None:
    for group in m.trainer.optimizers[0].param_groups:
        for p in group["params"]:
            p.data.mul_(0.9)


def blended_by_detached(m: At) -> None:
    """The write was counted twice: by its version, and when the host took it over, perhaps after the first run."""
    p, q = m.net[0].first.weight, m.net[2].first.weight
    mine, theirs = p.detach(), q.detach()
    mine.add_(theirs, alpha=0.1)
    p.data = p.data * 0.9
    with torch.no_grad():
        p.add_(q, alpha=0.1)


def other_leaves(m: At, batch: Tensor) -> Tensor:
    """Leaves that are not streamed weights: a free tensor, a buffer, a parameter that the module does not list."""
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


ROWS |= {
    "own memory again in the first step": Row(
        lambda: At(start=first_step_puts_back, after_forward=each(multiply)), MODIFIED
    ),
    "a hook before gradients are set to None": Row(lambda: At(on_before_zero_grad=each(multiply)), OTHER_VALUES),
    "the optimizer's weights before backward": Row(lambda: At(on_before_zero_grad=writes_group), OTHER_VALUES),
    "only read": Row(lambda: At(after_forward=lambda m: m.seen.append([p.data.norm() for p in m.net.parameters()]))),
    "a detached weight before the forward": Row(lambda: At(start=blended_by_detached)),
    "old views between two forwards": Row(lambda: At(loss=through_old_views)),
    "captured weights in place": Row(lambda: At(init=keep, loss=captured_in_place), modes=HOSTS),
    "other leaves": Row(
        lambda: At(
            init=lambda m: (
                m.register_buffer("scale", torch.full((16,), 2.0)),
                m.kept.append(nn.Parameter(torch.ones(16))),
            ),
            loss=other_leaves,
        ),
        modes=("k=1", "offload"),
    ),
    "inside a checkpoint": Row(lambda: At(loss=inside_checkpoint), modes=("k=1", "k=8", "offload", "mixed")),
}

# ---------------------------------------------------------------------- averages: BYOL, MoCo


def followed(m: At, batch: Tensor) -> Tensor:
    return F.mse_loss(m.net(batch), m.target(batch)) + m.net(batch * 2).square().mean()


def with_target(*, trained: bool) -> Code:
    """Adds a target network."""

    def init(m: At) -> None:
        m.target = copy.deepcopy(m.net).requires_grad_(trained)
        m.kept += [list(m.net.parameters()), list(m.target.parameters())]

    return init


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
DETACHED = tuple(mode for mode in MODES if mode != "half resident")
MODES_OF_AVERAGES = {
    byol: (*MODES, "target resident"),
    blends_in_place: (*MODES, "target resident"),
    by_state_dict: DETACHED,
    by_detach: DETACHED,
    by_old_references: (*HOSTS, "target resident"),
}
for (follow, modes), trained, moment in product(MODES_OF_AVERAGES.items(), (True, False), ("start", "after_forward")):
    if moment == "start" or follow in (byol, blends_in_place):
        ROWS[f"{follow.__name__}, {'trained' if trained else 'frozen'}, {moment}"] = Row(
            lambda follow=follow, trained=trained, moment=moment: At(
                init=with_target(trained=trained), loss=followed, **{moment: follow}
            ),
            {"recompute": r"of 'target\.\d' has been modified"} if trained and moment == "after_forward" else {},
            modes,
        )

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
        def shake(*_: Any) -> None:
            each(multiply)(self)

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
        moves = [0.1 * p.grad for p in self.parameters()]
        for p, move in zip(self.parameters(), moves, strict=True):
            p.data.add_(move)
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        for p, move in zip(self.parameters(), moves, strict=True):
            p.data.sub_(move)
        optimizer.step()
        return loss


class Adversarial(At):
    """FGM by hand: a weight is moved along its gradient for a second backward, and given its old values as other memory."""

    def __init__(self) -> None:
        super().__init__(manual=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        weight: Any = self.net[0].first.weight
        before = weight.data.clone()
        weight.data.add_(0.5 * weight.grad / weight.grad.norm())
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.net[0].first.weight.data = before
        optimizer.step()
        return loss


ROWS |= {
    "rebound at an epoch's start, then called": Row(
        lambda: At(on_train_epoch_start=lambda m: (each(rebind)(m), m.seen.append(m.net(torch.ones(1, 16)).sum().item()))),
        options=TWO_EPOCHS,
    ),
    "data is exchanged with an average": Row(
        lambda: At(init=with_target(trained=False), on_train_batch_end=swaps_data), modes=HOSTS, options=TWO_EPOCHS
    ),
    "memory is shared in place": Row(
        lambda: At(start=in_batch(1, lambda m: m.net[1].first.weight.detach().share_memory_()))
    ),
    "transposed between batches": Row(lambda: At(on_train_batch_start=in_batch(0, transposes))),
    "called, then written, after a batch": Row(lambda: At(on_train_batch_end=calls_then_writes)),
    "copied": Row(Copies, modes=("k=1", "k=8", "offload", "mixed", "simulated")),
    "a norm's old memory is kept": Row(
        lambda: At(Convolutions, on_before_zero_grad=keeps_old_memory),  # between forward and backward
        {"recompute": r"'norm\.weight' of 'net\.2' has been modified"},
    ),
    "between two backwards": Row(Sharpness),
    "moved for a second backward": Row(Adversarial),
    **{f"the optimizer's {how}": Row(lambda how=how: OptimizerWrites(how)) for how in ("hook", "optimizer", "pre-hook")},
    **{
        f"written in {hook}": Row(lambda hook=hook: At(**{hook: in_place}), options={"val": vectors(), **TWO_EPOCHS})
        for hook in ("on_validation_batch_end", "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end")
    },
}  # fmt: skip

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

    def give(m: At) -> None:
        weight = m.net[1].first.weight
        weight.data = value(weight.data)

    return give


TIED = r"was given the memory of 'net\.\d\.(first|second)\.weight'.*data\.clone\(\)"
WITHIN = ("k=1", "k=8", "resident", "half resident")
LAYERS = ("k=1", "k=8")
ROWS |= {
    "tied within a step": Row(
        lambda: At(after_forward=ties("2.second.weight", "3.second.weight")),
        {"*": r"'net\.2\.second\.weight' was given the memory of 'net\.3\.second\.weight'.*data\.clone\(\)"},
        WITHIN,
    ),
    "tied after a batch": Row(
        lambda: At(on_train_batch_end=ties("2.second.weight", "0.second.weight")), {"*": TIED}, WITHIN
    ),
    "new memory for two layers": Row(
        lambda: At(on_train_batch_start=new_memory_for_two("1.first.weight", "3.second.weight")), {"*": TIED}, LAYERS
    ),
    "new memory for two weights of a layer": Row(
        lambda: At(on_train_batch_start=new_memory_for_two("2.first.weight", "2.second.weight")), {"*": TIED}, LAYERS
    ),
    "another order within a step": Row(
        lambda: At(loss=lambda m, x: (m.net(x), given(Tensor.t)(m), m.net(x).square().mean())[2]),
        {"*": r"'net\.1\.first\.weight' has strides \(16, 1\) and was given .*\(1, 16\).*empty_like"},
        ("k=1", "k=8", "resident"),
    ),
    "another shape within a step": Row(
        lambda: At(after_forward=given(lambda data: data.view(-1))),
        {"*": r"'net.1.first.weight' is torch.float32 of shape \(16, 16\) and was given"},
        LAYERS,
    ),
    **{
        f"{dtype} before backward": Row(  # plain's backward finds the new weight where it saved the old one, and raises
            lambda dtype=dtype: At(after_forward=given(lambda data: data.to(dtype))),
            {"*": r"'net.1.first.weight' was given torch.* used it as torch.float32"},
            LAYERS,
        )
        for dtype in (torch.bfloat16, torch.float64)
    },
    "another dtype in mixed precision": Row(  # the weight travels as its cast
        lambda: At(start=lambda m: m.net[1].first.to(torch.bfloat16)),
        {"mixed": r"and was given torch.bfloat16.*keep_on_gpu=\['net.1.first.weight'\]"},
        ("mixed", "mixed, resident"),
    ),
}

# ---------------------------------------------------------------------- memory that a weight had, or was given


class WritesWhatItHad(Linears):
    """Gives a weight a copy of its own values, and writes the memory that it had before; ``how`` says when."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.second.weight.requires_grad_(False)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "before":
            self.exchange()
            return super().forward(x)
        out = super().forward(x)
        self.exchange()
        return out

    def exchange(self) -> None:
        weight = self.second.weight
        old = weight.data
        weight.data = weight.detach().clone()
        old.mul_(0.5)
        if self.how == "put back":
            weight.data = old


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
    """The next use of the layer overwrote the memory with the host's values."""
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


def exchanges(what: str) -> Code:
    """Exchanges a parameter or a module of a layer between its first run and the second one."""

    def exchange(m: At) -> None:
        layer = m.net[1]
        if what == "weight":
            layer.second.weight = nn.Parameter(layer.second.weight.detach() * 0.5)
        elif what == "tied":
            layer.second.weight = layer.first.weight
        elif what == "module":
            layer.second = nn.Linear(16, 16)
        elif what == "pruned":
            prune.l1_unstructured(layer.second, "weight", 0.5)
        else:
            layer.second.bias = None

    return exchange


HAD = r"'net\.3\.second\.weight' was given other memory .* before was written"
RUN_AGAIN = {"recompute": r"'net\.0' writes its parameter 'second\.weight'"}
ROWS |= {
    **{
        f"{what} is exchanged before the second run": Row(
            lambda what=what: At(after_forward=exchanges(what)),
            {"recompute": r"'second(\.\w+)?' of 'net\.1' has been exchanged between.*\"offload\""},
            ("recompute",),
        )
        for what in ("weight", "tied", "module", "pruned", "bias")
    },
    **{
        f"memory that a weight had is written, {how}": Row(
            lambda how=how: At(lambda: WritesWhatItHad(how)), {"*": HAD, **RUN_AGAIN}, ("k=1", "k=8", "recompute")
        )
        for how in ("left", "put back")
    },
    "memory that a weight had is written before its use": Row(
        lambda: At(lambda: WritesWhatItHad("before")), modes=("k=1", "k=8")
    ),
    "memory of another dtype": Row(lambda: At(WidensItself, loss=writes_wide), modes=("k=1", "k=8")),
    **{
        f"{what} is written after it was given, {where}": Row(
            lambda what=what, block=block: At(lambda: block(GivesItsOwnValues(what))),
            modes=("k=1", "k=8"),
        )
        for what in ("held", "held.data", "weight", "other")
        for where, block in {"checkpointed": Checkpointed, "plain": nn.Sequential}.items()
    },
    "weights in 8 bits": Row(lambda: in_8_bits(CastBlock), modes=("k=1", "mixed", "half", "simulated")),
    **{
        f"frozen weights after their {'block' if within else 'forward'}": Row(
            lambda within=within: frozen_but_for_a_shift(within), MODIFIED, ("k=1", "mixed", "simulated")
        )
        for within in (True, False)
    },
    "set to itself": Row(lambda: At(SetsToItself), options={"val": vectors(1), **TWO_EPOCHS}, modes=("k=1", "k=8")),
}  # fmt: skip

# ---------------------------------------------------------------------- the table


@cache
def plain(name: str, precision: str) -> Outcome | RuntimeError:
    row = ROWS[name]
    return fit(row.make, vectors(), precision=precision, **row.options)  # type: ignore[arg-type]


REST = pytest.mark.rest("the same in other modes, and with other layers")
LONG = pytest.mark.long("the simulated device and 16 bits take a second each; the second tier has the other modes")


def cases() -> Iterator[Any]:
    """Each row in each of its modes. Every third row is in the first tier, in the modes that other modes are like."""
    for number, (name, row) in enumerate(ROWS.items()):
        for mode in row.modes:
            early = mode in ("k=1", *row.errors) or "k=1" not in row.modes
            quick = early and number % 3 == 0 and not name.endswith(("convolution", "scalar"))
            slow = mode.startswith(("simulated", "half"))
            yield pytest.param(name, mode, marks=[] if quick else LONG if slow else REST, id=f"{name}: {mode}")


@pytest.mark.parametrize(("name", "mode"), list(cases()))
def test_equal_or_refused_by_name(name: str, mode: str) -> None:
    row = ROWS[name]
    more = {"k_prime": 1, **(MODES | SOME)[mode]}
    inside, recorded = more.pop("inside", nullcontext), more.pop("recorded", "gradients")
    precision = more.pop("precision", "32-true")

    def ours() -> Outcome:
        with inside():
            return fit(
                row.make, vectors(), superpipeline(**more), precision=precision, recorded=recorded, **row.options
            )

    error = row.errors.get(mode, row.errors.get("*"))
    if error is not None:
        with pytest.raises(RuntimeError, match=error):
            ours()
        return
    found, expected = ours(), plain(name, precision)
    assert_equal(found.state, expected.state, "state")
    assert_equal(found.optimizers, expected.optimizers, "optimizers")
    assert_equal(getattr(found.module, "seen", None), getattr(expected.module, "seen", None), "seen")
    if recorded == "gradients":
        assert_same(found, expected)
