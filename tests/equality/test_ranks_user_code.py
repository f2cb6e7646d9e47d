"""Several devices: what user code and optimizers do with weights and gradients on every rank is what it is under ``ddp``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.equality.on_ranks import EveryBatch, divided, seen
from tests.support.models import vectors
from tests.support.ranks import in_ranks, rank, start
from tests.support.runs import assert_equal, fit, superpipeline
from tests.support.tiers import first
from tests.support.ways import scaled


class Net(pl.LightningModule):
    """A few layers, and an optimizer that a case chooses."""

    def __init__(self, width: int, make: Callable[..., Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)))
        self._make = make

    def training_step(self, batch: Any, index: int) -> Any:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return self._make(self.parameters(), lr=0.1)


class Manual(Net):
    def __init__(self, width: int, make: Callable[..., Any]) -> None:
        super().__init__(width, make)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, index)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Twice(Manual):
    """Writes gradients between two backwards of one step, and freezes a layer that has one."""

    def training_step(self, batch: Any, index: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(Net.training_step(self, batch, index))
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.7)
        self.layers[1][0].bias.requires_grad_(False)
        self.manual_backward(Net.training_step(self, batch + 1, index))
        self.layers[1][0].bias.requires_grad_(True)
        self.held = [parameter.grad for parameter in self.parameters()]
        optimizer.step()


class NeverZeroed(Net):
    def optimizer_zero_grad(self, *_: Any) -> None:
        pass


class Replaces(torch.optim.SGD):
    """Gives parameters and gradients other memory."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = parameter.grad * 0.5
            parameter.data = parameter.data - parameter.grad
        return loss


def shrinking(parameters: Any, lr: float) -> Any:
    optimizer = torch.optim.SGD(parameters, lr=lr)

    def shrink(optimizer: Any, *_: Any) -> None:
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.mul_(0.9)

    optimizer.register_step_post_hook(shrink)
    return optimizer


class Exchanges(Callback):
    """Gives parameters other memory between backward and step; somebody holds the old one."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for parameter in pl_module.parameters():
            self.held.append(parameter.data)
            parameter.data = parameter.data * 0.9


class Shrinks(Callback):
    """Writes the same weights on all ranks between batches."""

    @torch.no_grad()
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for parameter in pl_module.parameters():
            parameter.mul_(0.9)


class Rewrites(Callback):
    """Writes gradients, in place or not, and holds those of earlier steps."""

    def __init__(self, replace: bool) -> None:
        self._replace = replace
        self.held: list[Any] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for parameter in pl_module.parameters():
            self.held.append(parameter.grad)
            parameter.grad = parameter.grad * 0.7 if self._replace else parameter.grad.mul_(0.7)


class LogsNorms(Net):
    """Also holds the gradients of earlier steps."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(norms := grad_norm(self.layers, norm_type=2))
        self.held = [*getattr(self, "held", []), *map(torch.tensor, norms.values()), self.layers[2][0].weight.grad]


class AsksForNorms(Net):
    """Also of parameters without a gradient, and without finite gradients."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.layers[:2](batch).square().mean() if index == 1 else super().training_step(batch, index)
        return loss * float("inf") if index == 2 and rank() == 1 else loss

    def on_after_backward(self) -> None:
        strategy: Any = self.trainer.strategy
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        for kind in (2.0, float("inf")):
            by_torch = nn.utils.get_total_norm(gradients, kind)
            self.held = [*getattr(self, "held", []), by_torch]
            if not isinstance(strategy, EveryBatch):
                assert torch.equal(strategy.gradient_norm(kind), by_torch) or by_torch.isnan()
                assert strategy.gradients_are_finite() == bool(by_torch.isfinite())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.nan_to_num(0, 0, 0)


class SkipsInfinite(Net):
    """Leaves out the second step, and what it knows of it."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        return loss * float("nan") if index == 1 and rank() == 1 else loss

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                self.zero_grad()
                break


class ClipsByTorch(Net):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        self.held = [*getattr(self, "held", []), nn.utils.clip_grad_norm_(self.parameters(), 0.01)]
        self.held += [parameter.grad for parameter in self.parameters()]


class ReadsAlone(Callback):
    """One rank alone reads gradients, before and after they are clipped, and keeps some."""

    def __init__(self, who: int) -> None:
        self.who = who
        self.held: list[Any] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if rank() == self.who:
            self.held += [parameter.grad for parameter in pl_module.parameters()]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.on_after_backward(trainer, pl_module)


class Alone(Callback):
    """Some ranks write weights for the batches of one update, each its own.

    Args:
        ranks: which.
    """

    def __init__(self, *ranks: int) -> None:
        self._ranks = ranks

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if rank() in self._ranks and batch_idx % trainer.accumulate_grad_batches == 0:
            add_noise(pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if rank() in self._ranks:
            remove_noise(pl_module)


def add_noise(module: Any) -> None:
    noise = torch.Generator().manual_seed(rank())
    module.saved = [parameter.detach().clone() for parameter in module.parameters()]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise))


def remove_noise(module: Any) -> None:
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), module.saved, strict=True):
            parameter.copy_(value)


class Noisy(Net):
    """Adds noise of each rank's own in the training step."""

    def training_step(self, batch: Any, index: int) -> Any:
        add_noise(self)
        return super().training_step(batch, index)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        remove_noise(self)


class PutsBack(Net):
    """Computes with other weights than it has before and after the training step."""

    def training_step(self, batch: Any, index: int) -> Any:
        for parameter in self.parameters():
            parameter.data.mul_(4.0)
        loss = super().training_step(batch, index)
        for parameter in self.parameters():
            parameter.data.div_(4.0)
        return loss


class Exchanged(PutsBack):
    """It gets the memory of before back."""

    def training_step(self, batch: Any, index: int) -> Any:
        values = [parameter.data for parameter in self.parameters()]
        for parameter in self.parameters():
            parameter.data = parameter.data * 4.0
        loss = Net.training_step(self, batch, index)
        for parameter, value in zip(self.parameters(), values, strict=True):
            parameter.data = value
        return loss


class Teaches(Net):
    """Has the output of other weights in its loss."""

    def training_step(self, batch: Any, index: int) -> Any:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5)
            teacher = self.layers(batch)
            for parameter in self.parameters():
                parameter.mul_(2.0)
        return (self.layers(batch) - teacher).square().mean()


class Overflows(Noisy):
    """The scale of 16-mixed is too large for one of its losses, so that a step is left out."""

    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step(batch, index) * (1e38 if index == 1 else 1.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.held = [*getattr(self, "held", []), *(parameter.detach().clone() for parameter in self.parameters())]
        super().on_before_optimizer_step(optimizer)


class Returned(Manual):
    """Notes what ``optimizer.step(closure)`` returns."""

    def training_step(self, batch: Any, index: int) -> Any:
        optimizer: Any = self.optimizers()

        def closure() -> Any:
            optimizer.zero_grad()
            loss = Net.training_step(self, batch, index)
            self.manual_backward(loss)
            return loss

        self.held = [*getattr(self, "held", []), optimizer.step(closure=closure).detach()]


class Inside(Manual):
    """Two optimizers, of which one steps inside the other's closure."""

    def configure_optimizers(self) -> Any:
        half = len(self.layers) // 2
        return [self._make(part.parameters(), lr=0.1) for part in (self.layers[:half], self.layers[half:])]

    def training_step(self, batch: Any, index: int) -> Any:
        outer, inner = self.optimizers()  # type: ignore[misc]

        def closure() -> Any:
            outer.zero_grad()
            inner.zero_grad()
            loss = Net.training_step(self, batch, index)
            self.manual_backward(loss)
            inner.step()
            return loss

        return outer.step(closure=closure)


class InAnotherOrder(Inside):
    """Each rank steps the optimizers in another order."""

    def training_step(self, batch: Any, index: int) -> Any:
        optimizers: Any = self.optimizers()
        loss = Net.training_step(self, batch, index)
        self.manual_backward(loss)
        for optimizer in optimizers[:: 1 - 2 * rank()]:
            optimizer.step()
            optimizer.zero_grad()
        return loss


class Ascends(torch.optim.SGD):
    """Steps up, and down from where it was by the gradients of there."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        parameters = self.param_groups[0]["params"]
        values = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.add_(parameter.grad, alpha=0.05)
        with torch.enable_grad():
            loss = closure()
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
        super().step()
        return loss


def lbfgs(parameters: Any, lr: float) -> Any:
    return torch.optim.LBFGS(parameters, lr, max_iter=4)


class Estimates(torch.optim.SGD):
    """Computes a value of its groups from gradients, as Prodigy does. The first is that of the last step."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            if group["steps"] == 4:
                group["d"] = torch.tensor(float(len([p for p in group["params"] if p.grad is not None])))
        return loss


class Samples(Callback):
    """Rank 0 alone looks at what the module does with other weights, between two batches."""

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:
            values = [parameter.clone() for parameter in pl_module.parameters()]
            for parameter in pl_module.parameters():
                parameter.mul_(0.5)
            pl_module.layers(batch)
            for parameter, value in zip(pl_module.parameters(), values, strict=True):
                parameter.copy_(value)


class Late(Callback):
    """Makes a scheduler in the middle of training."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self._scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizers[0], 1, 0.5)
        if batch_idx > 1:
            self._scheduler.step()


def patched(parameters: Any, **options: Any) -> Any:
    """SGD whose step on the object shrinks weights before it calls the closure."""
    optimizer = torch.optim.SGD(parameters, **options)
    own = optimizer.step

    @functools.wraps(own)
    def step(closure: Any = None) -> Any:
        shrink(optimizer)
        return own(closure)

    vars(optimizer)["step"] = step
    return optimizer


def shrink(optimizer: Any, *_: Any) -> None:
    with torch.no_grad():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.mul_(0.9)


class ShrinksAll(Callback):
    """Before the step of every optimizer that there is."""

    def on_train_start(self, *_: Any) -> None:
        self._handle = register_optimizer_step_pre_hook(shrink)

    def on_train_end(self, *_: Any) -> None:
        self._handle.remove()


class ByDefaultElsewhere(Net):
    """New tensors are on another device while a batch is trained; "meta" stands for a GPU."""

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        with torch.device("meta"):
            super().optimizer_step(*args, **options)


SGD = torch.optim.SGD
CASES: dict[str, tuple[Any, Any, Callable[[], list[Any]], dict[str, Any]]] = {
    "an optimizer replaces data": (Net, Replaces, list, {}),
    "gradients are written between two backwards": (Twice, SGD, list, {}),
    "gradients are written": (Net, SGD, lambda: [Rewrites(False)], {}),
    "gradients are written and clipped": (Net, SGD, lambda: [Rewrites(False)], {"gradient_clip_val": 0.01}),
    "gradients are replaced": (NeverZeroed, SGD, lambda: [Rewrites(True)], {}),
    "norms of gradients are logged": (LogsNorms, SGD, list, {}),
    "norms of gradients are logged, clipped, 16-mixed": (
        LogsNorms,
        SGD,
        list,
        {"precision": "16-mixed", "gradient_clip_val": 0.01},
    ),
    "norms of gradients are logged between accumulated batches": (LogsNorms, SGD, list, {"accumulate_grad_batches": 2}),
    "norms of gradients are computed by the strategy": (AsksForNorms, SGD, list, {}),
    "norms of gradients are computed by the strategy, accumulated": (
        AsksForNorms,
        SGD,
        list,
        {"accumulate_grad_batches": 2},
    ),
    "a step without finite gradients is left out": (SkipsInfinite, SGD, list, {}),
    "gradients are clipped by torch's function": (ClipsByTorch, SGD, list, {}),
    "rank 0 alone reads gradients": (Net, SGD, lambda: [ReadsAlone(0)], {}),
    "rank 1 alone reads gradients": (Net, SGD, lambda: [ReadsAlone(1)], {"gradient_clip_val": 0.01}),
    "a hook after the step writes weights": (Manual, shrinking, list, {}),
    "data is exchanged before the step": (Net, SGD, lambda: [Exchanges()], {}),
    "rank 0 alone writes weights for a batch": (Net, SGD, lambda: [Alone(0)], {}),
    "rank 1 alone writes weights for a batch": (Net, SGD, lambda: [Alone(1)], {}),
    "each rank writes weights of its own for a batch": (Net, torch.optim.AdamW, lambda: [Alone(0, 1)], {}),
    "each rank writes weights of its own before an optimizer of users": (Net, Replaces, lambda: [Alone(0, 1)], {}),
    "each rank writes weights of its own for two batches": (
        Net,
        SGD,
        lambda: [Alone(0, 1)],
        {"accumulate_grad_batches": 2},
    ),
    "each rank writes weights of its own in a step": (Noisy, Replaces, list, {}),
    "weights are put back in a step": (PutsBack, SGD, list, {}),
    "data is exchanged and put back in a step": (Exchanged, SGD, list, {}),
    "a teacher of other weights": (Teaches, SGD, list, {}),
    "each rank writes weights of its own under 16-mixed": (Overflows, SGD, list, {"precision": "16-mixed"}),
    "a default device, and clipping": (ByDefaultElsewhere, SGD, list, {"gradient_clip_val": 0.01}),
    "a default device under 16-mixed": (ByDefaultElsewhere, SGD, list, {"precision": "16-mixed"}),
    "each rank writes weights of its own and clips": (Noisy, SGD, list, {"gradient_clip_val": 0.01}),
    "a step inside a closure": (Inside, SGD, list, {}),
    "rank 0 writes and puts back before an optimizer of users": (Net, Replaces, lambda: [Samples()], {}),
    "all ranks write the same before an optimizer of users": (Net, Replaces, lambda: [Shrinks()], {}),
    "a step that is put on the object": (Net, patched, list, {}),
    "a hook before all optimizers' steps": (Net, SGD, lambda: [ShrinksAll()], {}),
    "a late scheduler": (Net, SGD, lambda: [Late()], {}),
    "stochastic weight averaging": (Net, SGD, lambda: [StochasticWeightAveraging(0.1, 1)], {"max_epochs": 3}),
}


def train(name: str, plain: bool) -> Any:
    kind, make, callbacks, options = CASES[name]
    added = callbacks()
    if "precision" in options:  # a scaler of its own for each run
        options = scaled()
    strategy = EveryBatch() if plain else superpipeline(k=1)
    outcome = fit(lambda: kind(16, make), vectors(8), strategy, devices=2, callbacks=added, **options)
    holders = [*added, outcome.module]
    return seen(outcome), [[each.clone() for each in getattr(holder, "held", [])] for holder in holders]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "name", first(CASES, "an optimizer replaces data", "a hook after the step writes weights", why="two stand for all")
)
def test_every_rank_sees_what_it_sees_under_ddp(name: str) -> None:
    ours, plain = in_ranks(2, train, name, False), in_ranks(2, train, name, True)
    for number, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        assert_equal(mine, (divided(theirs[0], number), *theirs[1:]), f"rank {number}")


class Freezes(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.layers[rank()].requires_grad_(False)


class LooksAtState(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        for parameter in trainer.optimizers[0].param_groups[0]["params"]:
            trainer.optimizers[0].state[parameter]


class Hides(Net):
    """Its optimizer has a parameter that is not registered."""

    def __init__(self, width: int, make: Callable[..., Any]) -> None:
        super().__init__(width, make)
        self.hidden = [nn.Parameter(torch.ones(width))]

    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step(batch * self.hidden[0], index)

    def configure_optimizers(self) -> Any:
        return self._make([*self.parameters(), *self.hidden], lr=0.1)


class KeepsItsOwn(Callback):
    """Writes other weights on each rank."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        add_noise(pl_module)


class Slower(Callback):
    """Changes the learning rate on one rank."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and rank():
            trainer.optimizers[0].param_groups[0]["lr"] = 0.05


class Scales(Callback):
    """Some ranks write a gradient, each its own."""

    def __init__(self, *ranks: int, by: float | None = 0.5, to_set: bool = False) -> None:
        self.ranks, self.by, self.to_set = ranks, by, to_set

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        weight = pl_module.layers[1][0].weight
        if rank() in self.ranks and self.by is None:
            weight.grad = None
        elif rank() in self.ranks and self.to_set:
            weight.grad = torch.ones_like(weight)
        elif rank() in self.ranks:
            weight.grad.data.mul_(self.by + rank())  # which no version shows


class ReadsLate(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        assert all(parameter.grad is not None for parameter in pl_module.parameters())


MOMENTUM = functools.partial(SGD, momentum=0.9)
CLOSURE = "calls its closure after it may have written weights"
GRADIENTS = "writes to gradients of rank 1 are not those of rank 0: layers.1.0.weight is"
REFUSED: dict[str, tuple[Any, Any, list[Any], str]] = {
    "each rank writes gradients of its own": (Net, SGD, [Scales(0, 1)], GRADIENTS),
    "rank 0 alone writes a gradient": (Net, SGD, [Scales(0)], GRADIENTS),
    "rank 1 alone writes a gradient": (Net, SGD, [Scales(1)], GRADIENTS),
    "rank 1 alone sets a gradient": (Net, SGD, [Scales(1, to_set=True)], GRADIENTS),
    "rank 1 alone resets a gradient": (NeverZeroed, SGD, [Scales(1, by=None)], GRADIENTS),
    "a gradient is read after the step": (Net, SGD, [ReadsLate()], "after backward, until the optimizer steps"),
    "ranks freeze different layers": (Net, SGD, [Freezes()], "trained parameters of rank 1 are not those of rank 0"),
    "state is looked at on another rank": (Net, MOMENTUM, [LooksAtState()], "steps its layer and has its state"),
    "LBFGS": (Returned, lbfgs, [], CLOSURE),
    "a closure that is called twice": (Returned, Ascends, [], CLOSURE),
    "settings that are computed from gradients": (Net, Estimates, [], "computes values of its groups from gradients"),
    "a learning rate of one rank's": (Net, SGD, [Slower()], "SGD, group 0 is lr 0.05"),
    "optimizers in another order": (
        InAnotherOrder,
        SGD,
        [],
        "a step of SGD of 'layers.1.0.weight' and others, batch 0",  # either rank may be the first to notice
    ),
    "a parameter of nobody's": (Hides, SGD, [], "that the module does not have"),
    "each rank keeps weights of its own": (
        Net,
        SGD,
        [KeepsItsOwn()],
        "writes to weights of rank 1 are not those of rank 0",
    ),
}


def train_refused(name: str) -> None:
    kind, make, callbacks, _ = REFUSED[name]
    fit(lambda: kind(16, make), vectors(8), superpipeline(k=1), devices=2, callbacks=callbacks)


@pytest.mark.long("test_ranks_refusals has errors of several ranks in the first tier")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    errors = [error for error, _ in start(2, train_refused, name).outcomes()]
    assert all(errors), "a rank has not been told"
    assert any(REFUSED[name][-1] in str(error) for error in errors), errors
