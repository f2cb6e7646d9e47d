"""Where tensors are: those that modules move with themselves, optimizer state from before the run, and what user code makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from tests.equality.rows import Streamed, loop, program, tiers
from tests.support.models import Module, Stack, fused_adamw, vectors

LATE = "users, k=1, simulated"
STAY = "off, 2 stay, simulated"

# ---------------------------------------------------------------------- what modules move with themselves


class Distance(torchmetrics.Metric):
    """Like FID: a metric that holds a network, and whose states are not buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 16).requires_grad_(False)
        self.add_state("total", torch.zeros(16), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.total: Tensor = self.total + self.net(x).sum(0)

    def compute(self) -> Tensor:
        return self.total.mean()


class Measures(Module):
    def __init__(self) -> None:
        super().__init__(Stack())
        self.distance, self.seen = Distance(), list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch)
        self.distance.update(out.detach())
        self.seen.append(self.distance.total.sum())
        return out.square().mean()

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.distance.compute())


class Scaled(nn.Module):
    """As ultralytics' heads and gpytorch's models: a layer with tensors that it moves in ``_apply``, beside a method of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.data = nn.Linear(16, 16), torch.arange(16.0) / 16, (torch.ones(16), torch.ones(16))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.data = tuple(map(fn, self.data))
        super()._apply(fn, recurse)
        self.scale = fn(self.scale)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) * self.scale + self.data[0] - self.data[1])


class Follows(nn.Module):
    """A layer with a tensor that goes where its weight is, and with a reference to the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shift = nn.Linear(16, 16), torch.ones(16)
        self.captured = [self.inner.weight]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.captured = list(map(fn, self.captured))
        self.shift = self.shift.to(self.captured[0].device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) + self.shift * self.captured[0].mean())


class Hides(nn.Module):
    """Modules in a list, which ``to`` moves: one of its own, and one whose weights are in the tree, too."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)
        self.hidden = [nn.Linear(16, 16).requires_grad_(False), blocks[0]]

    def to(self, *args: Any, **options: Any) -> Any:
        super().to(*args, **options)
        for each in self.hidden:
            each.to(*args, **options)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](self.blocks(x))


class HidingModule(Module):
    """``to`` of the LightningModule moves what the net hides."""

    def __init__(self) -> None:
        super().__init__(Hides(Scaled(), Follows(), Scaled()))

    def to(self, *args: Any, **options: Any) -> Any:
        super().to(*args, **options)
        self.net.hidden[0].to(*args, **options)  # type: ignore[index, operator, union-attr]
        return self


MOVED = tiers("users, k=1", rest=[LATE, STAY], long=["keep, k=1, bf16-mixed", "recompute, k=1, simulated"])

# The weights of all of these are streamed, and nothing else of the modules was moved.
program("moved modules: a metric that holds a network", MOVED, covers="states of a metric with parameters")(Measures)
program("moved modules: overridden to and _apply", MOVED, covers="plain tensors, and modules in lists")(HidingModule)


@loop(
    "moved modules: overridden to and _apply",
    tiers("keep, k=1", rest=["keep, k=1, simulated", "off, 2 stay, simulated"]),
)
def _(streamed: Streamed) -> Any:
    """Without a stream, the loop's own ``model.to(device)`` moves them."""
    net = Hides(Scaled(), Follows(), Scaled())
    optimizer, losses = fused_adamw(net), []
    with streamed(net, optimizer):
        for x in vectors(3):
            losses.append(net(x).square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    return [[loss.detach() for loss in losses], net(vectors(1)[0]).detach(), dict(net.state_dict())]


@loop(
    "moved modules: overridden to and _apply, in Fabric", tiers("keep, k=1", rest=["keep, k=1, simulated"]), fabric=dict
)
def _(fabric: Any) -> Any:
    """Without a stream, ``fabric.setup`` moves them."""
    net = Hides(Scaled(), Follows(), Scaled())
    model, optimizer = fabric.setup(net, fused_adamw(net))
    losses = []
    for x in vectors(3):
        losses.append(model(x).square().mean())
        fabric.backward(losses[-1])
        optimizer.step()
        optimizer.zero_grad()
    return [[loss.detach() for loss in losses], dict(net.state_dict())]


# ---------------------------------------------------------------------- optimizer state from before the run

EARLY: dict[str, Callable[[Any], Optimizer]] = {
    "made by Adagrad": partial(Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "made by steps": partial(AdamW, lr=1e-2),
    "made by steps, fused": partial(AdamW, lr=1e-2, fused=True),
}


class KeepsOptimizer(Module):
    """Makes the optimizer in ``__init__``, and returns it for each ``fit``. It may have stepped before."""

    def __init__(self, make: Callable[[Any], Optimizer], *, scripted: bool = False) -> None:
        super().__init__(Stack())
        if scripted:
            self.net.head = torch.jit.script(self.net.head)  # type: ignore[assignment]
        self.kept = make(self.parameters())
        if not self.kept.state:
            self.loss(vectors(1)[0]).backward()
            self.kept.step()
            self.kept.zero_grad()

    def configure_optimizers(self) -> Any:
        return self.kept


for made, make in EARLY.items():
    for scripted, variants in ((False, [STAY]), (True, [LATE, STAY])):
        program(
            f"optimizer state from before the run: {made}{', of a ScriptModule' if scripted else ''}",
            tiers(rest=variants), covers="the state of weights on the GPU stayed on the CPU",
        )(partial(KeepsOptimizer, make, scripted=scripted))  # fmt: skip


# ---------------------------------------------------------------------- what user code makes beside weights


class Disturbs(Module):
    """Writes weights from a list in the step, with noise and masks that are made where the weights are."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.captured, self.seen = [block.inner.weight for block in self.net.blocks], list[Any]()  # type: ignore[union-attr]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        *some, last = self.captured
        for p in some:
            p.data.add_(0.01 * torch.randn(p.shape, device=p.device))
            p.data.mul_(torch.full_like(p, 0.9))
        with torch.no_grad():
            noise = last.abs()
            last.data.sub_(0.01 * noise)
            self.seen.append(noise.sum())
        return super().training_step(batch, batch_idx)


program(
    "captured weights: their device in a step", tiers("users, k=1", rest=[LATE], long=["users, k=all", "stays: net, simulated"]),
    covers="what is made on a weight's device goes with its .data",
)(Disturbs)  # fmt: skip


class ByDefaultElsewhere(Module):
    """Writes a weight in a step in which new tensors are on another device; "meta" stands for a GPU."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.device("meta"), torch.no_grad():
            self.net.blocks[1].inner.weight.mul_(0.5)  # type: ignore[index, union-attr]
            return self.with_gradients(batch)

    @torch.enable_grad()
    def with_gradients(self, batch: Any) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=1e-2, momentum=0.9)


class ByDefaultElsewhereAlways(ByDefaultElsewhere):
    """Also during backward, clipping and the optimizer's step."""

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        with torch.device("meta"):
            super().optimizer_step(*args, **options)


WAYS = (
    "keep, k=1, bf16-mixed", "recompute, k=1, simulated", "offload, k=1, simulated", "backward, simulated", "forward, clipped",
    "forward, clipped, simulated", "off, on the GPU, clipped, simulated", "off, 2 stay, clipped, simulated",
    "users, k=1, bf16-true, simulated", "frozen weights in their files, clipped",
)  # fmt: skip
for kind, when, ways in (
    (ByDefaultElsewhere, "in a step", WAYS),
    (ByDefaultElsewhereAlways, "in a whole step", [each for each in WAYS if not each.startswith("backward")]),
):
    program(
        f"a default device: {when}", tiers("users, k=1", rest=[LATE], long=ways),
        covers="memory of the CPU is the CPU's by name, whatever the default device is",
    )(kind)  # fmt: skip
