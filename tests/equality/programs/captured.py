"""Weights that user code has captured before the step, and writes while its layer is in use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.equality.rows import program, tiers
from tests.support.models import Module, Stack, vectors
from tests.support.moments import At
from tests.support.nets import Manual

USERS = tiers(rest=["users, k=1"], long=["users, k=1, simulated", "stays: net, simulated"])
MODIFIED = r"RuntimeError: .*has been modified by an inplace operation"


def captured(name: str, variants: Any, **more: Any) -> Any:
    return program(f"captured weights: {name}", variants, **more)


class Clips(Manual):
    """Clips captured weights in the middle of a step, and goes on with the module's."""

    def __init__(self, before: str) -> None:
        super().__init__()
        self.before = before
        self.captured = [list(self.parameters())]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for regularized in (False, True):
            optimizer.zero_grad()
            weights = sum((p.square().sum() for p in self.parameters()), torch.zeros(()))
            self.manual_backward(weights if regularized else self.loss(batch))
            optimizer.step()
            with torch.no_grad():
                if self.before == "a look":
                    self.seen.append([p.detach().sum() for p in self.parameters()])
                elif self.before == "a write":
                    for p in self.parameters():
                        p.mul_(0.5)
                for p in self.captured[0]:
                    p.clamp_(-0.05, 0.05)
                self.seen.append([p.abs().max() for p in (*self.captured[0], *self.parameters())])


for before in ("nothing", "a look", "a write"):
    # A resident weight's writes were not seen before the next call of a module; a look by ``detach`` was taken for a write.
    captured(f"clipped in the same step after {before}", USERS, covers="the clipping was refused")(
        partial(Clips, before)
    )


@captured("read inside of a call", tiers(rest=["users, k=1", "users, k=1, simulated"]))
class LooksInsideItsCall(Manual):
    """A block writes its weight while it is being called, and reads it through a list from before the step."""

    def __init__(self) -> None:
        super().__init__()
        block: Any = self.net.blocks[1]
        self.captured = [[block.inner.weight]]
        block.register_forward_pre_hook(self.writes)

    def writes(self, block: Any, args: Any) -> None:
        (weight,) = self.captured[0]
        with torch.no_grad():
            block.inner.weight.mul_(0.5)
            self.seen.append(weight.abs().max())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


# ---------------------------------------------------------------------- writes inside of the layer's own call


class WritesInItsCall(nn.Module):
    """Reads a weight, has ``how`` write it through a list from ``__init__``, and reads it again, in a graph and by a view."""

    def __init__(self, how: str, trained: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.memory = nn.Parameter(0.1 * torch.randn(16, 16), requires_grad=trained)
        self.kept = [self.memory]
        self.both = [self.memory, self.second.weight]
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) + self.memory.detach().sum(0)
        view = self.memory.detach().t()
        with torch.no_grad():
            HOW_TO_WRITE[self.how](self, self.kept[0], x)
        if not self.how.startswith(("data=", "set_")):  # a view keeps the memory that the weight had
            x = x + view.sum(1)
        return torch.tanh(self.second(x @ self.memory))


HOW_TO_WRITE: dict[str, Callable[[WritesInItsCall, Any, Tensor], Any]] = {
    "mul_": lambda block, weight, x: weight.mul_(0.9),
    "add_ of an activation": lambda block, weight, x: weight.add_(0.1 * x.mean(0)),
    "copy_": lambda block, weight, x: weight.copy_(0.5 * block.memory),
    "foreach": lambda block, weight, x: torch._foreach_mul_(block.both, 0.9),
    "out=": lambda block, weight, x: torch.mul(weight, 0.9, out=weight),
    "set_": lambda block, weight, x: weight.set_((weight * 0.9).clone()),
    "data": lambda block, weight, x: weight.data.mul_(0.9),
    "data of a weight that travels as its cast": lambda block, weight, x: block.both[1].data.mul_(0.9),
    "data= of a new tensor": lambda block, weight, x: setattr(weight, "data", weight.data * 0.9),
    "detach": lambda block, weight, x: weight.detach().mul_(0.9),
    "a row": lambda block, weight, x: weight[0].mul_(0.9),
    "module, then list": lambda block, weight, x: (block.memory.mul_(0.9), weight.add_(0.01)),
    "list, then module": lambda block, weight, x: (weight.add_(0.01), block.memory.mul_(0.9)),
}


def three(block: type[nn.Module], *args: Any, kind: type[Module] = Module) -> Module:
    return kind(nn.Sequential(*(block(*args) for _ in range(3))))


INSIDE = tiers(
    rest=["keep, k=1, bf16-mixed"], long=["keep, k=1", "keep, k=1, simulated", "users, k=1, bf16-mixed, simulated",
    "stays: net.1",
                                         "stays: net.1, simulated", "users, k=all"],
)  # fmt: skip
IN_CASTS = f"{MODIFIED}.*BFloat16"
HELD = r"RuntimeError: Parameter 'net\.\d\.memory' was given a tensor .*param\.data\.clone\(\)"
REFUSED_INSIDE = {
    "foreach": {"keep, k=1, bf16-mixed": IN_CASTS},
    "data of a weight that travels as its cast": {
        "keep, k=1, bf16-mixed": IN_CASTS, "users, k=1, bf16-mixed, simulated": IN_CASTS,
    },
    "data= of a new tensor": dict.fromkeys(INSIDE, HELD),  # the block keeps `.data` of the weight
}  # fmt: skip
"""A graph needs the cast of the weight that is written; or other code holds the memory of a weight that is given a tensor."""
for how in HOW_TO_WRITE:
    # Under a mode that sees operators torch counts no write of a foreach operator.
    variants = {each: tier for each, tier in INSIDE.items() if not (how == "foreach" and "simulated" in each)}
    # The host's memory was written, and the rest of the call went on with the device's: where the host computes, silently.
    captured(f"written inside of a call, {how}", variants, validated=True, covers="the call sees it, or it is refused",
             refused=REFUSED_INSIDE.get(how, {}), repairable=False)(partial(three, WritesInItsCall, how))  # fmt: skip
    if how in ("mul_", "data", "a row"):
        captured(f"written inside of a call in a prediction, {how}", tiers("users, k=1"), run="predict",
                 covers="a prediction sees it, too")(partial(three, WritesInItsCall, how))  # fmt: skip


class InPredictions(Module):
    """Captures a weight that functions use in each batch of a prediction, and after each batch."""

    def __init__(self, in_batch: Callable[[Any, Tensor], Tensor], after: Callable[[Any], Any]) -> None:
        super().__init__(Stack())
        self.captured, self.seen = [self.net.blocks[1].inner.weight], list[Any]()
        self.in_batch, self.after = in_batch, after

    def predict_step(self, batch: Tensor) -> Tensor:
        return self.in_batch(self, batch)

    def on_predict_batch_end(self, *_: Any) -> None:
        self.after(self)


def written_late(m: InPredictions, batch: Tensor) -> Tensor:
    """The memory is taken before the layer's use in the batch, written after it, and dropped."""
    data = m.captured[0].data
    result: Tensor = m.net(batch)
    data.mul_(0.9)
    return result


def penalty(m: InPredictions) -> None:
    with torch.enable_grad():
        m.captured[0].square().sum().backward()
    m.seen.append(m.captured[0].grad.clone())


BETWEEN_BATCHES = {"run": "predict", "inference_mode": False, "batches": partial(vectors, 4)}
captured("written after their layer's call in a prediction", tiers("users, k=all"), **BETWEEN_BATCHES,
         covers="copies on the device stay valid between batches, unless user code may write a weight"
         )(partial(InPredictions, written_late, lambda m: None))  # fmt: skip
captured("a gradient between batches of a prediction", tiers("users, k=all"), **BETWEEN_BATCHES,
         covers="a graph takes the weight itself"
         )(partial(InPredictions, lambda m, batch: m.net(batch), penalty))  # fmt: skip


class Saves(WritesInItsCall):
    """A graph has saved the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(x @ self.memory))


for how in ("mul_", "copy_", "detach"):
    captured(f"written inside of a call when a graph has saved them, {how}", tiers("users, k=1"),
             refused={"users, k=1": rf"{MODIFIED}: \[torch.FloatTensor \[16, 16\]"}, covers="autograd's own error")(
        partial(three, Saves, how, True)
    )  # fmt: skip


@captured("written by a hook in backward", tiers("users, k=1", "users, k=all"), repairable=False,
          refused=dict.fromkeys(["users, k=1", "users, k=all"], MODIFIED))  # fmt: skip
class WritesInHook(Module):
    """A weight that backward needs next. The layer was in use, and its old weights went into the gradients silently."""

    def __init__(self) -> None:
        super().__init__(Stack(3))
        self.kept = [block.outer.weight for block in self.net.blocks]  # type: ignore[union-attr]
        for block in self.net.blocks:  # type: ignore[union-attr]
            block.register_forward_hook(self.watch)

    def watch(self, block: Any, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self.write)

    def write(self, gradient: Tensor) -> None:
        with torch.no_grad():
            for weight in self.kept:
                weight.mul_(0.9)


class RunsAgain(WritesInItsCall):
    """The forward runs inside a checkpoint of the user's, and again in backward, where it writes once more."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class RunsAgainOtherwise(RunsAgain):
    reentrant = False


class StepsByHand(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def leaves() -> Any:
    return [batch.requires_grad_() for batch in vectors()]


for how in ("mul_", "data"):
    for block in (RunsAgain, RunsAgainOtherwise):
        for kind in (Module, StepsByHand):
            captured(
                f"written in a forward that runs again, {how}, {block.__name__}, {kind.__name__}", tiers(rest=["keep, k=1"]),
                batches=leaves, covers="they were the host's in backward; in manual optimization silently",
            )(partial(three, block, how, kind=kind))  # fmt: skip


@captured(
    "other memory of the host's inside of a call", tiers("keep, k=1, simulated"), of=lambda block: partial(three, block, "mul_"),
    repairable=False,
    refused={"keep, k=1, simulated": r".*A weight of 'net\.0' was written inside a call of its layer 'net\.0'"},
)  # fmt: skip
class Exchanges(WritesInItsCall):
    """On an accelerator, ``param.data = other`` with memory of the host's."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept[0].data = torch.zeros(16, 16)
        return super().forward(x)


# ---------------------------------------------------------------------- memory of a captured weight, written between two uses

TAKES: dict[str, Callable[[Any], Any]] = {
    "data": lambda p: p.data,
    "a view of it": lambda p: p.data[0],
    "an array": lambda p: p.data.numpy(),
}
CLOSE = tiers("users, k=1, two epochs", rest=["users, k=all, two epochs", "bf16-mixed, k=1"], long=["simulated, k=1"])


class BetweenUses(At):
    """Takes memory of a captured weight, uses the weight's layer, writes the memory, and uses the layer again.

    Args:
        take: returns memory of the weight.
        once: True to take it in the first step alone.
    """

    def __init__(self, take: Callable[[Any], Any], *, once: bool = False) -> None:
        super().__init__(start=BetweenUses.begin)
        self.take, self.once, self.captured = take, once, [self.net[1].first.weight]

    def begin(self) -> None:
        if not (self.kept and self.once):
            self.kept[:] = [self.take(self.captured[0])]

    def loss(self, batch: Tensor) -> Tensor:
        before = self.net(batch)
        self.kept[0] *= 0.5
        return super().loss(batch) + before.detach().mean()


for what, take in TAKES.items():
    program(
        f"captured parameter: {what}, written between two uses in the step",
        CLOSE if what == "data" else tiers(rest=[*CLOSE][:2]),
        covers="the second use has the new values, and so has backward",
    )(partial(BetweenUses, take))  # fmt: skip
program(
    "captured parameter: data of the first step, written between two uses in each step", CLOSE,
    covers="the second use has the new values in later steps as well",
)(partial(BetweenUses, TAKES["data"], once=True))  # fmt: skip
