"""Optimizers that code of users steps, makes or changes inside a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
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
    vectors,
)
from tests.support.runs import assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.simdevice import simulated
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


@pytest.mark.rest("takes tenths of a second")
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


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore:.*returned `None`, this fit will run with no optimizer")
@pytest.mark.parametrize("precision", first(["32-true", "bf16-mixed"], "32-true", why="the same in mixed precision"))
@pytest.mark.parametrize("name", CASES)
def test_like_plain(name: str, precision: str) -> None:
    make, options = CASES[name]
    assert_like_plain(make, **options, precision=precision)


# ---------------------------------------------------------------------- an optimizer of a layer's own


class Trained(nn.Module):
    """Reads its weights, has an optimizer of its own step them in its forward, and reads them again."""

    optimizer: torch.optim.Optimizer

    def __init__(self, own: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.codes = nn.Parameter(torch.randn(16))
        self.optimizer = own([self.codes, self.second.weight])  # the latter travels as its cast in bf16-mixed

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) + self.codes.detach()
        self.train_codes(x.detach())
        return self.second(x + self.codes.detach())

    def train_codes(self, x: Tensor) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = (self.codes + self.second(x) - x).square().mean()
            loss.backward()
            return loss

        with torch.inference_mode(False), torch.enable_grad():
            x = x.clone()
            if isinstance(self.optimizer, torch.optim.LBFGS):
                self.optimizer.step(closure)
            else:
                closure()
                self.optimizer.step()
            self.optimizer.zero_grad()


OWN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
}
IN_ITS_CALL = r"An optimizer would step 'net\.0\..*' inside a call of its layer 'net\.0'.*keep_on_gpu=\['net\.0'\]"


class TrainsItself(Module):
    def __init__(self, own: str = "sgd") -> None:
        super().__init__(nn.Sequential(*(Trained(OWN[own]) for _ in range(3))))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for name, p in self.named_parameters() if ".first" in name], lr=0.1)


class TrainsItselfByHand(TrainsItself):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss


@pytest.mark.parametrize("kind", [TrainsItself, TrainsItselfByHand])
@pytest.mark.parametrize("own", OWN)
def test_an_optimizer_that_steps_a_layer_inside_its_call_is_refused(own: str, kind: Any) -> None:
    """The rest of the forward would go on with the old weights."""
    model = kind(own)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=IN_ITS_CALL):
        trainer_for(superpipeline(k=1)).fit(model, loader(vectors()))
    assert_equal(list(model.parameters()), before, "no weight is written")


def test_it_is_refused_in_a_prediction() -> None:
    with pytest.raises(RuntimeError, match=IN_ITS_CALL):
        trainer_for(superpipeline(k=1)).predict(TrainsItself(), loader(vectors()))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("kind", [TrainsItself, TrainsItselfByHand])
@pytest.mark.parametrize("own", OWN)
def test_an_optimizer_steps_weights_on_the_gpu_inside_a_call(own: str, kind: Any) -> None:
    """What the error advises."""
    plain = fit(lambda: kind(own), vectors(2), val=vectors(1), precision="bf16-mixed")
    for device in (nullcontext, simulated):
        with device():
            strategy = superpipeline(k=1, keep_on_gpu=[f"net.{index}" for index in range(3)])
            assert_same(fit(lambda: kind(own), vectors(2), strategy, val=vectors(1), precision="bf16-mixed"), plain)


class OwnStepMissesItsGroups(torch.optim.SGD):
    """Its step also writes a weight that is in none of its groups."""

    other: nn.Parameter
    how: str

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            (self.other.data if self.how == "data" else self.other).sub_(1)


class WritesAnother(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.own = OwnStepMissesItsGroups([nn.Parameter(torch.ones(2))], lr=0.1)
        self.own.other, self.own.how = self.linear.bias, how

    def forward(self, x: Tensor) -> Tensor:
        self.own.step()
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("how", ["data", "in place"])
def test_a_step_inside_a_call_that_writes_a_weight_of_no_group_is_refused(how: str) -> None:
    def model() -> Module:
        return Module(nn.Sequential(*(WritesAnother(how) for _ in range(3))))

    with simulated(), pytest.raises(RuntimeError, match=r"A weight of 'net\.0' was .* inside a call of its layer"):
        fit(model, vectors(), superpipeline(k=1))


class TrainsOutside(TrainsItself):
    """``training_step`` trains weights of a layer and one beside all layers, and reads them without a call in between."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Apart(OWN["sgd"]) for _ in range(3)))
        self.bias = nn.Parameter(torch.randn(16))
        self.own = torch.optim.SGD([self.bias], lr=0.1)

    def loss(self, batch: Any) -> Tensor:
        views = [self.bias.detach()[1:], self.net[0].codes.detach()[1:]]  # type: ignore[index]
        (self.bias - batch).square().mean().backward()
        self.own.step()
        self.own.zero_grad()
        self.net[0].train_codes(batch + self.bias.detach())  # type: ignore[index]
        again = [self.bias.detach(), self.net[0].codes.detach()]  # type: ignore[index]
        return super().loss(batch + sum(view.sum() for view in (*views, *again)))


class Apart(Trained):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) + self.codes.detach())


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("k", [1, 99])
def test_an_own_optimizer_steps_weights_that_are_read_without_a_call(k: int) -> None:
    plain = fit(TrainsOutside, vectors())
    for device in (nullcontext, simulated):
        with device():
            assert_same(fit(TrainsOutside, vectors(), superpipeline(k=k)), plain)


# ---------------------------------------------------------------------- by hand, after a backward inside of the layer's call


class StepsInItsCall(nn.Module):
    """Runs a backward in its forward and steps its weight by hand, ``how``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.codes = nn.Linear(16, 16), nn.Parameter(torch.randn(16))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) + self.codes.detach()
        view = self.codes.detach()[::2] if "view" in self.how else x
        with torch.enable_grad():
            (self.codes - x.detach()).square().mean().backward()
        with torch.no_grad():
            if "data" in self.how:
                self.codes.data.sub_(0.1 * self.codes.grad)  # type: ignore[arg-type, operator]
            elif "detach" in self.how:
                self.codes.detach().sub_(0.1 * self.codes.grad)  # type: ignore[arg-type, operator]
            else:
                self.codes.sub_(0.1 * self.codes.grad)  # type: ignore[arg-type, operator]
        self.codes.grad = None
        return x * self.codes + view.sum()


class StepsInCalls(TrainsItselfByHand):
    def __init__(self, how: str) -> None:
        Module.__init__(self, nn.Sequential(*(StepsInItsCall(how) for _ in range(3))))


@pytest.mark.parametrize("how", ["in place", "in place, view", "data", "detach"])
def test_steps_by_hand_after_a_backward_inside_of_the_layers_call_are_refused(how: str) -> None:
    with pytest.raises(RuntimeError, match=r"A weight of 'net\.0' was .* inside a call of its layer 'net\.0'"):
        fit(lambda: StepsInCalls(how), vectors(), superpipeline(k=1))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("how", ["in place", "in place, view", "data", "detach"])
def test_steps_by_hand_inside_a_call_of_weights_on_the_gpu(how: str) -> None:
    """What the error advises."""
    plain = fit(lambda: StepsInCalls(how), vectors())
    for device in (nullcontext, simulated):
        with device():
            strategy = superpipeline(k=1, keep_on_gpu=[f"net.{index}" for index in range(3)])
            assert_same(fit(lambda: StepsInCalls(how), vectors(), strategy), plain)
