"""Steps on the GPU: torch's optimizers in each form, classes that only their users know, and user code around the steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.capabilities.gpu_steps.on_device import StepsOnDevice
from sp_lightning.core.torch_compat.modes import default_dtype
from tests.equality.rows import Tiers, program, tiers
from tests.support.models import CASES, vectors
from tests.support.nets import Does, NormedStack, Stepped, adamw, alternating
from tests.support.on_disk import away
from tests.support.runs import Outcome

OFF, FORWARD, BACKWARD = (f"{mode}, on the GPU" for mode in ("off", "forward", "backward"))
HALF = f"{OFF}, half stays"
SIMULATED = tiers(rest=[f"{FORWARD}, simulated"], long=[f"{OFF}, simulated"])
CASTS = f"{FORWARD}, bf16-mixed, simulated"


def gpu(name: str, variants: Tiers, **more: Any) -> Callable[[Any], Any]:
    return program(f"gpu steps: {name}", variants, **more)


def refused(name: str, said: str, make: Any, *, variant: str = OFF, error: str = "RuntimeError", **more: Any) -> None:
    gpu(
        name, {variant: more.pop("tier", 1)}, refused={variant: f"{error}: .*{said}"},
        **{"covers": "refused by name, because it would not be plain Lightning's", **more},
    )(make)  # fmt: skip


# ---------------------------------------------------------------------- torch's optimizers

FORMS: dict[str, dict[str, Any]] = {
    "as it comes": {}, "foreach": {"foreach": True}, "one by one": {"foreach": False}, "fused": {"fused": True},
    "a tensor as learning rate": {"lr": torch.tensor(1e-2)}, "amsgrad": {"amsgrad": True},
}  # fmt: skip
KINDS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip

ALONE = ("ASGD", "Adafactor")  # never beside a forward, which may set what their steps read

for kind in KINDS:
    for form, options in FORMS.items():
        make = partial(
            getattr(torch.optim, kind), **{"lr": 1e-2, **options, **({"momentum": 0.9} if kind == "SGD" else {})}
        )
        try:
            make([nn.Parameter(torch.ones(1))])
        except (TypeError, RuntimeError, ValueError):
            continue  # the class has no such form
        shown = form == "as it comes" or (kind in ("AdamW", "SGD") and form != "amsgrad")
        simulated = f"{OFF}, simulated" if kind in ALONE else f"{FORWARD}, clipped, simulated"
        gpu(
            f"{kind}, {form}", {simulated: 2 if shown else 3,
            f"{OFF}, clipped": 1 if shown and kind in ("Adafactor", "AdamW") else 3},
            covers="a step by layers has the bits of the whole",
        )(partial(Stepped, make))  # fmt: skip


class WithMuon(Stepped):
    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([p for p in self.parameters() if p.ndim == 2], lr=1e-2)


gpu("Muon", tiers(OFF), covers="its matrices alone are trained")(WithMuon)


def of_bitsandbytes(name: str, **settings: Any) -> Callable[[], Stepped]:
    def make() -> Stepped:
        optim: Any = pytest.importorskip("bitsandbytes.optim")
        return Stepped(lambda parameters: getattr(optim, name)(parameters, lr=1e-2, **settings))

    return make


for name, settings, variants in (
    ("AdamW", {}, tiers(rest=[OFF], long=[BACKWARD])),
    ("AdamW8bit", {"min_8bit_size": 16}, tiers(rest=[BACKWARD], long=[OFF, f"{BACKWARD}, simulated"])),
    ("PytorchLARS", {"momentum": 0.9}, tiers(OFF)),
):
    gpu(
        f"bitsandbytes' {name}", variants, covers="its kernels for the CPU; state of 8 bits has tables that all parameters share"
    )(of_bitsandbytes(name, **settings))  # fmt: skip
for mode in ("forward", "backward"):
    refused(
        f"bitsandbytes' AdamW8bit beside {mode}",
        r'AdamW8bit is not one of .* Step on the GPU \(optimizer_on="gpu"\), or use Sup',
        of_bitsandbytes("AdamW8bit"), variant=mode, error="ValueError", repairable=False, fusible=False,
    )  # fmt: skip
refused(
    "bitsandbytes' pages", "PagedAdamW8bit pages its state by itself", of_bitsandbytes("PagedAdamW8bit"), error="ValueError"
)  # fmt: skip

# ---------------------------------------------------------------------- classes that only their users know

Work = Callable[[Any, dict[str, Any], Tensor], Any]


def made(work: Work, after: Callable[[Any], None] = lambda self: None, own: Callable[[], Any] = lambda: None) -> Any:
    """An optimizer whose step does something for each parameter, and then descends."""

    class Declared(Optimizer):
        steps_each_parameter_alone = True

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 1e-2})
            self.own = own()

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


def empties(self: Any, group: dict[str, Any], p: Tensor) -> None:
    if self.state[p]:
        del self.state[p]
    else:
        self.state[p]["one"] = torch.ones(1)


def keeps_twice(self: Any, group: dict[str, Any], p: Tensor) -> None:
    one = self.state[p].setdefault("one", torch.ones(2))
    self.state[p]["other"] = one[:]


def keeps(make: Callable[[Tensor], Any]) -> Work:
    return lambda self, group, p: self.state[p].update(kept=make(p))


KEPT: list[Tensor] = []
LOST: dict[str, tuple[Work, str]] = {
    "a group": (group_counts, "writes its param_groups"),
    "an attribute": (lambda self, group, p: setattr(self, "last", p.shape), "writes attributes of the optimizer"),
    "an attribute of a parameter": (lambda self, group, p: setattr(p, "seen", True), "writes attributes of parameters"),
    "state of its own": (lambda self, group, p: self.state["all"].update(n=1), "keeps state that is no parameter's"),
    "no state any more": (empties, "empties state"),
    "no gradient any more": (lambda self, group, p: setattr(p, "grad", None), "sets p.grad"),
    "parameters": (
        lambda self, group, p: vars(self).setdefault("kept", {}).update({p: 1}), "keeps parameters|.*writes attributes",
    ),
    "parameters elsewhere": (lambda self, group, p: KEPT.append(p), "keeps parameters"),
    "an object": (keeps(lambda p: SimpleNamespace(value=1)), "keeps a SimpleNamespace in its state"),
    "a view": (keeps(lambda p: p.data), "keeps a view of a parameter"),
    "a view of its gradient": (keeps(lambda p: p.grad.data), "keeps a view of a parameter"),  # type: ignore[union-attr]
    "a view of other state": (keeps_twice, "keeps a view .* of other state"),
    "a sparse tensor": (keeps(lambda p: torch.eye(2).to_sparse()), "keeps a sparse tensor"),
    "a gradient": (keeps(lambda p: torch.ones(1, requires_grad=True)), "one that requires a gradient"),
    "random numbers": (lambda self, group, p: p.add_(torch.rand_like(p)), "draws random numbers"),
    "Python's random numbers": (lambda self, group, p: p.add_(random.random()), "draws random numbers"),
    "NumPy's random numbers": (lambda self, group, p: p.add_(np.random.rand()), "draws random numbers"),
}  # fmt: skip
for name, (work, said) in LOST.items():
    refused(
        f"a step that leaves {name}", said, partial(Stepped, made(work)), tier=1 if name in ("a group", "random numbers") else 2,
        covers="what would be lost with a layer's step",
    )  # fmt: skip
refused(
    "a step that leaves a group, of layers that stay", r"Declared\.step writes its param_groups.*Leave both options out",
    partial(Stepped, made(group_counts)), strategy={"gpu_layers": 1.0},
)  # fmt: skip


def draws(draw: Callable[[Any], float]) -> Work:
    return lambda self, group, p: p.mul_(1 + 1e-3 * draw(self.own))


for name, own, draw in (
    ("torch", lambda: torch.Generator().manual_seed(1), lambda own: torch.rand(1, generator=own).item()),
    ("Python", lambda: random.Random(1), lambda own: own.random()),
    ("NumPy", lambda: np.random.default_rng(1), lambda own: own.random()),
):
    refused(
        f"a step that draws from a generator of its own, {name}", "draws random numbers",
        partial(Stepped, made(draws(draw), own=own)),
        covers="it would draw in the order of the layers, which is not that of the parameters",
    )  # fmt: skip


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
        self.net.blocks[1].inner.bias.requires_grad_(False)  # type: ignore[index, union-attr]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        if batch_idx % 2:
            optimizer.zero_grad()


PARTS = tiers(OFF, f"{HALF}, bf16-mixed", rest=[f"{OFF}, bf16-mixed", HALF])
gpu("a step of weights without gradients", PARTS, covers="what belongs to one parameter")(partial(HalfUsed, decays_all))
gpu("a step that writes gradients", PARTS, covers="what belongs to one parameter")(partial(HalfUsed, writes_gradient))
gpu(
    "a step that sets gradients to zero", tiers(OFF), covers="it does so in its own layer"
)(partial(HalfUsed, writes_gradient, lambda self: self.zero_grad(set_to_none=False)))  # fmt: skip


def by_name(self: Any, group: dict[str, Any], p: Tensor) -> None:
    (name,) = (name for name, each in zip(group["param_names"], group["params"], strict=True) if each is p)
    p.mul_(1 - len(name) / 100)


@gpu("names of parameters", tiers(OFF))
class Named(Stepped):
    """A step sees them."""

    def configure_optimizers(self) -> Any:
        return made(by_name)(self.named_parameters())


class Kind(nn.Parameter):
    """A user's class of parameters."""


def by_kind(self: Any, group: dict[str, Any], p: Tensor) -> None:
    p.mul_(vars(p)["rate"] * (0.5 if type(p) is Kind else 1.0))


@gpu("classes and attributes of parameters", tiers(OFF))
class OfKinds(Stepped):
    """A step sees them."""

    def __init__(self) -> None:
        super().__init__(made(by_kind))
        net: Any = self.net
        net.stem.weight = Kind(net.stem.weight.detach())
        for number, p in enumerate(self.parameters()):
            vars(p)["rate"] = 1 - number / 100


def aligned(ours: Outcome) -> None:
    assert ours.module.noted
    assert not any(ours.module.noted), "16 bytes at a time"


@gpu("memory as kernels ask for it", tiers(long=[f"{OFF}, simulated"]), also=aligned)
class Images(Stepped):
    """Weights with channels last, of odd sizes: strides are plain Lightning's, and addresses those of vectors."""

    def __init__(self) -> None:
        super().__init__(made(self.look))
        blocks = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)]
        self.net = nn.Sequential(*blocks).to(memory_format=torch.channels_last)
        self.seen, self.noted = list[Any](), list[int]()

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch[:3, :3, None, None].expand(3, 3, 5, 5))

    def look(self, optimizer: Any, group: dict[str, Any], p: Any) -> None:
        moment = optimizer.state[p].setdefault("moment", torch.zeros_like(p))
        self.seen += [each.stride() for each in (p, p.grad, moment)]
        self.noted += [each.data_ptr() % 16 for each in (p, p.grad, moment)] if hasattr(self, "there") else []
        p.sub_(moment.mul_(0.9).add_(p.grad), alpha=1e-2)

    def on_train_start(self) -> None:
        self.there = True


class ImagesFused(Images):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


gpu("memory as fused kernels ask for it", tiers(long=[f"{OFF}, simulated"]), covers="weights with channels last")(
    ImagesFused
)


def of_guide() -> Stepped:
    text = Path(__file__).parents[3].joinpath("examples", "guide", "updates.md").read_text()
    found: dict[str, Any] = {"__name__": "guide"}
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    exec(next(block for block in blocks if "class MuonAndAdamW" in block), found)

    def make(ps: Any) -> Any:
        ps = list(ps)
        return found["MuonAndAdamW"]([p for p in ps if p.ndim == 2], [p for p in ps if p.ndim != 2])

    return Stepped(make)


gpu(
    "two optimizers of torch's in one class", tiers(long=[OFF, f"{OFF}, bf16-mixed", "off"]),
    covers="the class that a guide shows"
)(of_guide)  # fmt: skip


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


gpu("a step that needs its closure", tiers(OFF), covers="it is given that")(partial(Stepped, Scaled))
refused("a step that is given a setting", r"Scaled.step was given 'scale'", partial(GivesScale, Scaled))
refused(
    "a step that is given more", "Scaled.step was given more than a closure", partial(Stepped, Scaled), plugins=[GivesMore()]
)  # fmt: skip


class OnTop(torch.optim.AdamW):
    """Steps as its base does, which calls the closure."""

    steps_each_parameter_alone = True

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Below(torch.optim.AdamW):
    """Calls the closure itself, so that layers are stepped already when its base steps."""

    steps_each_parameter_alone = True

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = torch.enable_grad()(closure)()
        super().step()
        return loss


for nested in (OnTop, Below):
    refused(
        f"a step inside a step, {nested.__name__}", rf"{nested.__name__}.step calls another step", partial(Stepped, nested),
        variant=f"{OFF}, simulated", tier=2, batches=lambda: vectors(1), covers="by the second step it could be seen otherwise",
        inside=lambda: mock.patch.object(torch.optim, "_", torch.optim.AdamW([torch.ones(1)]), create=True),  # hooks its step
    )  # fmt: skip


@gpu(
    "a step of another optimizer within a step, of one parameter",
    tiers(long=[f"{OFF}, simulated"]),
)
class Views(Stepped):
    """No step is announced then. Nothing is fetched before its layer is stepped: a view of a weight shows the new one."""

    def __init__(self) -> None:
        super().__init__(made(lambda self, group, p: torch.optim.SGD([p], lr=0.1).step()))
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.view = self.net.head.weight.detach()[0]  # type: ignore[union-attr, index, operator]
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.view.clone())


refused(
    "steps of other optimizers", r"SGD is not what Stepped\.configure_optimizers has returned", Stepped, tier=2,
    callbacks=lambda: [Does(on_train_batch_end=lambda _, m, *__: torch.optim.SGD(m.parameters(), lr=0.1).step())],
)  # fmt: skip


def beside(name: str, mode: str, other: str, said: str, make: Any, **more: Any) -> None:
    """The remedy keeps the place, and works."""
    remedy = rf'Use SuperpipelineStrategy\(optimizer_on="gpu", optimizer_overlap="{other}"\)\.'
    refused(
        f"{name} beside {mode}", rf'optimizer_overlap="{mode}" cannot be used: {said}.*{remedy}', make, error="ValueError",
        variant=f"{mode}, on the GPU{more.pop('way', '')}", **more,
    )  # fmt: skip


beside(
    "a class of the user's", "forward", "off", "Declared may draw random numbers", partial(Stepped, made(decays_all))
)
beside("16 bits", "forward", "off", "with HalfPrecision", Stepped, way=", bf16-true")
for named, reads in (
    ("ASGD", partial(Stepped, partial(torch.optim.ASGD, lr=1e-2))), ("Muon", WithMuon),
    ("Adafactor", partial(Stepped, partial(torch.optim.Adafactor, lr=1e-2))),
):  # fmt: skip
    beside(
        f"{named},", "forward", "off", rf"{named} reads torch's default dtype or precision of products", reads, tier=2
    )
beside("clipping by norm", "backward", "forward", "gradient_clip_val=", Stepped, gradient_clip_val=1.0)


class Unknown(torch.optim.SGD):
    pass


class Known(Unknown):
    steps_each_parameter_alone = True


class Manual(Stepped):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnNorm(Precision):
    def clip_grad_by_norm(self, *args: Any) -> None:
        super().clip_grad_by_norm(*args)


class Exchanges(Stepped):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.trainer.optimizers = [Unknown(self.parameters(), lr=0.1)]


NOT_PLAINS: tuple[tuple[str, str, Any, dict[str, Any]], ...] = (
    ("LBFGS", "LBFGS steps all parameters together", partial(Stepped, torch.optim.LBFGS), {}),
    ("unknown", r"Unknown.steps_each_parameter_alone = True", partial(Stepped, partial(Unknown, lr=0.1)), {}),
    ("manual optimization", "optimization is manual", Manual, {}),
    ("norms of the user's", "OwnNorm.clip_grad_by_norm would compute norms on the CPU", Stepped, {"plugins": [OwnNorm()]}),
    ("an optimizer that unscales", "the fused step of AdamW unscales gradients by itself",
     partial(Stepped, partial(torch.optim.AdamW, fused=True)), {"plugins": [MixedPrecision("16-mixed", "cpu")]}),
    ("an exchange", 'optimizer_on="gpu" cannot be used: Unknown is not known to step each parameter', Exchanges, {}),
)  # fmt: skip
for name, said, make, more in NOT_PLAINS:
    refused(name, said, make, error="ValueError", **more)
gpu("an unknown optimizer that says so", tiers(OFF, f"{OFF}, simulated"), covers="the remedy of its refusal")(
    partial(Stepped, partial(Known, lr=0.1))
)


class Own(Optimizer):
    """Keeps lists and numbers, writes its gradient, and gives a parameter new memory."""

    steps_each_parameter_alone = True
    dtype = torch.float32

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["step"] = state.get("step", torch.zeros(())).add_(1)
                moments = [0.9 * each for each in state.get("moments", [])]
                state["moments"] = moments or [torch.zeros_like(p), torch.ones_like(p)]
                state["moments"][0] += p.grad
                p.data = (p.data - group["lr"] * state["moments"][0] / state["moments"][1].sqrt()).to(self.dtype)
                p.grad.mul_(0.5)
        return loss


class GivesOthers(Own):
    dtype = torch.float64


gpu(
    "an optimizer with lists, numbers and new memory", tiers(long=[f"{OFF}, accumulated, simulated"]), covers="state of any kind"
)(partial(Stepped, Own))  # fmt: skip
refused(
    "another dtype",
    r"GivesOthers.step has given a parameter of 'net\S+' torch.float64 of shape",
    partial(Stepped, GivesOthers),
)


@partial(
    refused, "state that two weights share in a list", "updates layers one by one, but two parameters share a state"
)
class Shares(Stepped):
    def __init__(self) -> None:
        super().__init__(Own)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            blocks, state = self.net.blocks, self.trainer.optimizers[0].state
            one, other = (state[block.inner.weight] for block in blocks[:2])  # type: ignore[index, union-attr]
            one["moments"][1] = other["moments"][1]


# ---------------------------------------------------------------------- state and gradients as users find them


@contextmanager
def staying() -> Iterator[list[Tensor]]:
    """The tensors of state that do not come to the device for their step."""
    found, exchange = list[Tensor](), StepsOnDevice._exchange

    def noting(self: Any, *args: Any) -> Any:
        pairs = exchange(self, *args)
        found.extend(each for each, _ in pairs)
        return pairs

    with mock.patch.object(StepsOnDevice, "_exchange", noting):
        yield found


def on_gpu(ours: Outcome) -> None:
    assert all(each.ndim == 0 for each in ours.extra["inside"])


@gpu("state replaced, written and loaded", tiers(long=[f"{OFF}, simulated"]), inside=staying, also=on_gpu)
class Replaces(Stepped):
    """It is stepped on the GPU all the same."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.trainer.optimizers[0]
        if batch_idx == 1:
            state = next(iter(optimizer.state.values()))
            state["exp_avg"] = state["exp_avg"] * 2
        if batch_idx == 2:
            optimizer.load_state_dict(optimizer.state_dict())
            next(iter(optimizer.state.values()))["exp_avg_sq"].mul_(2)


for steps in (2, 5):
    gpu(
        f"parts that take turns, {steps} steps", {OFF: 1, **tiers(long=["state on a disk, off"] * (steps == 5))},
        strategy={"optimizer_on": "gpu"}, batches=partial(vectors, steps),
        covers="what has no gradient keeps its state, though the part that steps has state of the same shapes",
    )(alternating)  # fmt: skip


def grow(ours: Outcome) -> None:
    noted = ours.module.noted
    assert all(
        now > before
        for one, other in zip(noted, noted[1:], strict=False)
        for before, now in zip(one, other, strict=True)
    )


@gpu("versions of weights", tiers(OFF), also=grow)
class Versions(Stepped):
    """A step shows in them."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Any] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.noted.append([p._version for p in self.parameters()])


class InDouble(Stepped):
    """Computes in float64 by default within its step, as code does that solves equations."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with default_dtype(torch.float64):
            return super().training_step(batch, batch_idx)


def in_single(ours: Outcome) -> None:
    assert {each["step"].dtype for each in ours.optimizers[0]["state"].values()} == {torch.float32}


gpu(
    "another default dtype in the step", tiers(rest=[f"{FORWARD}, simulated"]), also=in_single,
    covers="state is made in that of the step"
)(InDouble)  # fmt: skip
gpu(
    "another default dtype in the step, of an optimizer that depends on it", tiers(rest=[f"{OFF}, simulated"]),
    covers="its step finds the settings of its caller",
)(partial(InDouble, partial(torch.optim.ASGD, lr=1e-2)))  # fmt: skip


class Lonely(Stepped):
    """One parameter never gets a gradient, so that its layer is not complete in backward."""

    def __init__(self) -> None:
        super().__init__(partial(torch.optim.AdamW, lr=1e-2, foreach=False, fused=False))
        self.net.blocks[1].lonely = nn.Parameter(torch.ones(3))  # type: ignore[index, union-attr]


gpu("layers that backward leaves", tiers(rest=[BACKWARD]), covers="they step in the user's form")(Lonely)


@gpu("a gradient that is a part of a larger tensor", tiers(f"{OFF}, clipped"))
class Strided(Stepped):
    """The norm is that of the gradient alone."""

    def on_after_backward(self) -> None:
        p: Any = self.net.blocks[0].inner.weight  # type: ignore[index, union-attr]
        wide = torch.full((p.shape[0], 2 * p.shape[1]), 7.0, device=p.grad.device)
        wide[:, : p.shape[1]] = p.grad
        p.grad = wide[:, : p.shape[1]]


def once_each(ours: Outcome) -> None:
    strategy: Any = ours.trainer.strategy
    assert strategy.stats().offloaded_gradient_bytes == len(vectors()) * ours.state["scale"].nbytes


@gpu("a weight beside all layers", tiers(rest=[BACKWARD]), also=once_each)
class Scales(Stepped):
    """Its gradient leaves the device as backward ends, and no layer's does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def loss(self, batch: Any) -> Tensor:
        return super().loss(self.scale * batch)


gpu(
    "accumulated gradients in backward", tiers(f"{BACKWARD}, accumulated"), batches=partial(vectors, 4),
    covers="they come to the host"
)(Stepped)  # fmt: skip


def halve(p: Any) -> None:
    p.grad.mul_(0.5)


@gpu("hooks on gradients that come later", tiers(BACKWARD), batches=partial(vectors, 4))
class HooksLater(Stepped):
    """Nothing refuses them any more, and the gradients come to the host."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            for p in self.net.blocks[1].parameters():  # type: ignore[index, union-attr]
                p.register_post_accumulate_grad_hook(halve)


# ---------------------------------------------------------------------- a fetch that needs nothing of the host


class Shrinks(nn.Linear):
    """Writes its weight in place before it uses that."""

    def __init__(self) -> None:
        super().__init__(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


def shrinking() -> Stepped:
    module = Stepped()
    module.net = nn.Sequential(*(Shrinks() for _ in range(5)))
    return module


LATE = {
    "shrinking": shrinking,
    **{n: CASES[n].make for n in ("clamped-in-forward", "captured-in-forward", "read-without-forward")},
}
for name, build in LATE.items():
    gpu(
        f"weights that a forward uses before they are there, {name}", tiers(long=[CASTS, f"{FORWARD}, simulated"]),
        covers="a fetch goes on while the host's weights are still on their way: code that reads or writes those waits",
    )(build)  # fmt: skip


@gpu("weights written after a step", tiers(long=[CASTS]))
class Writes(Stepped):
    """No version shows it: their casts on the device are out of date."""

    def on_train_batch_end(self, *_: Any) -> None:
        for p in self.net.blocks[1].parameters():  # type: ignore[index, union-attr]
            p.data.mul_(0.5)


@gpu("a weight without a cast written in a forward", tiers(long=[CASTS]))
class WritesInForward(Stepped):
    """Through the optimizer, before its layer is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.net = NormedStack("", frozen=False)
        self.norm = [self.net.blocks[3].norm.weight]  # type: ignore[union-attr, index]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.norm[0].mul_(0.5)  # type: ignore[operator]
        return super().training_step(batch, batch_idx)


class Freezes(Stepped):
    """Half of a block's parameters are not trained; they may be written between a forward and the step."""

    def __init__(self, written: Callable[[Tensor], Any]) -> None:
        super().__init__(lambda ps: adamw([p for p in ps if p.requires_grad]))
        self.frozen = [next(block.parameters()).requires_grad_(False) for block in self.net.blocks]  # type: ignore
        self.written = written

    def on_before_optimizer_step(self, _: Any) -> None:
        for p in self.frozen:
            self.written(p)


for name, written in (("", lambda p: p), (" and written before the step", lambda p: p.data.mul_(0.5))):
    gpu(
        f"layers of which a half is frozen{name}", tiers(long=[CASTS]),
        covers="they are fetched whole, with casts that are up to date"
    )(partial(Freezes, written))  # fmt: skip

# ---------------------------------------------------------------------- with a disk

DISKS = tiers(rest=["everything on a disk, forward, bf16-mixed"], long=[
    f"everything on a disk, {mode}{way}" for mode, ways in (
        ("off", ("", ", bf16-mixed", ", bf16-mixed, clipped, accumulated", ", simulated")),
        ("forward", ("", ", bf16-mixed, clipped, accumulated", ", simulated", ", accumulated, simulated")),
        ("backward", ("", ", bf16-mixed", ", simulated")),
    ) for way in ways
])  # fmt: skip
gpu(
    "everything on a disk", DISKS, strategy={"optimizer_on": "gpu"}, fusible=False,
    covers="it goes from the disk to the GPU and back"
)(Stepped)  # fmt: skip


def some_away(ours: Outcome) -> None:
    assert min(ours.module.noted) > 0


class LooksAtDisk(Stepped):
    def on_train_start(self) -> None:
        self.noted: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.noted.append(away(self.trainer.optimizers[0]))


ON_DISK: dict[str, Any] = {
    "AdamW": adamw, "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9), "NAdam": partial(torch.optim.NAdam, lr=1e-2),
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=1e-2),
}  # fmt: skip
for name, build in ON_DISK.items():
    gpu(
        f"state on a disk, {name}", tiers(long=["state on a disk, off, simulated"]), strategy={"optimizer_on": "gpu"},
        also=some_away,
        covers="it has left the GPU before it is moved into the file",
    )(partial(LooksAtDisk, build))  # fmt: skip


@partial(
    refused, "a parameter that is not the module's, with a disk", r"not the module's.*leave disk= and optimizer_on out",
    variant="state on a disk, off", strategy={"optimizer_on": "gpu"}, tier=2,
)  # fmt: skip
class Outside(Stepped):
    def configure_optimizers(self) -> Any:
        self.other = [nn.Parameter(torch.ones(3))]
        return torch.optim.AdamW([*self.parameters(), *self.other], lr=1e-2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.other[0].sum()
