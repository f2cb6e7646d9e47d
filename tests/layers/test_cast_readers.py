"""Weights that travel as their casts, whoever reads or writes them in a layer's forward."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from tests.support.mixed import MIXED, OwnLinear, Readers, Tied, assert_like_plain, bare, of_blocks
from tests.support.models import Block, CheckpointedCalls, Module, Stack, vectors
from tests.support.poison import poisoned
from tests.support.runs import assert_equal, loader, superpipeline, trainer_for
from tests.support.tiers import first, some


def relu_of_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(x @ weight.t() + bias)


# ---------------------------------------------------------------------- how often, and by whom


class Twice(Stack):
    """A weight used twice or thrice in one forward: its gradients are summed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(self.stem(x))
        for block in self.blocks:
            x = block(x) + torch.tanh(block.outer(torch.tanh(block.inner(torch.tanh(x)))))
            x = x + block.outer(block.inner(x))[..., :16]
        return self.head(x)


class ReadsInside(Block):
    """Its own layer's weights by other ways than calling their modules, in the middle of its forward."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.inner.weight, bias=self.inner.bias)
        y = y + x @ self.inner.weight.t() + self.inner.bias
        y = y + self.inner(x) * self.outer.weight.norm()
        return x + self.outer(torch.tanh(y)) + torch.einsum("oi,bi->bo", self.outer.weight, y)


class WritesInside(Block):
    """Writes them between two calls."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        with torch.no_grad():
            self.inner.weight.mul_(0.9)
        y = y + self.inner(x)
        self.inner.weight.data.mul_(1.1)
        y = y + self.inner(x)
        self.kept = self.inner.weight.data
        y = y + self.inner(x)
        self.kept.mul_(0.9)
        y = y + self.inner(x)
        view = self.inner.weight.detach()[:4]
        y = y + self.inner(x)
        view.add_(0.01)
        return x + self.outer(torch.tanh(y + self.inner(x)))


class WritesBetweenCalls(Stack):
    """A layer that is called again, while views of its weights are written; and one whose masters leave in between."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        first: Any = self.blocks[0]
        view = first.inner.weight.detach()
        for block in self.blocks:
            x = first(block(x))
            view.mul_(0.95)
        x = first(x) + self.head.weight.norm()
        return self.head(first(x))


class WritesAndLooksElsewhere(Block):
    """Looking at another layer's weight sends away the written one, or the one that is written next through a view."""

    elsewhere: Any = None
    late = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        view = self.inner.weight.detach() if self.late else None
        if view is None:
            with torch.no_grad():
                self.inner.weight.mul_(0.9)
        size = self.elsewhere[0].weight.norm()
        if view is not None:
            view.mul_(0.9)
        return super().forward(x) * size


class LooksElsewhere(Stack):
    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(WritesAndLooksElsewhere() for _ in range(3))
        for index, block in enumerate(self.blocks):
            vars(block).update(elsewhere=[self.head], late=index == 1)


class OwnCast(Block):
    """A cast of the user's own is the user's: written in place, through .data, and kept over steps."""

    cast: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        mine = self.inner.weight.detach().to(torch.bfloat16)
        mine.mul_(0.5)
        mine.data.add_(0.25)
        live = self.outer.weight.to(torch.bfloat16)
        if self.cast is None:
            self.cast = self.inner.weight.detach().bfloat16()
        y = F.linear(x, mine) + F.linear(x, self.cast) + self.inner(x)
        return x + self.outer(torch.tanh(y)) + F.linear(y, live)


class ActsOnDtype(Block):
    def forward(self, x: Tensor) -> Tensor:
        assert self.inner.weight.dtype == torch.float32
        assert self.inner.weight.nbytes == 32 * 16 * 4
        assert isinstance(self.inner.weight, nn.Parameter)
        x = x.to(self.inner.weight.dtype)
        return super().forward(x) * x.new_ones(1)


class NoAutocast(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


class OtherAutocast(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            return super().forward(x)


class CachingAutocast(Block):
    """The cache outlives a write, and sums the gradients of two uses in the lower precision."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
            y = self.inner(x) + self.inner(x * 2)
            with torch.no_grad():
                self.inner.weight.mul_(0.9)
            y = y + self.inner(x * 3)
            return x + self.outer(torch.tanh(y)) + self.outer(y)


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].float()
        return gradient @ weight, gradient.t() @ x.float()


class SavesWeights(torch.autograd.Function):
    """A linear function as fused kernels wrap it: it computes with the cast and saves the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, first: bool) -> Tensor:
        if first:
            ctx.save_for_backward(x, weight)
        result = F.linear(x, weight)
        if not first:
            ctx.save_for_backward(x, weight)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].float()
        return gradient @ weight, gradient.t() @ x.float(), None


class CallsFusedLinear(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = SavesWeights.apply(x, self.inner.weight, True)
        return super().forward(x) + SavesWeights.apply(y, self.outer.weight, False)


class Deciding(Tensor):
    """Activations of a class that decides on operators before our stand-ins are asked, as jagged nested tensors do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if type(result) is Tensor else result


class DecidingStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.as_subclass(Deciding)).as_subclass(Tensor)


class CallsOwnFunction(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + OwnFunction.apply(OwnFunction.apply(x, self.inner.weight), self.outer.weight)


class Frozen(Block):
    """Weights that take no gradient, one of them from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.weight.requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.outer.weight.requires_grad_(self.calls % 2 == 1)
        self.outer.bias.requires_grad_(self.calls % 3 != 1)
        return super().forward(x)


class Transformed(Block):
    """vmap takes no autograd function without a rule."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.func.vmap(self.outer)(torch.func.vmap(self.inner)(x))


class Normed(Block):
    """Weights made of others: by a parametrization, and by the old hook."""

    def __init__(self) -> None:
        super().__init__()
        weight_norm(self.inner)
        parametrize.register_parametrization(self.outer, "weight", nn.Tanh())


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Conv1d(1, 4, 3, padding=1), nn.Conv2d(1, 4, 3), nn.Conv3d(1, 4, 1)
        self.back = nn.ModuleList(
            [nn.ConvTranspose1d(4, 1, 3), nn.ConvTranspose2d(4, 1, 3), nn.ConvTranspose3d(4, 1, 1)]
        )
        self.two.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.back[0](self.one(x[:, None]))[:, 0, :16]
        x = x + self.back[1](self.two(x.view(-1, 1, 4, 4))).reshape(-1, 16)
        return x + self.back[2](self.three(x.view(-1, 1, 2, 2, 4))).reshape(-1, 16)


class Across(Stack):
    """Weights of several layers in one function, some of which travel as casts and some do not."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for block, norm in zip(self.blocks, self.norms, strict=False):
            y = F.linear(x, block.inner.weight, norm[0].bias) + F.linear(x, block.inner.weight, norm[1].bias)
            x = x + F.linear(torch.tanh(norm(y)), bias=self.head.bias, weight=block.outer.weight) + block.outer(y)
        return x


class Checkpointed(CheckpointedCalls):
    def __init__(self, block: type[Block], use_reentrant: bool) -> None:
        super().__init__(use_reentrant)
        self.blocks = nn.ModuleList(block() for _ in range(3))


with warnings.catch_warnings(action="ignore"):  # it is deprecated
    scripted = torch.jit.script(relu_of_linear)
operators = ModuleType("operators")  # as a file of its own would be
vars(operators)["relu_of_linear"] = scripted


class ScriptedElsewhere(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(operators.relu_of_linear(x, self.inner.weight, self.inner.bias))


class Scripted(Block):
    """TorchScript reads memory without asking: what a module that names such a function holds stays as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(scripted(x, self.inner.weight, self.inner.bias))


class CompiledInside(Block):
    """A function that is compiled, and a module's forward, where no set-up sees it: graphs break at each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(lambda x: torch.tanh(self.inner(x)), backend="eager")
        self.outer.forward = torch.compile(self.outer.forward, backend="eager")  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.compiled(x))


BLOCKS = [
    Block, ReadsInside, WritesInside, OwnCast, ActsOnDtype, NoAutocast, OtherAutocast, CachingAutocast, CallsOwnFunction,
    CallsFusedLinear, Frozen, Transformed, Normed, OwnLinear, Scripted, ScriptedElsewhere,
]  # fmt: skip


NETS = [
    Twice, Convolutions, DecidingStack, Readers, Tied, Across, WritesBetweenCalls, LooksElsewhere, *map(of_blocks, BLOCKS)
]  # fmt: skip
FIRST = {"Tied", "ReadsInside", "Block"}


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("accumulate", first([1, 2], 1, why="the same with accumulated gradients"))
@pytest.mark.parametrize(
    "net",
    first(
        NETS,
        if_=lambda net: net.__name__ in FIRST,
        second=NETS[::8],
        why="other ways to come by a weight",
    ),
    ids=lambda net: net.__name__,
)
def test_whatever_reads_or_writes_a_weight(net: Any, accumulate: int) -> None:
    assert_like_plain(lambda: Module(net()), accumulate_grad_batches=accumulate)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    "net",
    first(
        [Twice, Convolutions, DecidingStack, Tied, Across, of_blocks(ReadsInside)],
        Twice,
        Tied,
        why="as in training above",
    ),
)
def test_in_evaluation(net: Any) -> None:
    """In inference mode, whose tensors no graph may save. (The simulation's dispatch mode takes other kernels there.)"""

    def predict(strategy: Any) -> Any:
        pl.seed_everything(7, verbose=False)
        return trainer_for(strategy, **MIXED).predict(Module(net()), loader(vectors(2)))

    plain = predict("auto")
    for context in (nullcontext, poisoned):
        with context():
            assert_equal(predict(superpipeline(k=1)), plain, context.__name__)


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo asks for it where a graph breaks
def test_compiled_where_no_set_up_sees_it() -> None:
    """Dynamo would trace the engine; now its graphs break at each weight that travels as a cast."""
    plain = bare(lambda: Module(of_blocks(CompiledInside)()), "auto")
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="compile_blocks"):
        ours = bare(lambda: Module(of_blocks(CompiledInside)()), superpipeline(k=1))
    assert_equal(ours, plain, "compiled inside")


@pytest.mark.long("blocks that the test above has, under checkpoints")
@pytest.mark.parametrize(
    ("block", "use_reentrant"),
    some(
        [
            *(
                (block, way)
                for way in (False, True)
                for block in (Block, ReadsInside, OwnCast, NoAutocast, CallsOwnFunction)
            ),
            (CallsFusedLinear, True),  # the other way torch refuses it, with an error; see examples/guide/limits.md
        ],
        *((ReadsInside, False), (ReadsInside, True), (CallsFusedLinear, True)),
        why="blocks that read their weights as these do",
    ),
)
def test_under_checkpoints(block: type[Block], use_reentrant: bool) -> None:
    assert_like_plain(lambda: Module(Checkpointed(block, use_reentrant)))
