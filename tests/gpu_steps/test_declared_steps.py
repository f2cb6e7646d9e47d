"""Steps on the device of classes that only their users know: held to what they say, and what else is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.models import vectors
from tests.support.on_device import Stepped, on_device
from tests.support.runs import Outcome, assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.simdevice import simulated
from tests.support.tiers import first

Work = Callable[[Any, dict[str, Any], Tensor], Any]


def made(work: Work, after: Callable[[Any], None] = lambda self: None) -> Callable[[Any], Optimizer]:
    """An optimizer whose step does something for each parameter, and then descends."""

    class Declared(Optimizer):
        steps_each_parameter_alone = True

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 1e-2})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = None if closure is None else torch.enable_grad()(closure)()
            for group in self.param_groups:
                for p in group["params"]:
                    work(self, group, p)
                    if p.grad is not None:
                        p.sub_(group["lr"] * p.grad)
            after(self)
            return loss

    return Declared


def group_counts(self: Any, group: dict[str, Any], p: Tensor) -> None:
    group["count"] = group.get("count", 0) + 1


def keeps_by_parameter(self: Any, group: dict[str, Any], p: Tensor) -> None:
    vars(self).setdefault("kept", {})[p] = 1


def keeps_object(self: Any, group: dict[str, Any], p: Tensor) -> None:
    self.state[p]["box"] = SimpleNamespace(value=1)


def keeps_view(self: Any, group: dict[str, Any], p: Tensor) -> None:
    self.state[p]["view"] = p.data


def empties(self: Any, group: dict[str, Any], p: Tensor) -> None:
    if self.state[p]:
        del self.state[p]
    else:
        self.state[p]["one"] = torch.ones(1)


def keeps_twice(self: Any, group: dict[str, Any], p: Tensor) -> None:
    one = self.state[p].setdefault("one", torch.ones(2))
    self.state[p]["other"] = one[:]


KEPT: list[Tensor] = []

REFUSED: dict[str, tuple[Work, str]] = {
    "a group": (group_counts, "writes its param_groups"),
    "an attribute": (lambda self, group, p: setattr(self, "last", p.shape), "writes attributes of the optimizer"),
    "an attribute of a parameter": (lambda self, group, p: setattr(p, "seen", True), "writes attributes of parameters"),
    "state of its own": (lambda self, group, p: self.state["all"].update(n=1), "keeps state that is no parameter's"),
    "no state any more": (empties, "empties state"),
    "no gradient any more": (lambda self, group, p: setattr(p, "grad", None), "sets p.grad"),
    "parameters": (keeps_by_parameter, "keeps parameters|writes attributes"),
    "parameters elsewhere": (lambda self, group, p: KEPT.append(p), "keeps parameters"),
    "an object": (keeps_object, "keeps a SimpleNamespace in its state"),
    "a view": (keeps_view, "keeps a view of a parameter"),
    "a view of its gradient": (lambda self, group, p: self.state[p].update(g=p.grad.data), "keeps a view of a parameter"),
    "a view of other state": (keeps_twice, "keeps a view .* of other state"),
    "a sparse tensor": (lambda self, group, p: self.state[p].update(s=torch.eye(2).to_sparse()), "keeps a sparse tensor"),
    "a gradient": (
        lambda self, group, p: self.state[p].update(r=torch.ones(1, requires_grad=True)), "one that requires a gradient",
    ),
    "random numbers": (lambda self, group, p: p.add_(torch.rand_like(p)), "draws random numbers"),
    "Python's random numbers": (lambda self, group, p: p.add_(random.random()), "draws random numbers"),
    "NumPy's random numbers": (lambda self, group, p: p.add_(np.random.rand()), "draws random numbers"),
}  # fmt: skip


def half_stay() -> Any:
    return superpipeline(k=1, gpu_layers=0.5, optimizer_overlap="off")


def all_step() -> Any:
    return on_device(optimizer_overlap="off")


@pytest.mark.parametrize(
    "name", first(list(REFUSED), "a group", "random numbers", why="the others are compared beside them")
)
def test_what_would_be_lost_is_refused(name: str) -> None:
    work, said = REFUSED[name]
    with pytest.raises(RuntimeError, match=said):
        trainer_for(all_step()).fit(Stepped(made(work)), loader(vectors()))


def test_the_step_of_layers_that_stay_is_checked_too() -> None:
    """Beside layers that are uploaded for their steps, it is that of a part of the optimizer."""
    with pytest.raises(RuntimeError, match=r"Declared\.step writes its param_groups.*Leave both options out"):
        trainer_for(on_device(gpu_layers=1.0)).fit(Stepped(made(group_counts)), loader(vectors()))


def test_a_step_that_is_divided_by_place_draws_no_random_numbers() -> None:
    """Each place would draw its own, in another order than plain Lightning."""
    with pytest.raises(RuntimeError, match=r"Declared\.step draws random numbers.*Leave gpu_layers out"):
        trainer_for(half_stay()).fit(Stepped(made(REFUSED["random numbers"][0])), loader(vectors()))


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (lambda: torch.Generator().manual_seed(1), lambda own: torch.rand(1, generator=own).item()),
        (lambda: random.Random(1), lambda own: own.random()),
        (lambda: np.random.default_rng(1), lambda own: own.random()),
    ],
    ids=["torch", "Python", "NumPy"],
)
def test_a_step_that_draws_from_a_generator_of_its_own_is_refused(
    generator: Callable[[], Any], draw: Callable[[Any], float]
) -> None:
    """It would draw in the order of the layers, which is not that of the parameters."""

    def make(parameters: Any) -> Optimizer:
        found: Any = made(lambda self, group, p: p.mul_(1 + 1e-3 * draw(self.own)))(parameters)
        found.own = generator()
        return found  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError, match="draws random numbers"):
        trainer_for(on_device(optimizer_overlap="off")).fit(Stepped(make), loader(vectors()))


def decays_all(self: Any, group: dict[str, Any], p: Tensor) -> None:
    self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
    p.mul_(0.9)


def writes_gradient(self: Any, group: dict[str, Any], p: Tensor) -> None:
    if p.grad is not None:
        p.grad.data.mul_(0.5)


class HalfUsed(Stepped):
    """Some parameters never get a gradient. Gradients are not set to None, so that what a step does to them counts."""

    def __init__(self, work: Work, after: Callable[[Any], None] = lambda self: None) -> None:
        super().__init__(made(work, after))
        net: Any = self.net
        net.blocks[1].inner.bias.requires_grad_(False)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        if batch_idx % 2:
            optimizer.zero_grad()


@pytest.mark.parametrize("way", [all_step, half_stay])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("work", [decays_all, writes_gradient])
def test_what_belongs_to_one_parameter_is_plains(work: Work, precision: Any, way: Callable[[], Any]) -> None:
    def run(strategy: Any) -> Outcome:
        return fit(lambda: HalfUsed(work), vectors(), strategy, recorded="losses", precision=precision)

    assert_same(run(way()), run("auto"))


def test_a_step_that_sets_gradients_to_zero_does_so_in_its_own_layer() -> None:
    def run(strategy: Any) -> Outcome:
        def make() -> Stepped:
            return HalfUsed(writes_gradient, lambda self: self.zero_grad(set_to_none=False))

        return fit(make, vectors(), strategy, recorded="losses")

    assert_same(run(on_device(optimizer_overlap="off")), run("auto"))


def test_what_a_step_makes_of_gradients_is_there_after_it() -> None:
    """No hook is there that could look at them, so that those of known classes would stay as they came, in 16 bits."""

    def run(strategy: Any) -> Outcome:
        outcome = fit(
            lambda: Stepped(made(writes_gradient)), vectors(), strategy, recorded="nothing", precision="bf16-mixed"
        )
        outcome.extra = {name: p.grad for name, p in outcome.module.named_parameters()}
        return outcome

    ours, plain = run(on_device()), run("auto")
    assert_same(ours, plain)
    assert_equal(ours.extra, plain.extra, "gradients")


def by_name(self: Any, group: dict[str, Any], p: Tensor) -> None:
    (name,) = (name for name, each in zip(group["param_names"], group["params"], strict=True) if each is p)
    p.mul_(1 - len(name) / 100)


def test_a_step_sees_the_names_of_parameters() -> None:
    def run(strategy: Any) -> Outcome:
        def make() -> Stepped:
            module = Stepped()
            module.make = lambda _: made(by_name)(module.named_parameters())
            return module

        return fit(make, vectors(), strategy, recorded="losses")

    assert_same(run(on_device()), run("auto"))


class Kind(nn.Parameter):
    """A user's class of parameters."""


class OfKinds(Stepped):
    """Some of its parameters are of a class of their own, and all have an attribute that their optimizer reads."""

    def __init__(self) -> None:
        super().__init__(made(by_kind))
        net: Any = self.net
        net.stem.weight = Kind(net.stem.weight.detach())
        for number, p in enumerate(self.parameters()):
            vars(p)["rate"] = 1 - number / 100


def by_kind(self: Any, group: dict[str, Any], p: Tensor) -> None:
    p.mul_(vars(p)["rate"] * (0.5 if type(p) is Kind else 1.0))


def test_a_step_sees_the_class_and_the_attributes_of_parameters() -> None:
    def run(strategy: Any) -> Outcome:
        return fit(OfKinds, vectors(), strategy, recorded="losses")

    assert_same(run(on_device(optimizer_overlap="off")), run("auto"))


class Images(Stepped):
    """Its weights lie with channels last, and have odd sizes."""

    def __init__(self, make: Callable[[Any], Optimizer]) -> None:
        super().__init__(make)
        blocks = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)]
        self.net = nn.Sequential(*blocks).to(memory_format=torch.channels_last)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch[:3, :3, None, None].expand(3, 3, 5, 5))


@pytest.mark.long("takes a second or more")
def test_what_is_stepped_lies_in_memory_as_kernels_ask_for_it() -> None:
    seen: list[Any] = []

    def looks(self: Any, group: dict[str, Any], p: Tensor) -> None:
        assert p.grad is not None
        moment = self.state[p].setdefault("moment", torch.zeros_like(p))
        seen.append([(each.stride(), each.data_ptr() % 16) for each in (p, p.grad, moment)])
        p.sub_(moment.mul_(0.9).add_(p.grad), alpha=1e-2)

    def run(make: Any, strategy: Any) -> Outcome:
        seen.clear()
        return fit(lambda: Images(make), vectors(), strategy, recorded="losses")

    for make in (made(looks), lambda ps: torch.optim.AdamW(ps, fused=True)):
        plain = run(make, "auto")
        strides = [[stride for stride, _ in each] for each in seen]
        with simulated():
            assert_same(run(make, on_device(optimizer_overlap="off")), plain)
        assert [[stride for stride, _ in each] for each in seen] == strides
        assert not any(rest for each in seen for _, rest in each), "16 bytes at a time"


def of_guide() -> type[Optimizer]:
    """The class that a guide shows."""
    text = Path(__file__).parents[2].joinpath("examples", "guide", "updates.md").read_text()
    found: dict[str, Any] = {"__name__": "guide"}
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    exec(next(block for block in blocks if "class MuonAndAdamW" in block), found)
    return found["MuonAndAdamW"]  # type: ignore[no-any-return]


class Both(Stepped):
    def __init__(self, kind: type[Optimizer]) -> None:
        super().__init__(lambda ps: kind(*map(list, partition(lambda p: p.ndim != 2, ps))))  # type: ignore[call-arg]


def partition(second: Callable[[Tensor], bool], ps: Any) -> tuple[list[Tensor], list[Tensor]]:
    ps = list(ps)
    return [p for p in ps if not second(p)], [p for p in ps if second(p)]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_two_optimizers_of_torchs_in_one_class(precision: Any, tmp_path: Path) -> None:
    kind = of_guide()

    def run(strategy: Any, **options: Any) -> Outcome:
        return fit(lambda: Both(kind), vectors(), strategy, recorded="losses", precision=precision, **options)

    ours, plain = run(on_device(optimizer_overlap="off")), run("auto")
    assert_same(ours, plain)
    assert_same(run(superpipeline(k=1)), plain)
    plain.trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = {"max_epochs": 2, "ckpt_path": tmp_path / "last.ckpt"}
    assert_same(run(on_device(optimizer_overlap="off"), **again), run("auto", **again))


class Scaled(Optimizer):
    """Looks at its loss, and needs its closure."""

    steps_each_parameter_alone = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any, scale: float = 1.0) -> Any:  # type: ignore[override]
        loss = torch.enable_grad()(closure)()
        for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            p.sub_(scale * 1e-2 * loss.clamp(max=1.0) * p.grad)
        return loss


class GivesScale(Stepped):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure, scale=0.5)


class GivesMore(Precision):
    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **_: Any) -> Any:
        return optimizer.step(lambda: self._wrap_closure(model, optimizer, closure), 0.5)


@pytest.mark.rest("takes tenths of a second")
def test_a_step_is_given_its_closure_and_nothing_else() -> None:
    def run(strategy: Any) -> Outcome:
        return fit(lambda: Stepped(Scaled), vectors(), strategy, recorded="losses")

    assert_same(run(on_device()), run("auto"))
    with pytest.raises(RuntimeError, match=r"Scaled.step was given 'scale'"):
        trainer_for(on_device()).fit(GivesScale(Scaled), loader(vectors()))
    with pytest.raises(RuntimeError, match=r"Scaled.step was given more than a closure"):
        trainer_for(on_device(), plugins=[GivesMore()]).fit(Stepped(Scaled), loader(vectors()))


class OnTop(torch.optim.AdamW):
    """Steps as its base does, which calls the closure."""

    steps_each_parameter_alone = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for p in [p for group in self.param_groups for p in group["params"]]:
            p.mul_(0.9)
        return loss


class Below(torch.optim.AdamW):
    """Calls the closure itself, so that layers are stepped already when its base steps."""

    steps_each_parameter_alone = True

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = torch.enable_grad()(closure)()
        super().step()
        return loss


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("kind", [OnTop, Below])
def test_a_step_inside_a_step_is_refused_and_does_not_hang(kind: Any) -> None:
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # torch hooks the step of a class once one was made
    with pytest.raises(RuntimeError, match=rf"{kind.__name__}.step calls another step"), simulated():
        trainer_for(on_device()).fit(Stepped(kind), loader(vectors(1)))  # by the second step it could be seen otherwise


def steps_another(self: Any, group: dict[str, Any], p: Tensor) -> None:
    torch.optim.SGD([p], lr=0.1).step()


class Views(Stepped):
    """Keeps a view of a weight, which is to show the new one after a step."""

    def __init__(self) -> None:
        super().__init__(made(steps_another))
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        net: Any = self.net
        self.view = net.head.weight.detach()[0]
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.view.clone())


@pytest.mark.long("takes a second or more")
def test_a_step_may_step_an_optimizer_of_one_parameter() -> None:
    """It runs in the background, where no step is announced: nothing is fetched before its layer is stepped."""

    def run(strategy: Any) -> Outcome:
        outcome = fit(Views, vectors(), strategy, recorded="losses")
        outcome.extra["seen"] = outcome.module.seen
        return outcome

    plain = run("auto")
    with simulated():
        ours = run(on_device())
    assert_same(ours, plain)
    assert_equal(ours.extra, plain.extra, "views")


class StepsAnother(Callback):
    """Steps an optimizer of its own."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        torch.optim.SGD(pl_module.parameters(), lr=0.1).step()


@pytest.mark.rest("takes tenths of a second")
def test_steps_of_other_optimizers_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"SGD is not what Stepped\.configure_optimizers has returned"):
        trainer_for(on_device(), callbacks=[StepsAnother()]).fit(Stepped(), loader(vectors()))


@pytest.mark.parametrize(
    ("make", "asked", "options", "said", "other"),
    [
        (lambda: Stepped(made(decays_all)), "forward", {}, "Declared may draw random numbers", "off"),
        (Stepped, "forward", {"precision": "bf16-true"}, "with HalfPrecision", "off"),
        (Stepped, "backward", {"gradient_clip_val": 1.0}, r"gradient_clip_val=1.0", "forward"),
    ],
    ids=["declared", "bf16-true", "clipped"],
)
def test_what_cannot_step_in_the_background(
    make: Callable[[], Stepped], asked: str, options: dict[str, Any], said: str, other: str
) -> None:
    """The remedy keeps the place, and works."""
    remedy = rf'Use SuperpipelineStrategy\(optimizer_on="gpu", optimizer_overlap="{other}"\)\.'
    with pytest.raises(ValueError, match=rf'optimizer_overlap="{asked}" cannot be used: {said}.*{remedy}'):
        trainer_for(on_device(optimizer_overlap=asked), **options).fit(make(), loader(vectors()))
    trainer_for(on_device(optimizer_overlap=other), **options).fit(make(), loader(vectors()))


# ---------------------------------------------------------------------- torch's own


class Lonely(Stepped):
    """One parameter never gets a gradient, so that its layer is not complete in backward."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False, fused=False))
        net: Any = self.net
        net.blocks[1].lonely = torch.nn.Parameter(torch.ones(3))


@pytest.mark.rest("takes tenths of a second")
def test_layers_that_backward_leaves_step_in_the_users_form() -> None:
    plain = fit(Lonely, vectors(), "auto", recorded="losses")
    assert_same(fit(Lonely, vectors(), on_device(optimizer_overlap="backward"), recorded="losses"), plain)


class Strided(Stepped):
    """Gives a parameter a gradient that is a part of a larger tensor."""

    def on_after_backward(self) -> None:
        net: Any = self.net
        p = net.blocks[0].inner.weight
        wide = torch.full((p.shape[0], 2 * p.shape[1]), 7.0, device=p.grad.device)
        wide[:, : p.shape[1]] = p.grad
        p.grad = wide[:, : p.shape[1]]


@pytest.mark.rest("takes tenths of a second")
def test_the_norm_is_that_of_the_gradient_alone() -> None:
    def run(strategy: Any) -> Outcome:
        return fit(Strided, vectors(), strategy, recorded="losses", gradient_clip_val=0.05)

    assert_same(run(on_device()), run("auto"))
