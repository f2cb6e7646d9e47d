"""Weights that travel as their casts: nobody can tell, whatever is done with them, and half the bytes move."""

from __future__ import annotations

import copy
import threading
import warnings
from contextlib import nullcontext, suppress
from types import ModuleType
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from sp_lightning import SuperpipelineStrategy
from sp_lightning.engine.saved_tensors import SavedTensors
from sp_lightning.model.find import find_layers
from sp_lightning.weights.casts import Casts
from tests.support.models import CASES, Block, CheckpointedCalls, Module, Stack, llama, tokens, vectors
from tests.support.poison import poisoned
from tests.support.runs import assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.simdevice import simulated

MIXED: dict[str, Any] = {"precision": "bf16-mixed"}


def bare(make: Any, strategy: Any, **options: Any) -> list[Any]:
    """Train without callbacks, so that copies are kept across batches; what is left, and what the module saw."""
    pl.seed_everything(7, verbose=False)
    module = make()
    trainer = trainer_for(strategy, **{**MIXED, **options})
    trainer.fit(module, loader(vectors(4)))
    return [
        dict(module.state_dict()),
        [each.state_dict() for each in trainer.optimizers],
        getattr(module, "seen", None),
    ]


def assert_like_plain(make: Any, **options: Any) -> None:
    plain = bare(make, "auto", **options)
    for context in (nullcontext, poisoned, simulated):
        for k in (1, 99):
            with context():
                ours = bare(make, superpipeline(k=k), **options)
            assert_equal(ours, plain, f"{context.__name__}, k={k}")


class Seeing(Module):
    """Notes what it sees, and does something with the weights of its layers before or while they are called."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net or Stack(3))
        self.seen: list[Any] = []

    def see(self, *things: Any) -> None:
        self.seen.extend(thing.detach().clone() if isinstance(thing, Tensor) else thing for thing in things)


class Manual(Seeing):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net)
        self.automatic_optimization = False


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


class Masked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * (self.weight > 0), self.bias) + F.linear(x, self.weight, self.bias)


class OwnLinear(Block):
    """A subclass, an instance with a forward of its own, and a module that is called with its weight by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Masked(16, 32)
        self.more = nn.Linear(16, 16)
        self.more.forward = lambda x: F.linear(input=x, weight=self.more.weight * 2, bias=self.more.bias)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.more(x)
        own = {"weight": self.outer.weight * 0.5, "bias": self.outer.bias.detach()}
        return super().forward(x) + torch.func.functional_call(self.outer, own, (self.inner(x),))


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


class Readers(nn.Module):
    """Modules that read their children's weights past their calls, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[None]
        x = self.encoder(x + self.attention(x, x, x)[0])
        return self.decoder(x, x)[0]


class Tied(nn.Module):
    """One weight in two linear layers travels as a cast; one that an embedding has as well does not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[3].inner.weight = self.blocks[0].inner.weight
        self.table = nn.Embedding(16, 16)
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.table(torch.arange(x.shape[0])))


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


def relu_of_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(x @ weight.t() + bias)


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


def of_blocks(block: type[Block]) -> Any:
    class Of(Stack):
        def __init__(self) -> None:
            super().__init__(0)
            self.blocks = nn.ModuleList(block() for _ in range(3))

    Of.__name__ = block.__name__
    return Of


BLOCKS = [
    Block, ReadsInside, WritesInside, OwnCast, ActsOnDtype, NoAutocast, OtherAutocast, CachingAutocast, CallsOwnFunction,
    CallsFusedLinear, Frozen, Transformed, Normed, OwnLinear, Scripted, ScriptedElsewhere,
]  # fmt: skip


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "net",
    [
        Twice,
        Convolutions,
        DecidingStack,
        Readers,
        Tied,
        Across,
        WritesBetweenCalls,
        LooksElsewhere,
        *map(of_blocks, BLOCKS),
    ],
    ids=lambda net: net.__name__,
)
def test_whatever_reads_or_writes_a_weight(net: Any, accumulate: int) -> None:
    assert_like_plain(lambda: Module(net()), accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("net", [Twice, Convolutions, DecidingStack, Tied, Across, of_blocks(ReadsInside)])
def test_in_evaluation(net: Any) -> None:
    """In inference mode, whose tensors no graph may save. (The simulation's dispatch mode takes other kernels there.)"""

    def predict(strategy: Any) -> Any:
        pl.seed_everything(7, verbose=False)
        return trainer_for(strategy, **MIXED).predict(Module(net()), loader(vectors(2)))

    plain = predict("auto")
    for context in (nullcontext, poisoned):
        with context():
            assert_equal(predict(superpipeline(k=1)), plain, context.__name__)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo asks for it where a graph breaks
def test_compiled_where_no_set_up_sees_it() -> None:
    """Dynamo would trace the engine; now its graphs break at each weight that travels as a cast."""
    plain = bare(lambda: Module(of_blocks(CompiledInside)()), "auto")
    torch._dynamo.reset()
    assert_equal(bare(lambda: Module(of_blocks(CompiledInside)()), superpipeline(k=1)), plain, "compiled inside")


@pytest.mark.parametrize(
    ("block", "use_reentrant"),
    [
        *(
            (block, way)
            for block in (Block, ReadsInside, OwnCast, NoAutocast, CallsOwnFunction)
            for way in (False, True)
        ),
        (CallsFusedLinear, True),  # the other way torch refuses it, with an error; see README's Limits
    ],
)
def test_under_checkpoints(block: type[Block], use_reentrant: bool) -> None:
    assert_like_plain(lambda: Module(Checkpointed(block, use_reentrant)))


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


def test_writes_by_references_between_two_calls() -> None:
    """Not with poison, which takes the host's parameters for unreadable in a step."""
    plain = bare(WritesByReference, "auto")
    for context in (nullcontext, simulated):
        with context():
            assert_equal(bare(WritesByReference, superpipeline(k=99)), plain, context.__name__)


@pytest.mark.parametrize("make", STEPS)
def test_in_the_middle_of_a_step(make: Any) -> None:
    assert_like_plain(make)


@pytest.mark.parametrize(("first", "then"), [("auto", "ours"), ("ours", "auto"), ("ours", "ours")])
def test_checkpoints_hold_the_masters(tmp_path: Any, first: str, then: str) -> None:
    def strategy(name: str) -> Any:
        return superpipeline(k=1) if name == "ours" else "auto"

    def resume(half: str, whole: str) -> list[Any]:
        fit(llama, tokens(), strategy(half), **MIXED).trainer.save_checkpoint(tmp_path / f"{half}.ckpt")
        outcome = fit(llama, tokens(), strategy(whole), max_epochs=2, ckpt_path=tmp_path / f"{half}.ckpt", **MIXED)
        assert all(value.dtype == torch.float32 for value in outcome.state.values() if value.is_floating_point())
        return [outcome.state, outcome.optimizers, outcome.gradients]

    assert_equal(resume(first, then), resume("auto", "auto"), f"{first}, then {then}")


# ---------------------------------------------------------------------- bytes


class Linears(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(128, 128, bias=False) for _ in range(6)))


def wide() -> list[Tensor]:
    return [torch.ones(2, 128, requires_grad=True) for _ in range(3)]


def test_half_the_bytes_move() -> None:
    """In both directions; and the plan says so."""
    full, half = superpipeline(k=1), superpipeline(k=1)
    fit(lambda: Module(Linears()), wide(), full)
    fit(lambda: Module(Linears()), wide(), half, **MIXED)
    layer = 128 * 128 * 4
    assert [each.nbytes for each in half.plan.layers] == [layer // 2] * 6
    assert half.plan.slot_bytes == 2 * layer // 2
    assert half.plan.gradient_bytes == 2 * layer + layer // 2
    assert half.plan.host_bytes == 6 * (2 * layer + layer // 2)
    assert any("100% of the layers' bytes travel as bfloat16" in note for note in half.plan.notes)
    assert half.stats().fetched_layers == full.stats().fetched_layers
    assert half.stats().fetched_bytes == full.stats().fetched_bytes // 2 == half.stats().fetched_layers * layer // 2
    assert half.stats().drained_bytes == full.stats().drained_bytes // 2
    assert half.stats().demand_fetches == half.stats().extra_slots == 0


@pytest.mark.parametrize(("name", "share"), [("llama-dropout", 0.6), ("bert", 0.65), ("vit", 0.76), ("resnet50", 0.8)])
def test_fewer_bytes_move_of_real_models(name: str, share: float) -> None:
    """They are so small that alignment counts; embeddings, norms and attention modules' own weights stay float32."""
    full, half = superpipeline(k=1), superpipeline(k=1)
    fit(CASES[name].make, CASES[name].batches(), full)
    fit(CASES[name].make, CASES[name].batches(), half, **MIXED)
    assert half.stats().demand_fetches == half.stats().extra_slots == 0
    assert half.stats().peak_device_bytes <= half.plan.peak_device_bytes
    assert half.stats().fetched_bytes <= share * full.stats().fetched_bytes


@pytest.mark.parametrize("use", ["once", "twice", "hooked"])
def test_a_gradient_is_lowered_only_where_that_loses_nothing(use: str) -> None:
    class Uses(Linears):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x) if use == "twice" else x)

    def make() -> Module:
        module = Module(Uses())
        for p in module.parameters():
            if use == "hooked":
                p.register_hook(lambda gradient: gradient * 1.001)
        return module

    strategy = superpipeline()
    assert_same(fit(make, wide(), strategy, **MIXED), fit(make, wide(), **MIXED))
    assert strategy.stats().drained_bytes == 3 * 6 * 128 * 128 * (2 if use == "once" else 4)


@pytest.mark.parametrize("ours", [True, False])
def test_forward_leaves_no_casts_on_the_device(ours: bool) -> None:
    """What lives beside slots and host memory once the loss is there, in bytes; plain autocast keeps every cast."""
    alive: list[tuple[StorageWeakRef, int]] = []

    class Counts(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with (
                torch.autograd.graph.saved_tensors_hooks(self.note, lambda tensor: tensor)
                if not ours
                else nullcontext()
            ):
                loss = self.loss(batch)
            self.left = sum(nbytes for storage, nbytes in alive if not storage.expired())
            return loss

        def note(self, tensor: Tensor) -> Tensor:
            alive.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
            return tensor

    unpack_or_keep = SavedTensors._pack
    packed: list[int] = []

    def note_packed(self: SavedTensors, layer: int, tensor: Tensor) -> Any:
        packed.append(tensor.nbytes)
        return unpack_or_keep(self, layer, tensor)

    hooks = SavedTensors.hooks

    def note_kept(self: SavedTensors) -> Any:
        made = hooks(self)
        inner = made.pack_hook

        def pack(tensor: Tensor) -> Any:
            result = inner(tensor)
            if type(result) is tuple:
                alive.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
            return result

        made.pack_hook = pack
        return made

    with mock.patch.object(SavedTensors, "hooks", note_kept), mock.patch.object(SavedTensors, "_pack", note_packed):
        module = fit(lambda: Counts(Linears()), wide(), superpipeline(k=1) if ours else "auto", **MIXED).module
    casts = 6 * 128 * 128 * 2
    if ours:
        assert module.left < casts / 10
        assert sum(packed) >= 3 * casts
    else:
        assert module.left >= casts


def test_casts_are_made_once_between_two_writes() -> None:
    """Forward's and backward's fetch share them; validation makes none while nothing is written."""
    made: list[Casts] = []
    cast_into = Casts._cast_into

    def note(self: Casts, wire: Tensor) -> None:
        made.append(self)
        cast_into(self, wire)

    with mock.patch.object(Casts, "_cast_into", note):
        fit(lambda: Module(Stack()), vectors(4), superpipeline(k=1), **MIXED)
    assert len(made) == 4 * 7
    made.clear()
    with mock.patch.object(Casts, "_cast_into", note):
        trainer_for(superpipeline(k=1), **MIXED).predict(Module(Stack()), loader(vectors(4)))
    assert len(made) == 7


def test_updates_in_the_background_make_the_casts_and_nobody_makes_them_again() -> None:
    """Where no hook could have written the weights since."""
    makers: list[str] = []
    cast_into = Casts._cast_into

    def note(self: Casts, wire: Tensor) -> None:
        makers.append(threading.current_thread().name)
        cast_into(self, wire)

    with mock.patch.object(Casts, "_cast_into", note):
        trainer_for(SuperpipelineStrategy(k=1, optimizer_overlap="forward"), **MIXED).fit(
            Module(Stack()), loader(vectors(4))
        )
    assert len(makers) == 7 + 4 * 7  # before the first step, and with each update
    assert sum(name.startswith("superpipeline") for name in makers) == 4 * 7


def test_only_what_autocast_casts_is_lowered() -> None:
    def lowered(net: nn.Module, **options: Any) -> set[str]:
        found = find_layers(net, autocast=torch.bfloat16, **options)
        return {name for layer in found.layers for name, _ in layer.lowered}

    blocks = of_blocks(Block)()
    assert lowered(blocks) == {name for name, _ in blocks.named_parameters()}
    assert lowered(blocks, resident=["blocks.1"]) == {n for n, _ in blocks.named_parameters() if "blocks.1" not in n}
    assert lowered(blocks.bfloat16()) == set()
    assert lowered(Tied()) == {n for n, _ in Tied().named_parameters() if "head" not in n and "table" not in n}
    assert lowered(Readers()) == {f"decoder.linear{i}.{n}" for i in (1, 2) for n in ("weight", "bias")}
    compiled = of_blocks(Block)()
    compiled.blocks[1].compile(backend="eager")
    assert not any("blocks.1" in name for name in lowered(compiled))
    assert lowered(of_blocks(OwnLinear)()) == {
        f"{layer}.{n}" for layer in ("stem", "head", *(f"blocks.{i}.{m}" for i in range(3) for m in ("more", "outer")))
        for n in ("weight", "bias")
    }  # fmt: skip


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_without_autocast_nothing_is_lowered(precision: Any) -> None:
    strategy = superpipeline()
    fit(
        lambda: Module(Stack()).to(torch.bfloat16 if "bf16" in precision else None),
        [torch.ones(2, 16)],
        strategy,
        precision=precision,
    )
    assert strategy.plan.masters == ()
