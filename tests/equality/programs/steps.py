"""Optimizers that user code steps, makes, wraps or changes inside a step, and code between a step's beginning and its update."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sp_lightning.core.torch_compat.private import step_pre_hooks
from sp_lightning.core.weights.device_parameter import DeviceParameter
from tests.equality.rows import Tiers, program, tiers
from tests.support.models import EitherOptimization, Module, Scaled, Stack, vectors
from tests.support.nets import Wrapper
from tests.support.runs import Outcome, loader

BARE = tiers(
    rest=["users, k=1, two epochs"],
    long=["users, k=2, two epochs", "users, k=all, two epochs", "users, k=1, bf16-mixed", "users, k=all, bf16-mixed"],
)  # fmt: skip
WINDOWS = tiers("k=1, k'=2", long=["k=3, k'=2"])
INSIDE = tiers("k=1, k'=2", long=["simulated, k=1"])


def steps(name: str, variants: Tiers = BARE, **more: Any) -> Callable[[Any], Any]:
    return program(f"steps: {name}", variants, **more)


class Manual(Module):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net or Stack(4))
        self.automatic_optimization = False
        self.seen: list[Any] = []


class NoOptimizer(Manual):
    def configure_optimizers(self) -> Any:
        return None


@steps("weights written by hand")
class StepsByHand(NoOptimizer):
    """Tutorial style: ``p.data -= lr * p.grad``, which bumps no version."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(batch_idx + 1):
            loss = self.loss(batch)
            self.zero_grad()
            loss.backward()
            for p in self.parameters():
                p.data -= 0.1 * p.grad


@steps("weights written in optimizer_step")
class OwnOptimizerStep(Module):
    """By the groups of the optimizer."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        for p in optimizer.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-0.1)


@steps("a line search")
class LineSearch(NoOptimizer):
    """Rebinds ``.data`` of every parameter inside the step, as TRPO does."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch).backward()
        start = nn.utils.parameters_to_vector(self.parameters()).detach()
        gradient = torch.cat([p.grad.flatten() for p in self.parameters()])  # type: ignore[union-attr]
        self.zero_grad()
        for size in (1.0, 0.5, 0.1):
            nn.utils.vector_to_parameters(start - size * gradient, self.parameters())
            self.seen.append(self.loss(batch).item())


@steps("a smaller batch after a backward that failed")
class RetriesAfterFailure(Manual):
    """Nothing of the first may be in the second."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        net: Any = self.net
        optimizer.zero_grad()
        y = net.stem(batch)
        y.register_hook(lambda _: (_ for _ in ()).throw(MemoryError("out of memory")))
        with suppress(MemoryError):
            loss = net.head(net.blocks[0](y)).sum()
            loss.backward() if batch_idx == 0 else self.manual_backward(loss)
        self.seen.append([None if p.grad is None else p.grad.clone() for p in self.parameters()])
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch[:2]))
        self.seen.append(net.head.weight.grad.clone())
        optimizer.step()


class Inner(Manual):
    """An optimizer over ``self.parameters()`` made inside the step, as meta-learning does; gradients may be ``asked`` for."""

    def __init__(self, *, asked: bool) -> None:
        super().__init__(Scaled())
        self.asked = asked

    def training_step(self, batch: Any, batch_idx: int) -> None:
        parameters = list(self.parameters())
        inner = torch.optim.SGD(parameters, lr=0.05)
        for _ in range(2):
            inner.zero_grad()
            if self.asked:  # no backward puts the host's parameters back in between
                for p, gradient in zip(parameters, torch.autograd.grad(self.loss(batch), parameters), strict=True):
                    p.grad = gradient
            else:
                self.loss(batch).backward()
            inner.step()
        self.seen.append(self.loss(batch).item())
        self.loss(batch).backward()
        with torch.no_grad():
            for p in self.parameters():
                p.sub_(0.05 * p.grad)  # type: ignore[operator]
        self.zero_grad()


for asked in (False, True):
    steps(
        f"an optimizer made in the step{', without backward' if asked else ''}",
        covers="weights beside all layers kept their values"
    )(partial(Inner, asked=asked))  # fmt: skip


@steps("a fused optimizer made in the step")
class FusedInner(Manual):
    """Its step bumps no version of what it writes."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        parameters = list(self.net.head.parameters())  # type: ignore[union-attr, operator]
        inner = torch.optim.SGD(parameters, lr=0.1, fused=True)
        for p, gradient in zip(parameters, torch.autograd.grad(self.loss(batch), parameters), strict=True):
            p.grad = gradient
        inner.step()
        inner.zero_grad()
        self.seen.append(self.loss(batch).item())


@steps("a group added in the step")
class AddsGroup(Module):
    """The group has the device's parameters, and the optimizer goes on for many steps."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.blocks.parameters(), lr=1e-2)  # type: ignore[union-attr, operator]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 1:
            head = list(self.net.head.parameters())  # type: ignore[union-attr, operator]
            self.trainer.optimizers[0].add_param_group({"params": head, "fused": True})
        return self.loss(batch)


@steps("state looked up in the step")
class LooksState(Manual):
    """By the device's parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.seen.append(sum(p in optimizer.state for p in self.parameters()))
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


# ---------------------------------------------------------------------- an optimizer of a layer's own

THREE = {"keep_on_gpu": [f"net.{index}" for index in range(3)]}
KEPT = tiers(rest=["k=1, k'=2"], long=["users, k=1, bf16-mixed", "simulated, k=1", "simulated, bf16-mixed"])


class Trained(nn.Module):
    """Reads its weights, has an optimizer of its own step them in its forward, and reads them again."""

    optimizer: torch.optim.Optimizer

    def __init__(self, own: Callable[[Any], torch.optim.Optimizer], *, outside: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.codes, self.outside = nn.Parameter(torch.randn(16)), outside
        self.optimizer = own([self.codes, self.second.weight])  # the latter travels as its cast in bf16-mixed

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) + self.codes.detach()
        if self.outside:
            return self.second(x)
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
    "SGD": partial(torch.optim.SGD, lr=0.1), "fused SGD": partial(torch.optim.SGD, lr=0.1, fused=True),
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
}  # fmt: skip
IN_ITS_CALL = r"An optimizer would step 'net\.0\..*' inside a call of its layer 'net\.0'.*keep_on_gpu=\['net\.0'\]"


class TrainsItself(EitherOptimization):
    def __init__(self, own: str = "SGD", *, manual: bool = False, outside: bool = False) -> None:
        super().__init__(nn.Sequential(*(Trained(OWN[own], outside=outside) for _ in range(3))), manual=manual)
        if not outside:  # it trains itself in an evaluation, too
            self.val_dataloader = lambda: loader(vectors(1))  # type: ignore[method-assign]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for name, p in self.named_parameters() if ".first" in name], lr=0.1)


for own in OWN:
    for manual in (False, True):
        make = partial(TrainsItself, own, manual=manual)
        hand = ", beside manual optimization" if manual else ""
        steps(
            f"{own} in a call of its layer{hand}", tiers("k=1, k'=2"), refused={"k=1, k'=2": f"RuntimeError: .*{IN_ITS_CALL}"},
            covers="the rest of the forward would go on with the old weights",
        )(make)  # fmt: skip
        alone = {"without": frozenset({"accumulate_grad_batches"})} if manual else {}
        steps(
            f"{own} in a call of its layer on the GPU{hand}",
            KEPT,
            strategy=THREE,
            covers="what the error advises",
            **alone,
        )(make)


class OwnStepMissesItsGroups(torch.optim.SGD):
    """Its step also writes a weight that is in none of its groups."""

    other: nn.Parameter
    how: str

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            (self.other.data if self.how == "by .data" else self.other).sub_(1)


class WritesAnother(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.own = OwnStepMissesItsGroups([nn.Parameter(torch.ones(2))], lr=0.1)
        self.own.other, self.own.how = self.first.bias, how

    def forward(self, x: Tensor) -> Tensor:
        self.own.step()
        return torch.tanh(self.first(x))


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
            codes: Any = self.codes
            written = codes.data if "data" in self.how else codes.detach() if "detach" in self.how else codes
            written.sub_(0.1 * codes.grad)
        self.codes.grad = None
        return x * self.codes + view.sum()


class InCalls(TrainsItself):
    def __init__(self, block: Callable[[str], nn.Module], how: str, *, manual: bool) -> None:
        super().__init__(manual=manual, outside=True)
        self.net = nn.Sequential(*(block(how) for _ in range(3)))


IN_CALL = r"RuntimeError: .*A weight of 'net\.0' was .* inside a call of its layer"
MANUAL = frozenset({"accumulate_grad_batches"})
for how in ("by .data", "in place"):
    steps(
        f"a weight of no group in a call of its layer, {how}", tiers("k=1, k'=2"), refused={"k=1, k'=2": IN_CALL},
        covers="the rest of the forward would go on with the old weights",
    )(partial(InCalls, WritesAnother, how, manual=False))  # fmt: skip
for how in ("in place", "in place, view", "by .data", "by .detach()"):
    by_hand = partial(InCalls, StepsInItsCall, how, manual=True)
    steps(
        f"a weight by hand in a call of its layer, {how}", INSIDE, refused=dict.fromkeys(INSIDE, IN_CALL), without=MANUAL,
        covers="the rest of the forward would go on with the old weights",
    )(by_hand)  # fmt: skip
    steps(
        f"a weight by hand in a call of its layer on the GPU, {how}", tiers(rest=["k=1, k'=2"], long=["simulated, k=1"]),
        strategy=THREE, without=MANUAL, covers="what the error advises",
    )(by_hand)  # fmt: skip


@steps(
    "weights trained and read without a call",
    tiers(rest=["k=1, k'=2", "k=all, k'=1"], long=["simulated, k=1", "simulated, k=all"]),
)
class TrainsOutside(TrainsItself):
    """``training_step`` trains weights of a layer and one beside all layers."""

    def __init__(self) -> None:
        super().__init__(outside=True)
        self.bias = nn.Parameter(torch.randn(16))
        self.own = torch.optim.SGD([self.bias], lr=0.1)

    def loss(self, batch: Any) -> Tensor:
        views = [self.bias.detach()[1:], self.net[0].codes.detach()[1:]]  # type: ignore[index]
        with torch.enable_grad(), torch.inference_mode(False):
            (self.bias - batch.clone()).square().mean().backward()
        self.own.step()
        self.own.zero_grad()
        self.net[0].train_codes(batch + self.bias.detach())  # type: ignore[index]
        again = [self.bias.detach(), self.net[0].codes.detach()]  # type: ignore[index]
        return super().loss(batch + sum(view.sum() for view in (*views, *again)))


# ---------------------------------------------------------------------- code between a step's beginning and its update


class TwoSteps(Module):
    """Manual optimization: two optimizers step after one backward. The first step ends with weights on the device.

    Args:
        when: where the weights are looked at.
        how: how they are looked at.
        raw: whether torch's optimizers are called, without Lightning's around them.
    """

    def __init__(self, when: str, how: str = "detached", *, raw: bool = False) -> None:
        super().__init__(Stack())
        self.automatic_optimization = False
        self.when, self.how, self.raw = when, how, raw
        self.taken: list[Any] = []  # weights as this module held them when the batch began
        self.seen: list[Any] = []
        self.noted: list[Any] = []

    def look(self) -> None:
        for weight in self.taken if self.how.startswith("taken in the step") else self.parameters():
            if self.how.endswith("written"):
                weight.data.mul_(0.9)
            elif self.how == "kept":  # of a weight of the device it has the values of then
                (self.noted if self.when == "a closure" else self.seen).append(weight.detach())
            else:
                self.seen.append((weight.data if self.how == "data" else weight.detach()).norm())

    def configure_optimizers(self) -> Any:
        layers = list(self.net.parameters())
        half = len(layers) // 2
        optimizers = [torch.optim.SGD(each, lr=0.1) for each in (layers[:half], layers[half:])]
        if self.when == "torch's hook":
            optimizers[1].register_step_pre_hook(lambda *_: self.look())
        return optimizers

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.when == "Lightning's hook":
            self.look()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.taken = list(self.parameters())
        first, second = self.optimizers(use_pl_optimizer=not self.raw)  # type: ignore[misc]
        first.zero_grad()
        second.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        first.step()
        second.step(*([partial(self.evaluate, batch)] if self.when == "a closure" else []))
        for seen in (self.seen, self.noted):
            seen += [each.sum() for each in seen if isinstance(each, Tensor)]
        return loss.detach()

    def evaluate(self, batch: Any) -> Tensor:
        with torch.no_grad():
            loss = self.loss(batch)
        self.look()
        return loss


for when, raw, how in [
    (when, raw, how)
    for when, raws in (("Lightning's hook", (False,)), ("torch's hook", (True, False)), ("a closure", (False, True)))
    for raw in raws
    for how in ("detached", "data", "written", "taken in the step", "taken in the step and written", "kept")
]:
    one = (when, raw) in (("Lightning's hook", False), ("torch's hook", True), ("a closure", False))
    late = how == "taken in the step and written" and when != "a closure"  # modules hold the host's weights again
    said = r"RuntimeError: Parameter 'net\.\S+' was written through a view .*module\.weight\.data"
    steps(
        f"weights {how} in {when}{', of torch alone' if raw else ''}", tiers(rest=["k=1, k'=2"] * one,
        long=["k=1, k'=2"] * (not one) + ["k=3, k'=2"]),
        refused=dict.fromkeys(["k=1, k'=2", "k=3, k'=2"], said) if late else {}, repairable=False,
        covers="an update survives looks at weights before it",
    )(partial(TwoSteps, when, how, raw=raw))  # fmt: skip
    if when == "a closure" and not raw:
        steps(
            f"weights {how} in {when}, on the GPU", tiers(long=["k=1, k'=2"]), strategy={"keep_on_gpu": ["**"]},
            covers="nothing is streamed, and an update survives looks at weights before it",
        )(partial(TwoSteps, when, how))  # fmt: skip


class Decays(torch.optim.SGD):
    """An optimizer that looks at a model's weights between two writes of its own."""

    module: Any = None

    def step(self, closure: Any = None) -> Any:
        torch.optim.SGD.step(self, closure)
        with torch.no_grad():
            self.module.seen.append(list(self.module.net.parameters())[-1].detach().sum())
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.9)


@steps("a look at a weight between two writes of an optimizer", WINDOWS)
class StepsInSteps(TwoSteps):
    """It is no write: it was refused, because the weight could have been written on the device as well."""

    def __init__(self) -> None:
        super().__init__("never")

    def configure_optimizers(self) -> Any:
        torch.optim.SGD([torch.zeros(1)])  # torch's hooks are around SGD's own step from now on, too
        first, second = super().configure_optimizers()
        second.__class__, second.module = Decays, self
        torch.optim.Optimizer._patch_step_function(second)
        return [first, second]


class WritesOnBoth(Module):
    """Writes each weight through the module, and then through a view that it has taken before the step, or anew."""

    def __init__(self, *, anew: bool) -> None:
        super().__init__(Stack())
        self.anew = anew

    def on_train_batch_start(self, *args: Any) -> None:
        self.views = [weight.detach() for weight in self.net.parameters()]

    @torch.no_grad()
    def write(self) -> None:
        for weight in self.net.parameters():
            weight.mul_(0.9)
        for view in [weight.detach() for weight in self.net.parameters()] if self.anew else self.views:
            view.add_(0.01)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.write()
        return self.loss(batch)


BOTH = r"RuntimeError: .*Parameter 'net\..*' was written on the CPU.*one of both would be lost"
for where, options in (("", {}), (", the last on the GPU", {"keep_on_gpu": ["net.head"]})):
    steps(
        f"weights written on host and device{where}", tiers("k=1, k'=2"), strategy=options, refused={"k=1, k'=2": BOTH},
        repairable=False,
        covers="one of both writes would be lost",
    )(partial(WritesOnBoth, anew=False))  # fmt: skip
    steps(
        f"weights written through a view taken in the step{where}", tiers("k=1, k'=2"), strategy=options,
        covers="the remedy of that error"
    )(partial(WritesOnBoth, anew=True))  # fmt: skip


class Holds(TwoSteps):
    """Notes whether the modules hold the device's weights."""

    def __init__(self) -> None:
        super().__init__("a closure")

    def look(self) -> None:
        self.noted.append(all(isinstance(weight, DeviceParameter) for weight in self.net.parameters()))

    def evaluate(self, batch: Any) -> Tensor:
        self.look()
        return super().evaluate(batch)


class Skipped(Holds):
    """The second optimizer's step is skipped, because its gradients are not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()  # type: ignore[misc]
        self.manual_backward(self.loss(batch))
        second.param_groups[0]["params"][0].grad.fill_(torch.inf)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
            self.look()
        return self.loss(batch).detach()


class StepsByItself(Holds):
    """Automatic optimization with an optimizer of one's own, which steps before the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def configure_optimizers(self) -> Any:
        self.own = torch.optim.SGD(list(self.net.parameters())[:2], lr=0.1)
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for weight in self.own.param_groups[0]["params"]:
            weight.grad = torch.ones_like(weight)
        self.look()
        self.own.step()
        self.look()
        self.own.zero_grad()
        return self.loss(batch)


class StepsInBackward(Holds):
    """Each weight has an optimizer that steps as soon as its gradient is there, while checkpointed code runs again."""

    def configure_optimizers(self) -> Any:
        self.own = {weight: torch.optim.SGD([weight], lr=0.1) for weight in self.net.parameters()}
        for weight in self.net.parameters():
            weight.register_post_accumulate_grad_hook(self.stepped)
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def stepped(self, weight: Tensor) -> None:
        self.own[weight].step()
        self.own[weight].zero_grad()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def noted(block: Any, x: Tensor) -> Tensor:
            self.look()
            return block(x)  # type: ignore[no-any-return]

        for block in self.net.blocks:  # type: ignore[union-attr]
            batch = checkpoint(noted, block, batch, use_reentrant=False)
        loss = batch.square().mean()
        self.manual_backward(loss)
        return loss.detach()


def all_held(ours: Outcome) -> None:
    assert ours.module.noted == [True] * len(ours.module.noted) != []


for kind, variant, where in (
    (Holds, "k=1, k'=2", "a closure"), (Skipped, "off, 16-mixed", "a step that was skipped"),
    (StepsByItself, "k=1, k'=2", "a step of the user's own"), (StepsInBackward, "k=1, k'=2", "a step in backward"),
):  # fmt: skip
    steps(f"the device's weights after {where}", tiers(variant), also=all_held, covers="modules hold them")(kind)


def no_hooks(ours: Outcome) -> None:
    assert ours.module.noted == [ours.module.noted[0]] * len(vectors())
    assert step_pre_hooks(ours.trainer.optimizers[1]) == step_pre_hooks(torch.optim.SGD([torch.zeros(1)]))


@steps("hooks of optimizers", WINDOWS, also=no_hooks)
class CountsHooks(TwoSteps):
    """None of ours stays with an optimizer, between two steps or after the run."""

    def __init__(self) -> None:
        super().__init__("never")

    def on_train_batch_start(self, *_: Any) -> None:
        self.noted.append(len(step_pre_hooks(self.trainer.optimizers[1]) or []))


@steps(
    "sparse gradients, stepped without Lightning's wrapper",
    {"by default, simulated": 2},
    batches=lambda: [x.abs().long() % 5 for x in vectors()],
    fusible=False,
)
class SparseByHand(Manual):
    """Fused SGD refuses them, and nobody knows of them before backward."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.EmbeddingBag(5, 8, sparse=True), nn.Linear(8, 8)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


# ---------------------------------------------------------------------- optimizers that wrap another one


class WithHooks(Wrapper):
    """As Opacus' ``DPOptimizer``: torch's hooks around the step are there, and the properties can be set."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.register_step_pre_hook(lambda *_: None)

    _optimizer_step_pre_hooks: Any = property(lambda self: self.inner._optimizer_step_pre_hooks)
    _optimizer_step_post_hooks: Any = property(lambda self: self.inner._optimizer_step_post_hooks)
    state = property(lambda self: self.inner.state, lambda self, value: setattr(self.inner, "state", value))


class WithAttributes(Wrapper):
    """As many wrappers: its groups and its state are attributes."""

    state = param_groups = defaults = None

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults


class Wrapped(Module):
    """Its state is loaded in mid-run, as from a checkpoint."""

    def __init__(self, kind: type[Wrapper]) -> None:
        super().__init__(Stack(4))
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return self.kind(torch.optim.AdamW(self.parameters(), lr=1e-2))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch and self.kind is not WithAttributes:
            saved = {"optimizer_states": [copy.deepcopy(each.state_dict()) for each in self.trainer.optimizers]}
            self.trainer.strategy.load_optimizer_state_dict(saved)


for wrapper in (Wrapper, WithHooks, WithAttributes):
    steps(
        f"an optimizer around another one, {wrapper.__name__}", {"users, k=1, two epochs": 3, "users, k=2, two epochs": 3,
        "off, simulated": 2, "by default, simulated": 3}, fusible=False,
        covers="set-up looked for state in the object's attributes and failed, and for hooks that it does not have",
    )(partial(Wrapped, wrapper))  # fmt: skip

# ---------------------------------------------------------------------- in a backward


# Not in poisoned variants: they hide the host's weights in a step, and these steps write them.
IN_BACKWARD = tiers(
    "users, k=1, two epochs", rest=["users, k=all, two epochs", "simulated, k=1"], long=["simulated, k=2, k'=2"]
)


class StepsInAHook(Module):
    """Steps an optimizer of its fourth block when gradients arrive at the second one."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.late = torch.optim.SGD(self.net.blocks[3].parameters(), lr=0.1)
        self.listen()

    def listen(self) -> None:
        self.net.blocks[1].register_full_backward_pre_hook(lambda *_: self.late.step())

    def on_train_batch_end(self, *_: Any) -> None:
        self.late.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        late = {id(p) for group in self.late.param_groups for p in group["params"]}
        return torch.optim.SGD([p for p in self.parameters() if id(p) not in late], lr=0.1)


@program("backward: a step of a block whose backward is over, in a hook of another block", IN_BACKWARD)
class InAnotherBlock(StepsInAHook):
    """The gradients were in flight then, and the step found none: the block was never trained."""


@program("backward: a step in a hook of a weight", IN_BACKWARD)
class InATensorHook(StepsInAHook):
    """The hook runs before the weight's own gradient is accumulated."""

    def listen(self) -> None:
        weight = self.net.blocks[1].inner.weight
        weight.register_hook(lambda gradient: self.late.step())


@program("backward: a step of two blocks in a hook of the first one's accumulated gradient", IN_BACKWARD)
class InAccumulation(StepsInAHook):
    """The other block's gradients may have arrived, but on plain Lightning they come after this hook."""

    def listen(self) -> None:
        self.late.add_param_group({"params": [*self.net.blocks[2].parameters()]})
        last = [*self.net.blocks[3].parameters()][-1]
        last.register_post_accumulate_grad_hook(lambda _: self.late.step())


@program("backward: a hook of another block uses what a hook of an accumulated gradient has noted", IN_BACKWARD)
class UsesANote(Module):
    """The hook of the accumulated gradient ran later than the other one, when the gradient was in CPU memory."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.scale = 1.0
        self.net.blocks[2].inner.weight.register_post_accumulate_grad_hook(self.note)
        self.net.blocks[1].register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * self.scale,))

    def note(self, weight: nn.Parameter) -> None:
        assert weight.grad is not None
        self.scale = 1 / (1 + float(weight.grad.norm()))


@program("backward: a hook of an accumulated gradient reads gradients that were accumulated before", IN_BACKWARD)
class ReadsEarlier(Module):
    """Gradients of residents, which arrive one by one, were not in ``p.grad`` yet if the hook's layer was complete."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.net.shift = nn.Parameter(torch.zeros(16))
        self.net.blocks[2].inner.weight.register_post_accumulate_grad_hook(self.scale)

    def loss(self, batch: Tensor) -> Tensor:
        return (self.net(batch) + self.net.shift).square().mean()  # type: ignore[no-any-return]

    def scale(self, weight: nn.Parameter) -> None:
        before = [self.net.shift, self.net.head.weight, self.net.blocks[2].outer.weight]
        weight.grad.mul_(1 / (1 + sum(p.grad.norm() for p in before)))


@program(
    "backward: gradients that a hook of another block changes if they are there",
    {**IN_BACKWARD, "bf16-mixed, k=1": 2, "backward, two epochs": 2},
    refused={
        "backward, two epochs": 'RuntimeError: .*"backward" had updated layer .* when, in the same backward, '
        "a hook used p.grad of one of its weights"
    },
)  # fmt: skip
class ChangesGradients(Module):
    """Gradients in flight were not there for the hook, and changes of earlier ones had no effect."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.seen: list[Any] = []
        self.net.blocks[1].register_full_backward_hook(lambda *_: self.change())

    def change(self) -> None:
        for at in (3, 2, 1):
            for p in self.net.blocks[at].parameters():
                self.seen.append(None if p.grad is None else p.grad.clone())
                if at == 3:
                    p.grad = None
                elif p.grad is not None:
                    p.grad.mul_(0.5)
