"""Errors that user code catches, and goes on; errors of autograd's own, which are what they are on plain Lightning."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.core.engine import backward
from tests.equality.rows import program, tiers
from tests.support.models import Module, Stack, vectors
from tests.support.moments import At

ONE = tiers(rest=["keep, k=1"])


class ByHand(Module):
    """Optimizes by hand."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.automatic_optimization = False

    def fail(self, *_: Any) -> None:
        raise KeyError("in backward")

    def backward_fails(self, batch: Any, *handles: Any) -> None:
        with pytest.raises(KeyError, match="in backward"):
            self.manual_backward(self.loss(batch))
        for handle in handles:
            handle.remove()

    def update(self, batch: Any) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()


@program("failures: a backward that fails in a hook of a gradient", tiers(rest=["keep, k=1", "keep, k=1, simulated"]))
class GoesOn(ByHand):
    """Gradients of the first batch are dropped, as ``zero_grad`` of the next one has it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        if batch_idx == 0:
            return self.backward_fails(batch, self.net.blocks[2].inner.weight.register_hook(self.fail))  # type: ignore
        return self.update(batch)


@program(
    "failures: a backward that fails in a hook of an accumulated gradient",
    tiers(rest=["keep, k=1", "users, k=2, two epochs"]),
)
class TriesAgain(ByHand):
    """Gradients of the layers below have left the device, and have not come to ``param.grad`` yet."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        weight: Any = self.net.blocks[1].inner.weight  # type: ignore[index, union-attr]
        self.backward_fails(batch, weight.register_post_accumulate_grad_hook(self.fail))
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.update(batch)


HELD: list[Any] = []


@contextmanager
def callbacks_held() -> Iterator[None]:
    """On an accelerator what was queued in a failed backward is dropped later, by a thread of autograd's."""
    queue = backward.queue_callback

    def holds(callback: Any) -> None:
        HELD.append(callback)
        queue(callback)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward, "queue_callback", holds)
        yield


class LetsGoLate(ByHand):
    """The end of a failed backward was noticed by that: the engine paused in the middle of the next forward, and gradients came
    after ``zero_grad``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward() if self.how == "backward" else super().manual_backward(loss)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, blocks = self.optimizers(), self.net.blocks
        self.backward_fails(batch, blocks[0].inner.weight.register_hook(self.fail))  # type: ignore
        if self.how != "added up":
            optimizer.zero_grad()  # type: ignore[union-attr]
        handle = blocks[2].register_forward_pre_hook(self.let_go)  # type: ignore
        self.update(batch)
        handle.remove()

    def let_go(self, *args: Any) -> None:
        thread = threading.Thread(target=HELD.clear)
        thread.start()
        thread.join()


for how in ("manual_backward", "backward", "added up"):
    program(
        f"failures: a failed backward that is dropped late, {how}", ONE, inside=callbacks_held, covers=LetsGoLate.__doc__ or ""
    )(partial(LetsGoLate, how))  # fmt: skip


@program("failures: a second hook that fails as a failed backward ends", ONE, batches=partial(vectors, 1))
class FailsTwice(ByHand):
    """It was raised where Python collects garbage, which prints it and goes on."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        blocks: Any = self.net.blocks
        first = blocks[2].inner.weight.register_post_accumulate_grad_hook(self.fail)
        self.backward_fails(batch, first, blocks[0].inner.weight.register_hook(self.fail_below))
        self.manual_backward(self.loss(batch))

    def fail_below(self, gradient: Tensor) -> None:
        raise ValueError("below")


# ---------------------------------------------------------------------- autograd's own errors

CHANGED = r"RuntimeError: .*modified by an inplace operation"
WINDOWS = tiers("keep, k=1", rest=["users, k=all, two epochs"])


def write(m: Any) -> None:
    with torch.no_grad():
        m.net[1].weight.mul_(2)


class BehindAnEmptyWeight(nn.Module):
    """A weight without elements begins at the same byte as the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.empty, self.weight = nn.Parameter(torch.empty(0)), nn.Parameter(torch.eye(16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.t()) + self.empty.sum()


for name, block in (("", partial(nn.Linear, 16, 16)), (", behind an empty one", BehindAnEmptyWeight)):
    program(
        f"autograd: a weight that is written between forward and backward{name}", WINDOWS, at="after_forward",
        on=partial(At, block), refused=dict.fromkeys(WINDOWS, rf"{CHANGED}: \[torch\.\w*FloatTensor \[16, 16\]"),
        covers=BehindAnEmptyWeight.__doc__ or "",
    )(write)  # fmt: skip


def step(m: Any) -> None:
    """Between two backwards of one graph."""
    loss = m.net(vectors()[0]).square().mean()
    m.manual_backward(loss, retain_graph=True)
    m.optimizers().step()
    m.manual_backward(loss)


program(
    "autograd: a step between forward and backward", WINDOWS, at="start", on=partial(At, manual=True),
    refused=dict.fromkeys(WINDOWS, CHANGED),
)(step)  # fmt: skip


class WritesActivation(nn.Module):
    """Where saved-tensor hooks are active autograd leaves the check out; without ours this was silent."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.linear(x)).add_(1).sum()


program(
    "autograd: an activation that is written in place", tiers("keep, k=1"), refused={"keep, k=1": CHANGED},
    covers=WritesActivation.__doc__ or "",
)(lambda: Module(WritesActivation()))  # fmt: skip


def with_graph(m: Any, batch: Tensor) -> Tensor:
    """Gradients that have a graph of their own."""
    with pytest.warns(UserWarning, match="create_graph=True"):
        m.net(batch).square().mean().backward(create_graph=True)
    return m.net(batch).mean()  # type: ignore[no-any-return]


program(
    "autograd: backward with create_graph=True", tiers("keep, k=1"), at="loss", on=partial(At, manual=True),
    refused={"keep, k=1": r"RuntimeError: The gradient of 'net\..*create_graph=True.*torch\.autograd\.grad"},
)(with_graph)  # fmt: skip
