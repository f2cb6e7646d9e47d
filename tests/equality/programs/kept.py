"""Weights, views and memory that user code keeps, and writes or reads later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.equality.rows import program, tiers
from tests.support.moments import At


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


def two_calls(m: At, batch: Tensor) -> Tensor:
    blocks: list[Any] = [*m.net.children()]
    for block, other in zip(blocks, [*blocks[1:], blocks[0]], strict=True):
        block.given.clear()
        block.other[:] = [other.linear]
    m.seen.append(m.net(batch).detach().clone())
    result: Tensor = m.net(batch).square().mean()
    return result


WINDOWS = tiers("users' path, k=1, k'=1", "bf16-mixed, k=1", rest=["users' path, k=all, k'=1", "simulated, bf16-mixed"])


@program("given memory: written in a later call of the step", WINDOWS, on=partial(At, loss=two_calls), at="block")
def _() -> nn.Module:
    """A use in mixed precision takes no cast that was made before the call: the memory may be written until the use."""
    return Given(0.5, lambda block, given: None, lambda block, given: given.mul_(0.5))


@program(
    "given memory: written after a use of another block's weight", WINDOWS, on=partial(At, loss=two_calls), at="block"
)
def _() -> nn.Module:
    """That use releases the block's float32 weights, which have the values of the cast, and are written afterwards."""

    def first(block: Any, given: Tensor) -> None:
        block.seen = block.other[0].weight.detach().sum()
        given.mul_(0.5)

    return Given(1.0, first, lambda block, given: None)


RESIDENT = tiers("users' path, k=1, k'=1", rest=["simulated, k=1"])


class OutsideAllLayers(At):
    """The first block belongs to no layer. User code has its first weight from ``__init__``."""

    def __init__(self, *, manual: bool = False, **moments: Any) -> None:
        super().__init__(manual=manual, **moments)
        self.captured = [self.net[0].first.weight]

    @property
    def weight(self) -> Any:
        return self.net[0].first.weight


@program(
    "kept parameter: written between a backward and its step", tiers("users' path, k=1, k'=1"),
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


@program(
    "kept view: written after a write of the weight that changes no value",
    tiers("users' path, k=1, k'=1", rest=["simulated, k=1"]), at="start",
)  # fmt: skip
def _(m: Any) -> None:
    """Versions show a write of the host's weight, and its values do not. So no write would be lost."""
    if not m.kept:
        m.kept.append(m.net[1].first.weight.data)
        m.on_train_batch_end = partial(clamp_and_write, m)


@torch.no_grad()
def clamp_and_write(m: Any, *_: Any) -> None:
    weight = m.net[1].first.weight
    weight.clamp_(-1e6, 1e6)
    m.kept[0].mul_(0.9)


# ---------------------------------------------------------------------- memory of a captured weight, written between two uses

TAKES: dict[str, Callable[[Any], Any]] = {
    "data": lambda p: p.data,
    "a view of it": lambda p: p.data[0],
    "an array": lambda p: p.data.numpy(),
}
CLOSE = tiers("users' path, k=1, k'=1", rest=["users' path, k=all, k'=1", "bf16-mixed, k=1"], long=["simulated, k=1"])


class Between(At):
    """Takes memory of a captured weight, uses the weight's layer, writes the memory, and uses the layer again.

    Args:
        take: returns memory of the weight.
        once: True to take it in the first step alone.
    """

    def __init__(self, take: Callable[[Any], Any], *, once: bool = False) -> None:
        super().__init__(start=Between.begin)
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
    )(partial(Between, take))  # fmt: skip
program(
    "captured parameter: data of the first step, written between two uses in each step", CLOSE,
    covers="the second use has the new values in later steps as well",
)(partial(Between, TAKES["data"], once=True))  # fmt: skip
