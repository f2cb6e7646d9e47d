"""Gradients that are hooked, kept, shared, thawed, or come in several backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sp_lightning.core.device.device import Device
from sp_lightning.core.layers.gradients import Gradients, each_row_once
from sp_lightning.core.torch_compat.private import sparse_rows
from tests.support.bare import Manual, assert_like_plain, bare
from tests.support.engine import step, streamed
from tests.support.models import (
    Module,
    Scaled,
    Stack,
    vectors,
)
from tests.support.normed import NormedStack
from tests.support.runs import fit, superpipeline
from tests.support.tiers import first


class ClampsAfterBackward(Module):
    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.data.clamp_(-0.1, 0.1)


class HookedGradients(Module):
    """A hook on a parameter counts for ``torch.autograd.grad`` as well."""

    def __init__(self) -> None:
        super().__init__(Stack(3))
        for p in self.parameters():
            p.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + sum(g.sum() for g in torch.autograd.grad(loss, list(self.parameters()), create_graph=True))


class SometimesNoBackward(Module):
    def __init__(self) -> None:
        super().__init__(Scaled())
        self.seen: list[Any] = []

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_idx != 1:
            loss.backward()

    def on_train_batch_end(self, *args: Any) -> None:
        net: Any = self.net
        self.seen.append((type(net.scale).__name__, net.scale.sum().item()))


class ExtraBackward(Module):
    """A backward inside ``training_step`` ended the step: what came after it found the host's parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.loss(batch * 0.5).backward()
        loss = self.loss(batch)
        grads = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        return loss + sum(g.square().sum() for g in grads)


class BackwardWithInputs(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch), inputs=list(self.parameters())[2:6])
        self.seen.append([None if p.grad is None else p.grad.clone() for p in self.parameters()])
        optimizer.step()


def doubled(gradient: Tensor) -> Tensor:
    return gradient * 2


class HooksWhatIsFrozen(Module):
    """The user's hooks were once put on device parameters when they came up, and autograd refused frozen ones."""

    def __init__(self) -> None:
        super().__init__(Stack())
        weight = self.net.blocks[1].inner.weight
        weight.register_hook(doubled)
        weight.requires_grad_(False)


class HooksWhatIsThawed(Module):
    def __init__(self) -> None:
        super().__init__(Stack())
        self.net.blocks[1].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.net.blocks[1].requires_grad_(True)
            self.net.blocks[1].inner.weight.register_hook(doubled)


class HooksInBackward(Module):
    """Registered on a reference from before the step, while backward runs: it counts in that backward."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.captured = [self.net.blocks[0].inner.weight]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch
        for block in self.net.blocks:
            x = block(x)
        x.register_hook(lambda gradient: self.captured[0].register_hook(doubled) and None)
        return x.square().mean()


class HooksWhatIsKept(Module):
    """The graph has the device parameter that saved-tensor hooks kept; the hook must not be put on its successor only."""

    def __init__(self) -> None:
        super().__init__(NormedStack("kept", frozen=False))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx == 1:
            for block in self.net.blocks:
                block.norm.weight.register_hook(doubled)
        return loss


class SharesGradients(Module):
    """What another process was sent stays what it was."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.seen: list[Tensor] = []
        self.mapped: list[Tensor] = []

    def on_after_backward(self) -> None:
        handle = self.net.blocks[1].inner.weight.grad.untyped_storage()._share_filename_cpu_()
        self.mapped.append(torch.empty(0).set_(torch.UntypedStorage._new_shared_filename_cpu(*handle)))
        self.seen.append(torch.stack([gradient.sum() for gradient in self.mapped]))


class FreezesBeforeBackward(Module):
    """A parameter that is frozen between forward and backward takes no gradient, whoever freezes it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        for p in self.trainer.optimizers[0].param_groups[0]["params"][:4]:
            p.requires_grad_(batch_idx != 1)
        return loss


class KeepsOldGradients(Module):
    """Gradients that somebody still holds after ``zero_grad`` are not overwritten by the next batch's."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.seen: list[Any] = []

    def on_after_backward(self) -> None:
        self.seen.append([p.grad for p in self.parameters()])


class ThawsWithinStep(Module):
    """A resident that is unfrozen between two forwards of one step takes the second one's gradient."""

    def __init__(self) -> None:
        super().__init__(Scaled())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (scale,) = (
            p for p in self.trainer.optimizers[0].param_groups[0]["params"] if p.shape == (16,) and p.mean() == 1
        )
        scale.requires_grad_(False)
        loss = self.loss(batch)
        scale.requires_grad_(True)
        return loss + self.loss(batch * 0.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen = [None if p.grad is None else p.grad.clone() for p in self.parameters()]


def test_backward_with_inputs_brings_no_layer() -> None:
    strategy = superpipeline(k=1)
    bare(BackwardWithInputs, strategy)
    assert strategy.stats().extra_slots == 0


CASES: dict[str, tuple[Callable[[], pl.LightningModule], dict[str, Any]]] = {
    "clamps-after-backward": (lambda: ClampsAfterBackward(Stack()), {"accumulate_grad_batches": 3}),
    "hooked-gradients": (lambda: HookedGradients(), {}),
    "no-backward": (lambda: SometimesNoBackward(), {}),
    "no-backward-accumulating": (lambda: SometimesNoBackward(), {"accumulate_grad_batches": 2}),
    "extra-backward": (lambda: ExtraBackward(Stack()), {}),
    "backward-with-inputs": (lambda: BackwardWithInputs(), {}),
    "freezes-before-backward": (lambda: FreezesBeforeBackward(Stack()), {}),
    "keeps-old-gradients": (lambda: KeepsOldGradients(), {}),
    "thaws-within-step": (lambda: ThawsWithinStep(), {}),
    "hooks-what-is-frozen": (lambda: HooksWhatIsFrozen(), {}),
    "hooks-what-is-thawed": (lambda: HooksWhatIsThawed(), {}),
    "hooks-in-backward": (lambda: HooksInBackward(), {}),
    "hooks-what-is-kept": (lambda: HooksWhatIsKept(), {}),
    "shares-gradients": (lambda: SharesGradients(), {}),
}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("precision", first(["32-true", "bf16-mixed"], "32-true", why="the same in mixed precision"))
@pytest.mark.parametrize("name", CASES)
def test_like_plain(name: str, precision: str) -> None:
    make, options = CASES[name]
    assert_like_plain(make, **options, precision=precision)


@pytest.mark.parametrize("strategy", ["auto", "superpipeline"])
def test_a_hook_that_returns_something_after_accumulation_is_refused_as_by_torch(strategy: str) -> None:
    """``lambda p: p.grad.mul_(0.5)`` returns the gradient. It was accepted, and failed in plain Lightning."""

    def make() -> Module:
        module = Module(Stack())
        module.net.stem.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
        return module

    chosen: Any = superpipeline() if strategy == "superpipeline" else strategy
    with pytest.raises(RuntimeError, match=r"^Tensor post accumulate grad hooks should return None\.$"):
        fit(make, vectors(), chosen, recorded="nothing")


def test_a_sparse_gradient_gets_each_row_once() -> None:
    values = torch.randn(3, 4)
    twice = sparse_rows(torch.tensor([[2, 0, 2]]), values, torch.Size((3, 4)), once=False)
    once = each_row_once(twice)
    assert torch.equal(once._indices(), torch.tensor([[0, 2]]))
    assert torch.equal(once._values(), torch.stack([values[1], values[0] + values[2]]))
    assert each_row_once(once) is once


def test_gradients_of_the_parameters_dtype_come_without_staging_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    staged: list[bool] = []
    place = Gradients._place

    def note(self: Gradients, gradients: Any) -> Any:
        placed = place(self, gradients)
        staged.append(placed[1] is not None)
        return placed

    monkeypatch.setattr(Gradients, "_place", note)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    with streamed(net, Device(torch.device("cpu")), k=1, k_prime=1) as streamer:
        step(streamer, lambda: net(torch.ones(1, 4)).sum().backward())
        assert all(p.grad is not None for p in net.parameters())
        step(streamer, lambda: net(torch.ones(1, 4)).sum().backward())  # added to the first ones
    assert staged == [False] * 3 + [True] * 3


def test_a_backward_that_meets_nothing_but_a_saved_weight_releases_its_layer() -> None:
    """No hook of a module and no gradient tells that it has begun."""
    net, x = (
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).requires_grad_(False),
        torch.ones(1, 4).requires_grad_(),
    )
    with streamed(net, Device(torch.device("cpu")), k=1, k_prime=1) as streamer:

        def use() -> list[Any]:
            F.linear(x, net[0].weight).square().sum().backward()  # type: ignore[arg-type]
            return list(streamer._residency.used)

        assert step(streamer, use) == []
    assert x.grad is not None
