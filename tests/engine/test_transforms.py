"""``torch.func``: what its transforms compute with a weight is plain Lightning's, or is refused by name, and never NaN.

Transforms wrap the tensors that they are given and hide their classes. ``vmap`` over a weight whose layer was away, as in
torch's own recipe for ensembles, computed with what a stand-in had for memory: NaN, silently. ``jvp`` under mixed precision
ended in "Cannot access data pointer of Tensor that doesn't have storage", because the engine made a slot inside the transform.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, func, nn

from tests.support.runs import assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.tiers import first

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # jvp calls it the first time
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),  # linearize itself
]

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
READS = [
    "inside", "inside, passed", "inside, passed, of a norm", "outside", "outside, passed", "outside, a clone passed",
    "outside, its module called", "outside, functional_call", "outside, functional_call of a copy", "outside, an ensemble",
]  # fmt: skip
PRECISIONS: list[Any] = ["32-true", "bf16-mixed", "bf16-true"]
REVERSE = ("grad", "vjp", "jacrev", "hessian")
NOT_REVERSE = r"torch\.func\.grad \(or vjp, .*torch\.autograd\.grad\(\.\.\., create_graph=True\).*keep_on_gpu=\["
HIDDEN = r"memory of the weight 'net\.\d\.(linear|norm)\.weight' was read.*weight\.clone\(\).*keep_on_gpu=\['net\.\d\."
TRACES = r"torch\.func\.linearize .*torch\.func\.jvp.*copy\.deepcopy\(module\)"


def product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, weight if weight.dim() > 1 else weight[None]))  # vmap gives one row at a time


class Block(nn.Module):
    def __init__(self, transform: str, read: str) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)
        self.transform, self.read = TRANSFORMS[transform], read

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.read == "inside":
            return x + self.transform(lambda y: torch.tanh(self.linear(y)), x).mean()
        if self.read == "inside, passed":
            return x + self.transform(lambda weight: product(x, weight), self.linear.weight).mean()
        if self.read == "inside, passed, of a norm":
            return x + self.transform(lambda weight: x * weight, self.norm.weight).mean()
        return x + torch.tanh(self.linear(x))


class Transforms(pl.LightningModule):
    def __init__(self, transform: str, read: str) -> None:
        super().__init__()
        self.transform, self.read = TRANSFORMS[transform], read
        self.net = nn.ModuleList(Block(transform, read) for _ in range(3))
        vars(self)["base"] = copy.deepcopy(self.net[0]).to("meta")  # not registered, as in torch's tutorial

    def transformed(self, x: Tensor) -> Tensor:
        block: Any = self.net[1]
        weight, transform = block.linear.weight, self.transform
        if self.read == "outside":
            return transform(lambda y: product(y, weight), x)
        if self.read == "outside, passed":
            return transform(lambda weight: product(x, weight), weight)
        if self.read == "outside, a clone passed":
            return transform(lambda weight: product(x, weight), weight.clone())
        if self.read == "outside, its module called":
            return transform(block, x)
        if self.read.startswith("outside, functional_call"):
            called, own = (self.base, dict(block.named_parameters())) if "copy" in self.read else (block, {})
            return transform(
                lambda weight: func.functional_call(called, {**own, "linear.weight": weight.expand(4, 4)}, (x,)), weight
            )
        if self.read == "outside, an ensemble":
            stacked, _ = func.stack_module_state(list(self.net))
            return func.vmap(lambda own: transform(lambda y: func.functional_call(self.base, own, (y,)), x))(stacked)
        return x

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x
        for block in self.net:
            y = block(y)
        return y, self.transformed(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return sum(each.float().square().mean() for each in self.both(batch))  # type: ignore[return-value]

    def predict_step(self, batch: Tensor, batch_idx: int) -> tuple[Tensor, Tensor]:
        return self.both(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


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


def run(transform: str, read: str, precision: Any, strategy: Any, *, trains: bool) -> Any:
    torch.manual_seed(0)
    batches = [torch.randn(4, 4) for _ in range(2)]
    if trains:
        return fit(lambda: Transforms(transform, read), batches, strategy, precision=precision)
    pl.seed_everything(7, verbose=False)
    trainer = trainer_for(strategy, precision=precision, inference_mode=transform != "linearize")  # torch's fails in it
    return trainer.predict(Transforms(transform, read), loader(batches))


CELLS = [(transform, read, precision) for transform in TRANSFORMS for read in READS for precision in PRECISIONS]
# torch's linearize does not trace vmap, on plain Lightning either
CELLS = [cell for cell in CELLS if cell[:2] != ("linearize", "outside, an ensemble")]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    ("transform", "read", "precision"),
    first(
        CELLS,
        ("vmap", "outside, passed", "32-true"),
        ("vmap", "inside, passed", "bf16-mixed"),
        ("vmap", "outside, a clone passed", "32-true"),
        ("vmap", "outside, an ensemble", "bf16-true"),
        ("jvp", "inside", "bf16-mixed"),
        ("jvp", "outside, passed", "32-true"),
        ("grad", "outside, passed", "32-true"),
        ("functionalize", "outside, passed", "bf16-mixed"),
        ("linearize", "outside", "32-true"),
        second=CELLS[::11],
        why="other transforms, reads and precisions of the same",
    ),
)
def test_a_transform_computes_what_it_does_on_plain_lightning_or_is_refused(
    transform: str, read: str, precision: Any, trains: bool
) -> None:
    plain = run(transform, read, precision, "auto", trains=trains)
    traces = TRACES if transform == "linearize" and read != "outside, a clone passed" else ""
    for options, said in (({"k": 1}, refusal(transform, read, precision)), ({"keep_on_gpu": ["**"]}, traces)):
        with pytest.raises(RuntimeError, match=said) if said else nullcontext():
            ours = run(transform, read, precision, superpipeline(**options), trains=trains)
        if not said and trains:
            assert_same(ours, plain)
        elif not said:
            assert_equal(ours, plain, "predictions")


class Ensemble(pl.LightningModule):
    """torch's recipe for ensembles: ``vmap`` over weights that are stacked already, in a module that is not called."""

    def __init__(self, *, clones: bool) -> None:
        super().__init__()
        members = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)]
        stacked, _ = func.stack_module_state(members)  # type: ignore[arg-type]
        self.names, self.clones = list(stacked), clones
        self.weights = nn.ParameterList(each.detach() for each in stacked.values())
        vars(self)["base"] = members[0].to("meta")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        weights = [weight.clone() if self.clones else weight for weight in self.weights]
        call = func.vmap(lambda own, x: func.functional_call(self.base, own, (x,)), (0, None))
        output: Tensor = call(dict(zip(self.names, weights, strict=True)), batch)
        return output.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.rest("takes tenths of a second")
def test_an_ensemble_of_stacked_weights_is_refused_with_a_remedy_that_works() -> None:
    batches = [torch.randn(4, 4) for _ in range(3)]
    plain = fit(lambda: Ensemble(clones=False), batches)
    with pytest.raises(RuntimeError, match=r"memory of the weight 'weights\.\d'.*keep_on_gpu=\['weights\.\d'\]"):
        fit(lambda: Ensemble(clones=False), batches, superpipeline())
    assert_same(fit(lambda: Ensemble(clones=True), batches, superpipeline()), plain)
    names = [f"weights.{index}" for index in range(4)]
    assert_same(fit(lambda: Ensemble(clones=False), batches, superpipeline(keep_on_gpu=names)), plain)
