"""Weights that user code has captured before the step, and weights, gradients and state that it uses together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.bare import Manual, assert_like_plain, bare
from tests.support.models import Module, Stack, vectors
from tests.support.runs import assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.simdevice import simulated
from tests.support.tiers import first


class Captures(Module):
    """As gradnorm-pytorch: weights are put in a plain list in ``__init__``."""

    def __init__(self, use: str) -> None:
        super().__init__(Stack(4))
        self.use = use
        self.captured = [list(self.net.parameters())]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, (weights,) = self.loss(batch), self.captured
        if self.use == "grad":
            found = torch.autograd.grad(loss, weights, retain_graph=True)
        elif self.use == "allow_unused":
            found = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
        elif self.use == "create_graph":
            found = torch.autograd.grad(loss, weights, create_graph=True)
            return loss + sum((g.square().sum() for g in found), torch.zeros(()))
        elif self.use == "checkpoint":  # its forward runs again in backward
            again = checkpoint(lambda x: F.linear(x, weights[-2], weights[-1]).tanh(), batch, use_reentrant=True)
            return loss + again.square().mean()
        else:
            return loss + sum((p.square().sum() + p.abs().sum() + p.sum().square() for p in weights), torch.zeros(()))
        return loss * sum((g.norm() for g in found if g is not None), torch.zeros(())).detach() + loss


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("use", ["grad", "allow_unused", "create_graph", "checkpoint", "penalty"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_captured_weights_are_those_of_the_graph(use: str, accumulate: int) -> None:
    """``grad`` did not find them, silently with ``allow_unused``; a penalty was added up in another order."""
    assert_like_plain(lambda: Captures(use), accumulate_grad_batches=accumulate)


class GradAfterBackward(Manual):
    """``torch.autograd.grad`` after a backward that kept its graph."""

    def __init__(self, taken: str) -> None:
        super().__init__()
        self.taken = taken
        self.captured = [list(self.net.parameters())]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        before, loss = list(self.parameters()), self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        weights = {"before": before, "captured": self.captured[0], "now": list(self.parameters())}[self.taken]
        self.seen.append(torch.autograd.grad(loss, weights, allow_unused=True))
        optimizer.step()


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("taken", ["before", "captured", "now"])
def test_grad_after_a_backward_that_kept_its_graph(taken: str) -> None:
    """Modules hold the host's weights then: an error said that they are not in the graph, or the gradient was None."""
    assert_like_plain(lambda: GradAfterBackward(taken))


# ---------------------------------------------------------------------- device and host meet


class GradientsByHand(Manual):
    """``torch.autograd.grad`` is what the refusal of ``create_graph`` recommends."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, weights = self.optimizers(), list(self.parameters())
        for p, gradient in zip(weights, torch.autograd.grad(self.loss(batch), weights), strict=True):
            p.grad = gradient
        optimizer.step()  # type: ignore[union-attr]


class OptimizerMadeInStep(Manual):
    optimizer: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        self.optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizer.step()
        self.seen.append([self.optimizer.state[p]["exp_avg"].sum().item() for p in self.parameters()])

    def configure_optimizers(self) -> Any:
        return None


class Importance(Module):
    """As AdaLoRA does: how much a weight matters is the weight times its gradient."""

    def __init__(self) -> None:
        super().__init__(Stack(4))
        self.seen: list[Any] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen.append([(p * p.grad).abs().sum().item() for p in self.parameters() if p.grad is not None])


class WritesBeforeBackward(Module):
    """A mean teacher's average is taken, and written back, before gradients are set to None."""

    def __init__(self) -> None:
        super().__init__(Stack(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.net(batch)
        return self.net.head(batch).square().mean()  # type: ignore[operator, union-attr]

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            for block in self.net.blocks:  # type: ignore[union-attr]
                block.inner.weight.mul_(0.9)


class UsesWeightAfterBackward(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, net = self.optimizers(), self.net
        hidden = net.stem(batch)  # type: ignore[operator, union-attr]
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(self.loss(batch))
        self.manual_backward(F.linear(hidden, net.head.weight).square().mean())  # type: ignore[union-attr, arg-type]
        optimizer.step()  # type: ignore[union-attr]


MEET: dict[str, Callable[[], pl.LightningModule]] = {
    "gradients-by-hand": GradientsByHand,
    "optimizer-made-in-step": OptimizerMadeInStep,
    "importance": Importance,
    "writes-before-backward": WritesBeforeBackward,
    "captured-grad": lambda: Captures("grad"),
    "captured-penalty": lambda: Captures("penalty"),
    "weight-after-backward": UsesWeightAfterBackward,
}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.filterwarnings("ignore:.*returned `None`, this fit will run with no optimizer")
@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("name", MEET)
def test_device_and_host_do_not_meet(name: str, device: str) -> None:
    """What is equal on the CPU was an error of two devices on a GPU."""
    plain = bare(MEET[name], "auto")
    with simulated() if device == "simulated" else contextlib.nullcontext():
        assert_equal(bare(MEET[name], superpipeline(k=1)), plain, device)


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


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("resident", [(), ("net.head", "net.blocks.1")], ids=["streamed", "resident"])
@pytest.mark.parametrize("before", ["nothing", "a look", "a write"])
def test_writes_of_captured_weights_are_seen_in_the_same_step(before: str, resident: tuple[str, ...]) -> None:
    """A resident weight's were not seen before the next call of a module, and what the module had written was not there. A
    look at a weight by ``detach`` before was taken for a write, and the clipping refused."""
    plain = bare(lambda: Clips(before), "auto")
    for device in (contextlib.nullcontext, simulated):
        with device():
            ours = bare(lambda: Clips(before), superpipeline(k=1, keep_on_gpu=resident))
        assert_equal(ours, plain, device.__name__)


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


@pytest.mark.rest("takes tenths of a second")
def test_captured_weights_are_the_modules_inside_of_its_call() -> None:
    plain = bare(LooksInsideItsCall, "auto")
    for device in (contextlib.nullcontext, simulated):
        with device():
            assert_equal(bare(LooksInsideItsCall, superpipeline(k=1)), plain, device.__name__)


# ---------------------------------------------------------------------- writes inside of the layer's own call


class WritesInItsCall(nn.Module):
    """Reads a weight, has ``how`` write it through a list from ``__init__``, and reads it again, in a graph and by a view."""

    def __init__(self, how: str, trained: bool) -> None:
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


class InItsCall(Module):
    def __init__(self, how: str, trained: bool = False) -> None:
        super().__init__(nn.Sequential(*(WritesInItsCall(how, trained) for _ in range(3))))


OPTIONS: dict[str, dict[str, Any]] = {
    "k=1": {"k": 1},
    "k=3": {"k": 3},
    "keep_on_gpu": {"k": 1, "keep_on_gpu": ["net.1"]},
}


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("precision", "options"),
    first(
        product(["32-true", "bf16-mixed"], OPTIONS), ("bf16-mixed", "k=1"),
        second=[("32-true", "k=1"), ("bf16-mixed", "k=3"), ("32-true", "keep_on_gpu")],
        why="the same in float32, and where layers stay",
    ),
)  # fmt: skip
@pytest.mark.parametrize("how", HOW_TO_WRITE)
def test_a_write_inside_of_the_layers_call_is_seen_there(how: str, precision: Any, options: str) -> None:
    """The host's memory was written, and the rest of the call went on with the device's: where the host computes, silently."""
    plain = fit(lambda: InItsCall(how), vectors(), val=vectors(1), precision=precision)
    for device in (contextlib.nullcontext, simulated):
        if device is simulated and how == "foreach":  # under a mode that sees operators torch counts no such write
            continue
        with device():
            ours = fit(
                lambda: InItsCall(how),
                vectors(),
                superpipeline(**OPTIONS[options]),
                val=vectors(1),
                precision=precision,
            )
        assert_same(ours, plain)


@pytest.mark.parametrize("how", ["mul_", "data", "a row"])
def test_a_prediction_sees_it_too(how: str) -> None:
    def predict(strategy: Any) -> Any:
        pl.seed_everything(7, verbose=False)
        return trainer_for(strategy).predict(InItsCall(how), loader(vectors()))

    assert_equal(predict(superpipeline(k=1)), predict("auto"), how)


class UsesCaptured(Module):
    """Captures a weight, and has functions use it in each batch of a prediction, and after each batch."""

    def __init__(self, in_batch: Callable[[Any, Tensor], Tensor], after: Callable[[Any], Any]) -> None:
        super().__init__(Stack())
        self.captured, self.seen = [self.net.blocks[1].inner.weight], list[Any]()
        self.in_batch, self.after = in_batch, after

    def predict_step(self, batch: Tensor) -> Tensor:
        return self.in_batch(self, batch)

    def on_predict_batch_end(self, *_: Any) -> None:
        self.after(self)


def written_late(m: UsesCaptured, batch: Tensor) -> Tensor:
    """The memory is taken before the layer's use in the batch, written after it, and dropped."""
    data = m.captured[0].data
    result: Tensor = m.net(batch)
    data.mul_(0.9)
    return result


def penalty(m: UsesCaptured) -> None:
    with torch.enable_grad():
        m.captured[0].square().sum().backward()
    m.seen.append(m.captured[0].grad.clone())


@pytest.mark.parametrize(
    ("in_batch", "after"),
    [(written_late, lambda m: None), (lambda m, batch: m.net(batch), penalty)],
    ids=["written late", "gradient between batches"],
)
def test_a_captured_weight_of_a_prediction(in_batch: Any, after: Any) -> None:
    """Copies on the device stay valid between batches, unless user code may write a weight. A graph takes the weight itself."""
    seen = []
    for strategy in (superpipeline(k=8), "auto"):
        pl.seed_everything(7, verbose=False)
        module = UsesCaptured(in_batch, after)
        results = trainer_for(strategy, inference_mode=False).predict(module, loader(vectors(4)))
        seen.append([*results, *module.seen])
    assert_equal(seen[0], seen[1], "predictions")


@pytest.mark.parametrize("how", ["mul_", "copy_", "detach"])
def test_autograds_own_error_comes_where_a_graph_has_saved_the_weight(how: str) -> None:
    class Saves(WritesInItsCall):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.tanh(x @ self.memory))

    def make() -> Module:
        return Module(nn.Sequential(*(Saves(how, True) for _ in range(3))))

    for strategy in ("auto", superpipeline(k=1)):
        with pytest.raises(
            RuntimeError, match=r"has been modified by an inplace operation: \[torch.FloatTensor \[16, 16\]"
        ):
            fit(make, vectors(), strategy)


class WritesInHook(Module):
    """A hook on a gradient writes a weight that backward needs next, through a list from ``__init__``."""

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


@pytest.mark.parametrize("k", [1, 99])
def test_a_captured_weight_that_a_hook_writes_in_backward_is_autograds_error(k: int) -> None:
    """The layer was in use, and its old weights went into the gradients silently."""
    for strategy in ("auto", superpipeline(k=k)):
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            fit(WritesInHook, vectors(), strategy)


class RunsAgain(WritesInItsCall):
    """The forward runs inside a checkpoint of the user's, and again in backward, where it writes once more."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class StepsByHand(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("how", ["mul_", "data"])
def test_a_write_in_a_forward_that_runs_again_in_backward(how: str, reentrant: bool, manual: bool) -> None:
    """Captured weights were the host's in backward. In manual optimization the difference was silent."""

    def make() -> Module:
        net = nn.Sequential(*(RunsAgain(how, False) for _ in range(3)))
        for block in net:
            block.reentrant = reentrant  # type: ignore[assignment]
        return StepsByHand(net) if manual else Module(net)

    batches = [batch.requires_grad_() for batch in vectors()]
    assert_same(fit(make, batches, superpipeline(k=1)), fit(make, batches))


def test_other_memory_on_the_host_is_refused_in_the_layers_call() -> None:
    """On an accelerator, ``param.data = other`` with memory of the host's."""

    class Exchanges(WritesInItsCall):
        def forward(self, x: Tensor) -> Tensor:
            self.kept[0].data = torch.zeros(16, 16)
            return super().forward(x)

    def make() -> Module:
        return Module(nn.Sequential(*(Exchanges("mul_", False) for _ in range(3))))

    with (
        simulated(),
        pytest.raises(RuntimeError, match=r"A weight of 'net\.0' was written inside a call of its layer 'net\.0'"),
    ):
        fit(make, vectors(), superpipeline(k=1))
