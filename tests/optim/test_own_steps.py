"""Optimizers that code of users steps, makes or changes inside a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.support.bare import Manual, assert_like_plain
from tests.support.models import (
    Module,
    Scaled,
    Stack,
)
from tests.support.tiers import first


class StepsByHand(Manual):
    """Tutorial style: no optimizer, ``p.data -= lr * p.grad``, which bumps no version."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(batch_idx + 1):
            loss = self.loss(batch)
            self.zero_grad()
            loss.backward()
            for p in self.parameters():
                p.data -= 0.1 * p.grad

    def configure_optimizers(self) -> Any:
        return None


class OwnOptimizerStep(Module):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-0.1)


class LineSearch(Manual):
    """Rebinds ``.data`` of every parameter inside the step, as TRPO does."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch).backward()
        start = nn.utils.parameters_to_vector(self.parameters()).detach()
        gradient = torch.cat([p.grad.flatten() for p in self.parameters()])  # type: ignore[union-attr]
        self.zero_grad()
        for size in (1.0, 0.5, 0.1):
            nn.utils.vector_to_parameters(start - size * gradient, self.parameters())
            self.seen.append(self.loss(batch).item())

    def configure_optimizers(self) -> Any:
        return None


class RetriesAfterFailure(Manual):
    """Out of memory in backward, then a smaller batch: nothing of the first may be in the second."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        net: Any = self.net
        optimizer.zero_grad()
        y = net.stem(batch)
        y.register_hook(lambda _: (_ for _ in ()).throw(MemoryError("out of memory")))
        with suppress(MemoryError):
            loss = net.head(net.blocks[0](y)).sum()
            if batch_idx == 0:
                loss.backward()
            else:
                self.manual_backward(loss)
        self.seen.append([None if p.grad is None else p.grad.clone() for p in self.parameters()])
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch[:2]))
        self.seen.append(net.head.weight.grad.clone())
        optimizer.step()


class InnerOptimizer(Manual):
    """An optimizer over ``self.parameters()`` made inside the step, as meta-learning does: residents kept their value."""

    def __init__(self) -> None:
        super().__init__(Scaled())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inner = torch.optim.SGD(self.parameters(), lr=0.05)
        for _ in range(2):
            inner.zero_grad()
            self.loss(batch).backward()
            inner.step()
        kept = list(self.parameters())
        self.loss(batch).backward()
        with torch.no_grad():
            for p in kept:
                p.sub_(0.05 * p.grad)  # type: ignore[operator]
        self.seen.append(sum(p.sum().item() for p in self.parameters()))
        self.zero_grad()


class FusedInnerOptimizer(Manual):
    """A fused step bumps no version of what it writes."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        parameters = list(self.net.head.parameters())
        inner = torch.optim.SGD(parameters, lr=0.1, fused=True)
        for p, gradient in zip(parameters, torch.autograd.grad(self.loss(batch), parameters), strict=True):
            p.grad = gradient
        inner.step()
        inner.zero_grad()
        self.seen.append(self.loss(batch).item())


class AddsGroupInStep(Module):
    """The group has the device's parameters, and the optimizer goes on for many steps."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.blocks.parameters(), lr=1e-2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.trainer.optimizers[0].add_param_group({"params": list(self.net.head.parameters()), "fused": True})
        return self.loss(batch)


class InnerOptimizerWithoutBackward(Manual):
    """The same with gradients of ``torch.autograd.grad``: no backward puts the host's parameters back in between."""

    def __init__(self) -> None:
        super().__init__(Scaled())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        parameters = list(self.parameters())
        inner = torch.optim.SGD(parameters, lr=0.05)
        for _ in range(2):
            for p, gradient in zip(parameters, torch.autograd.grad(self.loss(batch), parameters), strict=True):
                p.grad = gradient
            inner.step()
            self.seen.append(self.loss(batch).item())
        self.zero_grad()


def test_optimizer_state_is_found_inside_a_step() -> None:
    class LooksState(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            self.seen.append(sum(p in optimizer.state for p in self.parameters()))
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    assert_like_plain(LooksState)


CASES: dict[str, tuple[Callable[[], pl.LightningModule], dict[str, Any]]] = {
    "steps-by-hand": (lambda: StepsByHand(), {}),
    "own-optimizer-step": (lambda: OwnOptimizerStep(Stack()), {}),
    "line-search": (lambda: LineSearch(), {}),
    "retries-after-failure": (lambda: RetriesAfterFailure(), {}),
    "inner-optimizer": (lambda: InnerOptimizer(), {}),
    "inner-optimizer-without-backward": (lambda: InnerOptimizerWithoutBackward(), {}),
    "fused-inner-optimizer": (lambda: FusedInnerOptimizer(), {}),
    "adds-group-in-step": (lambda: AddsGroupInStep(Stack()), {}),
}


@pytest.mark.filterwarnings("ignore:.*returned `None`, this fit will run with no optimizer")
@pytest.mark.parametrize("precision", first(["32-true", "bf16-mixed"], "32-true", why="the same in mixed precision"))
@pytest.mark.parametrize("name", CASES)
def test_like_plain(name: str, precision: str) -> None:
    make, options = CASES[name]
    assert_like_plain(make, **options, precision=precision)
