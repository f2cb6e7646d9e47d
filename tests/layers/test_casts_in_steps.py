"""Weights that travel as their casts, whatever is done with them in the middle of a step."""

from __future__ import annotations

import copy
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.mixed import MIXED, Manual, Seeing, assert_like_plain, bare, of_blocks
from tests.support.models import Block, Stack, llama, tokens
from tests.support.runs import assert_equal, fit, superpipeline
from tests.support.simdevice import simulated
from tests.support.tiers import first

# ---------------------------------------------------------------------- in the middle of a step


class WritesBeforeBackward(Manual):
    """Autocast's copies do not follow a write between forward and backward, and neither raises an error."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        if batch_idx % 2:
            for p in self.parameters():
                p.data.mul_(0.9)
        else:
            with torch.no_grad():
                for p in self.parameters():
                    p.mul_(0.9)
        self.manual_backward(loss)
        self.see(*(p.grad for p in self.parameters()))
        optimizer.step()
        optimizer.zero_grad()


class WritesByReference(Seeing):
    """In place, between two calls, to the host's parameters, which it has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [list(self.net.parameters())]

    def loss(self, batch: Any) -> Tensor:
        first = super().loss(batch)
        with torch.no_grad():
            for parameter in self.kept[0]:
                parameter.mul_(0.9)
        return first + super().loss(batch)


class StepsBeforeBackward(Manual):
    """A second loss whose graph is older than the optimizer's step, and a third on a graph that is kept."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        first, second = self.loss(batch), self.loss(batch * 0.5)
        self.manual_backward(first, retain_graph=True)
        optimizer.step()
        self.manual_backward(second)
        optimizer.step()
        self.manual_backward(first * 2)
        self.see(*(p.grad for p in self.parameters()))
        optimizer.step()
        optimizer.zero_grad()


class StepsInPlaceOfFloat32(Manual):
    """What autograd has saved in float32 must not be written: its own error, in the same words."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        net: Any = self.net
        with torch.autocast("cpu", enabled=False):
            loss = self.loss(batch)
            penalty = net.blocks[0].inner.weight.square().sum()
        self.manual_backward(loss, retain_graph=True)
        optimizer.step()
        for late in (loss, penalty):
            with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
                late.backward(retain_graph=True)
        optimizer.zero_grad()


class SecondDerivatives(Seeing):
    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        loss = super().loss(batch)
        inner = net.blocks[1].inner
        (gradient,) = torch.autograd.grad(loss, inner.weight, create_graph=True)
        self.see(gradient)
        both = torch.autograd.grad(loss, [inner.weight, net.head.bias], create_graph=True, materialize_grads=True)
        (again,) = torch.autograd.grad(both[0].sum(), net.blocks[0].outer.weight, create_graph=True)
        self.see(again)
        return loss + gradient.square().sum() + again.sum() * 1e-3


class NoneButOne(Seeing):
    """Only the bias, or only the input, needs a gradient."""

    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        x = batch.clone().requires_grad_()
        loss = super().loss(x)
        self.see(*torch.autograd.grad(loss, [net.blocks[1].inner.bias, x], retain_graph=True))
        loss.backward(inputs=[net.blocks[2].outer.weight], retain_graph=True)
        return loss


class HooksOnModules(Seeing):
    """Hooks of the user's see and exchange the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        net: Any = self.net
        net.blocks[0].inner.register_forward_pre_hook(self.look)
        net.blocks[0].inner.register_forward_hook(self.look)
        net.blocks[1].inner.register_forward_pre_hook(self.write)
        net.blocks[2].inner.register_forward_pre_hook(self.exchange)
        net.blocks[2].inner.register_forward_hook(self.put_back)

    def look(self, module: Any, args: Any, output: Any = None) -> None:
        assert module.weight is module._parameters["weight"]
        assert "weight" not in vars(module)
        self.see(module.weight, module.weight.dtype, torch.stack([module.weight.sum(), module.bias.norm()]))

    def write(self, module: Any, args: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(0.99)

    def exchange(self, module: Any, args: Any) -> None:
        self.weight_before = module._parameters.pop("weight")
        module.weight = self.weight_before * 2

    def put_back(self, module: Any, args: Any, output: Any) -> None:
        del module.weight
        module._parameters["weight"] = self.weight_before
        module._parameters["bias"] = module._parameters.pop("bias")  # the order that it was


class HooksOnParameters(Seeing):
    """They see float32 gradients, in the same order, and may return others; so may hooks on the graph's nodes."""

    def __init__(self) -> None:
        super().__init__()
        net: Any = self.net
        for index, p in enumerate(net.blocks[0].parameters()):
            p.register_hook(lambda gradient, index=index: self.see(index, gradient.dtype, gradient))
        net.blocks[1].inner.weight.register_hook(lambda gradient: gradient * 0.3)
        net.head.weight.register_hook(lambda gradient: (gradient.data.mul_(0.3), None)[1])  # shown by no version
        net.blocks[1].outer.weight.register_hook(lambda gradient: gradient.mul_(0.3))
        net.blocks[1].inner.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 0.3))
        net.blocks[1].outer.bias.register_hook(lambda gradient: gradient + torch.randn_like(gradient))

    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        loss = super().loss(batch)
        if not loss.requires_grad:
            return loss
        node = torch.autograd.graph.get_gradient_edge(net.blocks[2].outer.weight).node
        handle = node.register_prehook(lambda gradients: tuple(g if g is None else g * 0.3 for g in gradients))
        loss.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(handle.remove))
        return loss


class Exchanges(Seeing):
    """Modules, parameters and what is under them, between two steps."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        net: Any = self.net
        if batch_idx == 1:
            net.head = nn.Linear(16, 16)
        if batch_idx == 2:
            net.blocks[0].inner.weight = nn.Parameter(net.blocks[0].inner.weight * 2)
            net.blocks[1].outer.weight.data = net.blocks[1].outer.weight.data * 2
        if batch_idx == 3:
            net.blocks[1].inner.requires_grad_(False)
            for p in net.stem.parameters():
                p.data.mul_(0.5)


class Thaws(Seeing):
    """What is frozen between two steps is thawed between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(False)
        self.net.head.requires_grad_(True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        net: Any = self.net
        net.blocks[1].requires_grad_(batch_idx % 2 == 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ExchangesInside(Seeing):
    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        self.see(super().loss(batch))
        net.blocks[0].inner.weight.data = net.blocks[0].inner.weight.data * 2
        self.see(super().loss(batch))
        net.blocks[1].load_state_dict(net.blocks[0].state_dict())
        return super().loss(batch)


class Copies(Seeing):
    """A copy of the module, and a state, taken in the middle of a step."""

    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        twin = copy.deepcopy(net)
        assert all(type(p) is nn.Parameter for p in twin.parameters())
        state = {name: value.clone() for name, value in net.state_dict().items()}
        self.see(*state.values(), twin(batch))
        own = {name: value * 0.5 for name, value in net.named_parameters()}
        return super().loss(batch) + torch.func.functional_call(net, own, (batch,)).square().mean()


class Fails(Block):
    fail = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return x + self.outer(torch.tanh(y if not self.fail else y[:, :3]))


class FailsOnce(Manual):
    """A module's forward raises, and the step goes on."""

    def __init__(self) -> None:
        super().__init__(of_blocks(Fails)())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        net: Any = self.net
        net.blocks[1].fail = True
        with suppress(RuntimeError):
            self.loss(batch)
        net.blocks[1].fail = False
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()


class Adversaries(Manual):
    """Two optimizers, several forwards of each network, the first one's graph alive over the second's step."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Stack(2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        fake = self.net(batch)
        self.manual_backward(self.other(batch).mean() - self.other(fake.detach()).mean())
        second.step()
        second.zero_grad()
        self.manual_backward(self.other(fake).mean())
        first.step()
        first.zero_grad()
        second.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1), torch.optim.Adam(self.other.parameters(), lr=0.01)


class OutsideAnyStep(Seeing):
    """Forwards and backwards in hooks, between writes that show no version."""

    def on_train_batch_end(self, *args: Any) -> None:
        for _ in range(2):
            with self.trainer.precision_plugin.forward_context():
                loss = self.net(torch.ones(2, 16)).square().mean()
            self.see(loss)
            for p in self.parameters():
                p.data.mul_(0.99)
        loss.backward()
        self.see(*(p.grad for p in self.parameters()))
        self.zero_grad()


class Validates(Seeing):
    """Writes that show no version, before a validation that may keep its copies."""

    def on_train_batch_end(self, *args: Any) -> None:
        for p in self.parameters():
            p.data.mul_(0.9)
        with torch.inference_mode(), self.trainer.precision_plugin.forward_context():
            self.see(self.net(torch.ones(2, 16)))


STEPS = [
    WritesBeforeBackward, StepsBeforeBackward, StepsInPlaceOfFloat32, SecondDerivatives, NoneButOne, HooksOnModules,
    HooksOnParameters, Exchanges, Thaws, ExchangesInside, Copies, FailsOnce, Adversaries, OutsideAnyStep, Validates,
]  # fmt: skip


@pytest.mark.long("takes a second or more")
def test_writes_by_references_between_two_calls() -> None:
    """Not with poison, which takes the host's parameters for unreadable in a step."""
    plain = bare(WritesByReference, "auto")
    for context in (nullcontext, simulated):
        with context():
            assert_equal(bare(WritesByReference, superpipeline(k=99)), plain, context.__name__)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "make",
    first(
        STEPS,
        SecondDerivatives,
        Validates,
        why="other things that happen in a step",
    ),
)
def test_in_the_middle_of_a_step(make: Any) -> None:
    assert_like_plain(make)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("first", "then"),
    first(
        [("auto", "ours"), ("ours", "auto"), ("ours", "ours")], ("ours", "auto"), why="the same file, read by the other"
    ),
)
def test_checkpoints_hold_the_masters(tmp_path: Any, first: str, then: str) -> None:
    def strategy(name: str) -> Any:
        return superpipeline(k=1) if name == "ours" else "auto"

    def resume(half: str, whole: str) -> list[Any]:
        fit(llama, tokens(), strategy(half), **MIXED).trainer.save_checkpoint(tmp_path / f"{half}.ckpt")
        outcome = fit(llama, tokens(), strategy(whole), max_epochs=2, ckpt_path=tmp_path / f"{half}.ckpt", **MIXED)
        assert all(value.dtype == torch.float32 for value in outcome.state.values() if value.is_floating_point())
        return [outcome.state, outcome.optimizers, outcome.gradients]

    assert_equal(resume(first, then), resume("auto", "auto"), f"{first}, then {then}")
