"""``torch.func``: what its transforms compute with a weight is plain Lightning's, or is refused by name, and never NaN.

Transforms wrap the tensors that they are given and hide their classes. ``vmap`` over a weight whose layer was away, as in
torch's own recipe for ensembles, computed with what a stand-in had for memory: NaN, silently. ``jvp`` under mixed precision
ended in "Cannot access data pointer of Tensor that doesn't have storage", because the engine made a slot inside the transform.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, func, nn

from tests.equality.rows import program, tiers
from tests.support.models import Module, Stack

Function = Callable[[Tensor], Tensor]
ones = torch.ones_like


def energy(function: Function) -> Function:
    return lambda x: function(x).square().mean()


TRANSFORMS: dict[str, Callable[[Function, Tensor], Any]] = {
    "grad": lambda f, x: func.grad(energy(f))(x),
    "vjp": lambda f, x: (lambda output, back: back(ones(output))[0])(*func.vjp(f, x)),
    "jvp": lambda f, x: func.jvp(f, (x,), (ones(x),))[1],
    "jacrev": lambda f, x: func.jacrev(f)(x),
    "jacfwd": lambda f, x: func.jacfwd(f)(x),
    "hessian": lambda f, x: func.hessian(energy(f))(x),
    "vmap": lambda f, x: func.vmap(f)(x),
    "functionalize": lambda f, x: func.functionalize(f)(x),
    "linearize": lambda f, x: func.linearize(f, x)[1](ones(x)),
}
PRECISIONS = {"32-true": "k=1", "bf16-mixed": "bf16-mixed, k=1", "bf16-true": "bf16-true"}
"""The variants of each program."""
WHOLE = "nothing is streamed"
REVERSE = ("grad", "vjp", "jacrev", "hessian")
NOT_REVERSE = r".*torch\.func\.grad \(or vjp, .*torch\.autograd\.grad\(\.\.\., create_graph=True\).*keep_on_gpu=\["
HIDDEN = (
    r".*memory of the weight 'net\.\d\.(linear|norm)\.weight' was read.*weight\.clone\(\).*keep_on_gpu=\['net\.\d\."
)
TRACES = r".*torch\.func\.linearize .*torch\.func\.jvp.*copy\.deepcopy\(module\)"


def product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, weight if weight.dim() > 1 else weight[None]))  # vmap gives one row at a time


INSIDE: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "inside": lambda block, transform, x: transform(lambda y: torch.tanh(block.linear(y)), x),
    "inside, passed": lambda block, transform, x: transform(lambda weight: product(x, weight), block.linear.weight),
    "inside, passed, of a norm": lambda block, transform, x: transform(lambda weight: x * weight, block.norm.weight),
}


def called(module: Any, own: dict[str, Any], transform: Any, x: Tensor, weight: Tensor) -> Any:
    return transform(
        lambda each: func.functional_call(module, {**own, "linear.weight": each.expand(4, 4)}, (x,)), weight
    )


def ensemble(m: Any, block: Any, transform: Any, x: Tensor) -> Any:
    stacked, _ = func.stack_module_state(list(m.net))
    return func.vmap(lambda own: transform(lambda y: func.functional_call(m.base, own, (y,)), x))(stacked)


OUTSIDE: dict[str, Callable[[Any, Any, Any, Tensor], Any]] = {
    "outside": lambda m, block, transform, x: (lambda w: transform(lambda y: product(y, w), x))(block.linear.weight),
    "outside, passed": lambda m, block, transform, x: transform(lambda w: product(x, w), block.linear.weight),
    "outside, a clone passed": lambda m, block, transform, x: transform(
        lambda w: product(x, w), block.linear.weight.clone()
    ),
    "outside, its module called": lambda m, block, transform, x: transform(block, x),
    "outside, functional_call": lambda m, block, transform, x: called(block, {}, transform, x, block.linear.weight),
    "outside, functional_call of a copy": lambda m, block, transform, x: called(
        m.base, dict(block.named_parameters()), transform, x, block.linear.weight
    ),
    "outside, an ensemble": ensemble,
}


class Block(nn.Module):
    def __init__(self, transform: str, read: str) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)
        self.transform, self.read = TRANSFORMS[transform], INSIDE.get(read)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + (torch.tanh(self.linear(x)) if self.read is None else self.read(self, self.transform, x).mean())


class Transforms(Module):
    """A transform in the forward of each block, or beside them."""

    def __init__(self, transform: str, read: str) -> None:
        super().__init__(nn.Sequential(*(Block(transform, read) for _ in range(4))))  # one more than slots
        self.transform, self.read = TRANSFORMS[transform], OUTSIDE.get(read, lambda m, block, transform, x: x)
        vars(self)["base"] = copy.deepcopy(self.net[0]).to("meta")  # not registered, as in torch's tutorial

    def loss(self, batch: Tensor) -> Tensor:
        return sum(each.float().square().mean() for each in self.predict_step(batch, 0))  # type: ignore[return-value]

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        y = self.net(batch)
        return y, self.read(self, self.net[1], self.transform, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> list[Tensor]:
    return [torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def refusal(transform: str, read: str, precision: str) -> str:
    """What a streamed run says; nothing if it computes what plain Lightning does."""
    if transform == "linearize":
        as_casts = precision == "bf16-mixed" and read in ("inside", "outside")  # a cast is an ordinary tensor
        return "" if as_casts or read == "outside, a clone passed" else TRACES
    calls = read in ("outside, its module called", "outside, functional_call")
    if transform in REVERSE or (calls and transform in ("jvp", "jacfwd")):
        return NOT_REVERSE
    away = read == "outside, passed" or read.startswith("outside, functional_call")
    travels_as_cast = read == "inside, passed" and precision == "bf16-mixed"
    return HIDDEN if (away or travels_as_cast) and transform in ("vmap", "functionalize") else ""


QUICK = {
    ("vmap", "outside, passed", "32-true"), ("vmap", "inside, passed", "bf16-mixed"), ("jvp", "inside", "bf16-mixed"),
    ("vmap", "outside, a clone passed", "32-true"), ("vmap", "outside, an ensemble", "bf16-true"),
    ("jvp", "outside, passed", "32-true"), ("grad", "outside, passed", "32-true"),
    ("functionalize", "outside, passed", "bf16-mixed"), ("linearize", "outside", "32-true"),
}  # fmt: skip
for transform, read in ((transform, read) for transform in TRANSFORMS for read in (*INSIDE, *OUTSIDE)):
    if (transform, read) == ("linearize", "outside, an ensemble"):
        continue  # torch's linearize does not trace vmap, on plain Lightning either
    refused = {variant: refusal(transform, read, precision) for precision, variant in PRECISIONS.items()}
    refused[WHOLE] = TRACES if transform == "linearize" and read != "outside, a clone passed" else ""
    for run in ("fit", "predict"):
        quick = {variant for precision, variant in PRECISIONS.items() if (transform, read, precision) in QUICK}
        program(
            f"torch.func: {transform}, {read}{', predicted' if run == 'predict' else ''}",
            {**dict.fromkeys([*PRECISIONS.values(), WHOLE], 3), **dict.fromkeys(quick, 2)},
            refused={variant: said for variant, said in refused.items() if said}, batches=batches, run=run,
            inference_mode=transform != "linearize",  # torch's fails in it
            covers="a transform hides the classes of the tensors that it gets",
        )(partial(Transforms, transform, read))  # fmt: skip


class Ensemble(Module):
    """torch's recipe for ensembles: ``vmap`` over weights that are stacked already, in a module that is not called."""

    clones = False

    def __init__(self) -> None:
        members = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)]
        stacked, _ = func.stack_module_state(members)  # type: ignore[arg-type]
        super().__init__(nn.ParameterList(each.detach() for each in stacked.values()))
        self.names = list(stacked)
        vars(self)["base"] = members[0].to("meta")

    def loss(self, batch: Tensor) -> Tensor:
        weights = [weight.clone() if self.clones else weight for weight in self.net]
        call = func.vmap(lambda own, x: func.functional_call(self.base, own, (x,)), (0, None))
        output: Tensor = call(dict(zip(self.names, weights, strict=True)), batch)
        return output.square().mean()


program(
    "torch.func: an ensemble of stacked weights", tiers(rest=["k=1"]), batches=batches,
    refused={"k=1": r"RuntimeError: .*memory of the weight 'net\.\d'.*weight\.clone\(\).*keep_on_gpu=\['net\.\d'\]"},
)(Ensemble)  # fmt: skip


@program("torch.func: an ensemble of clones of stacked weights", tiers(rest=["k=1"]), batches=batches)
class Clones(Ensemble):
    """The first remedy that the refusal names."""

    clones = True


def outside_a_step(m: Any) -> None:
    """In a hook of Lightning."""
    func.grad(lambda x: m.net(x).sum())(torch.ones(2, 16))


program(
    "torch.func: grad outside of a step", tiers("k=1"), at="on_train_epoch_start",
    refused={"k=1": r"RuntimeError: .*reached the streamed layer 'net\.0'.*keep_on_gpu=\['net\.0'\]"},
)(outside_a_step)  # fmt: skip


class OfLoss(Module):
    """What is saved of one batch is saved again of the transform's wrapped tensors."""

    def loss(self, batch: Any) -> Tensor:
        return func.grad(lambda x: self.net(x).square().sum())(batch).square().sum() + super().loss(batch)


program(
    "torch.func: grad beside the loss", tiers(rest=[WHOLE, "nothing is streamed, recompute"]), covers=OfLoss.__doc__
)(lambda: OfLoss(Stack()))
