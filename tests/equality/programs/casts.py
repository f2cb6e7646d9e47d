"""Weights that travel as their casts: whoever reads or writes them in a layer's forward, or in the middle of a step."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from sp_lightning.core.device.device import Stream
from sp_lightning.core.weights.host_casts import Casts
from tests.equality.rows import program, tiers
from tests.support.models import Block, CheckpointedCalls, Module, Stack, vectors
from tests.support.nets import Manual, OwnLinear, Readers, Seeing, Tied, of_blocks
from tests.support.runs import Outcome

MIXED = tiers(
    rest=["users, k=1, bf16-mixed, poisoned"],
    long=["users, k=1, bf16-mixed", "users, k=all, bf16-mixed", "users, k=1, bf16-mixed, simulated"]
)  # fmt: skip
IN_PLACE = (
    "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation"
)


def casts(name: str, variants: Any = MIXED, **more: Any) -> Any:
    return program(f"casts: {name}", variants, **{"batches": partial(vectors, 4), **more})


def net_of(kind: Any) -> Any:
    return lambda: Module(kind())


def block_of(kind: Any) -> Any:
    return net_of(of_blocks(kind))


def relu_of_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(x @ weight.t() + bias)


for name, kind in {"blocks": of_blocks(Block), "modules that read their children's weights": Readers, "tied weights": Tied,
                   "forwards of their own": of_blocks(OwnLinear)}.items():  # fmt: skip
    casts(name, covers="weights of linear layers")(net_of(kind))
    casts(
        f"{name}, accumulated",
        tiers(long=["users, k=1, bf16-mixed"]),
        covers="sums of gradients",
        accumulate_grad_batches=2,
    )(net_of(kind))

# ---------------------------------------------------------------------- how often, and by whom


@casts("weights used twice", of=net_of)
class Twice(Stack):
    """A weight used twice or thrice in one forward: its gradients are summed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(self.stem(x))
        for block in self.blocks:
            x = block(x) + torch.tanh(block.outer(torch.tanh(block.inner(torch.tanh(x)))))
            x = x + block.outer(block.inner(x))[..., :16]
        return self.head(x)


@casts("weights read inside", of=block_of)
class ReadsInside(Block):
    """Its own layer's weights by other ways than calling their modules, in the middle of its forward."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.inner.weight, bias=self.inner.bias)
        y = y + x @ self.inner.weight.t() + self.inner.bias
        y = y + self.inner(x) * self.outer.weight.norm()
        return x + self.outer(torch.tanh(y)) + torch.einsum("oi,bi->bo", self.outer.weight, y)


@casts(
    "weights written between two calls inside", of=block_of, refused=dict.fromkeys(MIXED, IN_PLACE), repairable=False
)
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


@casts("views written between two calls of a layer", of=net_of)
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


@casts(
    "a look at another layer",
    of=net_of,
    refused=dict.fromkeys(MIXED, IN_PLACE),
    repairable=False,
    covers="it sends away the written weight",
)
class LooksElsewhere(Stack):
    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(WritesAndLooksElsewhere() for _ in range(3))
        for index, block in enumerate(self.blocks):
            vars(block).update(elsewhere=[self.head], late=index == 1)


@casts("a cast of the user's own", of=block_of)
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


@casts("code that asks for the dtype", of=block_of, covers="the weight is in float32")
class ActsOnDtype(Block):
    def forward(self, x: Tensor) -> Tensor:
        assert self.inner.weight.dtype == torch.float32
        assert self.inner.weight.nbytes == 32 * 16 * 4
        assert isinstance(self.inner.weight, nn.Parameter)
        x = x.to(self.inner.weight.dtype)
        return super().forward(x) * x.new_ones(1)


@casts("autocast that is off", of=block_of, covers="it takes the master")
class NoAutocast(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


@casts("autocast to another dtype", of=block_of, covers="it casts from the master")
class OtherAutocast(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            return super().forward(x)


@casts("autocast that caches", of=block_of, refused=dict.fromkeys(MIXED, IN_PLACE), repairable=False)
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


@casts("a fused linear function", of=block_of, covers="it computes with the cast and saves the weight")
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


@casts("activations of a class of their own", of=net_of, covers="a class that decides on operators")
class DecidingStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.as_subclass(Deciding)).as_subclass(Tensor)


@casts("a function of the user's", of=block_of, covers="it saves the weight")
class CallsOwnFunction(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + OwnFunction.apply(OwnFunction.apply(x, self.inner.weight), self.outer.weight)


@casts("weights that take no gradient", of=block_of)
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


@casts("vmap of linear layers", of=block_of)
class Transformed(Block):
    """vmap takes no autograd function without a rule."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.func.vmap(self.outer)(torch.func.vmap(self.inner)(x))


@casts("weights made of others", of=block_of)
class Normed(Block):
    """Weights made of others: by a parametrization, and by the old hook."""

    def __init__(self) -> None:
        super().__init__()
        weight_norm(self.inner)
        parametrize.register_parametrization(self.outer, "weight", nn.Tanh())


@casts("convolutions of each kind", of=net_of, covers="their layouts, too")
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


@casts("weights of several layers in one function", of=net_of)
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


with warnings.catch_warnings(action="ignore"):  # it is deprecated
    scripted = torch.jit.script(relu_of_linear)
operators = ModuleType("operators")  # as a file of its own would be
vars(operators)["relu_of_linear"] = scripted


@casts("TorchScript of another file", of=block_of, covers="nothing that the module holds names it")
class ScriptedElsewhere(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(operators.relu_of_linear(x, self.inner.weight, self.inner.bias))


@casts("TorchScript", of=block_of)
class Scripted(Block):
    """TorchScript reads memory without asking: what a module that names such a function holds stays as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(scripted(x, self.inner.weight, self.inner.bias))


class Checkpointed(CheckpointedCalls):
    def __init__(self, block: type[Block], use_reentrant: bool) -> None:
        super().__init__(use_reentrant)
        self.blocks = nn.ModuleList(block() for _ in range(3))


for block, way in (
    *((block, way) for way in (False, True) for block in (Block, ReadsInside, OwnCast, NoAutocast, CallsOwnFunction)),
    (CallsFusedLinear, True),  # the other way torch refuses it, with an error; see examples/guide/limits.md
):
    first = block in (ReadsInside, CallsFusedLinear) and way
    casts(
        f"{block.__name__} under checkpoints{', reentrant' if way else ''}", MIXED if first else tiers(long=MIXED),
        covers="the forward runs again in backward",
    )(lambda block=block, way=way: Module(Checkpointed(block, way)))  # fmt: skip
for net in (Twice, Convolutions, DecidingStack, Tied, Across, of_blocks(ReadsInside)):
    # In inference mode, whose tensors no graph may save. (The simulation's dispatch mode takes other kernels there.)
    casts(
        f"{net.__name__} in a prediction", dict.fromkeys(["users, k=1, bf16-mixed, poisoned"], 2 if net in (Twice, Tied) else 3),
        run="predict", covers="inference mode, whose tensors no graph may save",
    )(net_of(net))  # fmt: skip


# ---------------------------------------------------------------------- in the middle of a step


@casts("weights written before backward", refused=dict.fromkeys(MIXED, IN_PLACE), repairable=False)
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


@casts(
    "writes by references between two calls",
    tiers(long=["users, k=all, bf16-mixed", "users, k=all, bf16-mixed, simulated"]),
    refused=dict.fromkeys(["users, k=all, bf16-mixed", "users, k=all, bf16-mixed, simulated"], IN_PLACE),
    repairable=False,
)
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


@casts("steps before a backward", refused=dict.fromkeys(MIXED, IN_PLACE), repairable=False)
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


@casts("a step that writes what autograd has saved")
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


@casts("second derivatives", covers="gradients with graphs of their own")
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


@casts("one gradient alone")
class NoneButOne(Seeing):
    """Only the bias, or only the input, needs a gradient."""

    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        x = batch.clone().requires_grad_()
        loss = super().loss(x)
        self.see(*torch.autograd.grad(loss, [net.blocks[1].inner.bias, x], retain_graph=True))
        loss.backward(inputs=[net.blocks[2].outer.weight], retain_graph=True)
        return loss


@casts("hooks on modules")
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


@casts("hooks on parameters")
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


@casts("exchanges between two steps")
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


@casts("weights thawed between two steps")
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


@casts("weights exchanged inside a step", covers="between two exchanges")
class ExchangesInside(Seeing):
    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        self.see(super().loss(batch))
        net.blocks[0].inner.weight.data = net.blocks[0].inner.weight.data * 2
        self.see(super().loss(batch))
        net.blocks[1].load_state_dict(net.blocks[0].state_dict())
        return super().loss(batch)


@casts("copies inside a step")
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


@casts("a forward that raises")
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


@casts("two optimizers")
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


@casts("forwards outside of any step", refused=dict.fromkeys(MIXED, IN_PLACE), repairable=False)
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


@casts("writes before a validation")
class Validates(Seeing):
    """Writes that show no version, before a validation that may keep its copies."""

    def on_train_batch_end(self, *args: Any) -> None:
        for p in self.parameters():
            p.data.mul_(0.9)
        with torch.inference_mode(), self.trainer.precision_plugin.forward_context():
            self.see(self.net(torch.ones(2, 16)))


# ---------------------------------------------------------------------- gradients that stay in the memory of their casts


class Asks(Seeing):
    """For gradients, one by one, by their places in the graph, and as a batch in two ways."""

    calls = 1

    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        loss = super().loss(batch if self.calls == 1 else net(batch))
        weights = [net.blocks[0].inner.weight, net.blocks[1].outer.bias, net.head.weight]
        places = [torch.autograd.graph.get_gradient_edge(each) for each in weights]
        found = [*torch.autograd.grad(loss, weights, retain_graph=True)]
        found += torch.autograd.grad(loss, places, retain_graph=True)
        found += torch.autograd.grad(loss, weights, torch.tensor([1.0, 2.0]), is_grads_batched=True, retain_graph=True)
        each = lambda factor: torch.autograd.grad(loss, weights, factor, retain_graph=True)  # noqa: E731
        found += torch.func.vmap(each)(torch.ones(2))
        self.see(*found, *map(type, found))
        return loss


casts("gradients that are asked for", covers="those of casts have no memory of their own")(Asks)
# Autograd adds up gradients that stand for several each, and have no memory to read.
casts(
    "gradients that are asked for of layers that are used twice", {**MIXED, "recompute, k=1, bf16-mixed": 2},
    covers="sums of several gradients at once",
)(type("AsksTwice", (Asks,), {"calls": 2}))  # fmt: skip


class AtNodes(Seeing):
    """A hook of the graph's nodes sees gradients before autograd makes them the weights'."""

    def __init__(self, does: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.does = does

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        for parameter in self.net.parameters() if loss.requires_grad else ():
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            handle = node.register_prehook(lambda gradients: self.see(*map(self.does, gradients)))
            loss.register_hook(lambda _, h=handle: torch.autograd.Variable._execution_engine.queue_callback(h.remove))
        return loss


def moved(gradient: Tensor) -> Tensor:
    gradient.data = gradient.data * 0.3
    return gradient


def detached(gradient: Tensor) -> Tensor:
    before = gradient.detach()
    gradient.mul_(0.3)
    return before


def saved(gradient: Tensor) -> Any:
    torch.save(gradient, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True)


AT_NODES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda gradient: gradient.mul_(0.3),
    "through detach()": lambda gradient: gradient.detach().mul_(0.3),
    "through .data": lambda gradient: gradient.data.mul_(0.3),
    "detached before": detached,
    "other memory": moved,
    "numpy": lambda gradient: gradient.numpy().tolist(),
    "lists": lambda gradient: gradient.tolist(),
    "text": str,
    "copies": copy.deepcopy,
    "files": saved,
    "addresses": lambda gradient: gradient.data_ptr() == gradient.untyped_storage().data_ptr() != 0,
    "dlpack": torch.from_dlpack,
    "shared memory": lambda gradient: gradient.share_memory_(),
    "metadata": lambda gradient: str((gradient.dtype, gradient.shape, gradient.is_leaf, gradient.requires_grad)),
}
for use, does in AT_NODES.items():
    variants = MIXED if use == "through detach()" else tiers(long=MIXED)
    casts(f"gradients at nodes, {use}", variants, covers="plain's, whatever is done")(partial(AtNodes, does))


@casts("gradients that a node gave, written")
class Sums(Seeing):
    """What a linear layer's node gives its weight is kept, and written when that of the next layer comes."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.net.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self.watch)

    def watch(self, module: Any, args: Any, output: Tensor) -> None:
        if output.grad_fn is not None:
            output.grad_fn.register_hook(self.add)

    def loss(self, batch: Any) -> Tensor:
        self.total: Any = None
        return super().loss(batch)

    def add(self, inputs: Any, outputs: Any) -> None:
        self.total = inputs[-1] if self.total is None else self.total.zero_()


class Asked(TorchDispatchMode):
    """Asks for the memory of what operators are given, as a tracker of memory does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in args:
            if isinstance(each, Tensor):
                each.untyped_storage().data_ptr()
        return func(*args, **(kwargs or {}))


@casts("a backward within a mode of the user's")
class InMode(Manual):
    """The mode asks for the memory of what operators are given."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        with Asked():
            self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


casts("anomalies that are looked for", detect_anomaly=True, covers="each gradient is looked through")(Seeing)

# ---------------------------------------------------------------------- bytes


class Uses(nn.Sequential):
    """Six layers, used once or twice, with hooks on their weights or without."""

    def __init__(self, use: str) -> None:
        super().__init__(*(nn.Linear(128, 128, bias=False) for _ in range(6)))
        self.use = use
        for p in self.parameters() if use == "hooked" else ():
            p.register_hook(lambda gradient: gradient * 1.001)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x) if self.use == "twice" else x)


def half_the_bytes(use: str, ours: Outcome) -> None:
    """A gradient is lowered only where that loses nothing. The plan says so."""
    strategy: Any = ours.trainer.strategy
    plan, stats, layer = strategy.plan, strategy.stats(), 128 * 128 * 4
    assert stats.fetched_bytes == stats.fetched_layers * layer // 2
    assert stats.offloaded_gradient_bytes == 3 * 6 * layer // (2 if use == "once" else 1)
    if use != "once":
        return
    assert [each.nbytes for each in plan.layers] == [layer // 2] * 6
    assert plan.slot_bytes == 2 * layer // 2
    assert plan.gradient_bytes == 2 * layer // 2 + layer // 2  # two in flight, and one that is copied
    assert plan.host_bytes == 6 * (2 * layer + layer // 2)
    assert stats.demand_fetches == stats.extra_slots == 0


for use in ("once", "twice", "hooked"):
    casts(
        f"bytes of weights that are {use if use == 'hooked' else f'used {use}'}", tiers("users, k=1, bf16-mixed"),
        batches=lambda: [torch.ones(2, 128, requires_grad=True) for _ in range(3)], covers="half the bytes move",
        also=partial(half_the_bytes, use),
    )(lambda use=use: Module(Uses(use)))  # fmt: skip

# ---------------------------------------------------------------------- casts that updates in the background make

UPDATED = tiers(rest=["one pass under forward"])


GRAPHS: list[Tensor] = []


class KeepsGraphs(Module):
    """Its graphs need the casts when their update begins."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        GRAPHS.append(self.loss(batch))
        return super().training_step(batch, batch_idx)


@contextmanager
def the_graph_dies() -> Iterator[None]:
    """The update puts no casts where the graph's are. Nobody else would make them if it counted as if it had."""
    refused: list[bool] = []
    places = Casts.places

    def noted(self: Casts, by: Stream) -> Any:
        found = places(self, by)
        refused.append(not found)
        if not found:
            GRAPHS.clear()
        return found

    with mock.patch.object(Casts, "places", noted):
        yield
    assert any(refused)


casts("a graph that dies while casts are made", UPDATED, inside=the_graph_dies, covers="they are made after it")(
    KeepsGraphs
)


@casts(
    "a graph that keeps its casts",
    UPDATED,
    refused=dict.fromkeys(UPDATED, IN_PLACE),
    repairable=False,
    of=lambda kind: lambda: kind(Stack()),
)
class UsesOldGraphs(Module):
    """Adds the loss of the batch before, whose graph has the weights of the step before."""

    kept: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        before, self.kept = self.kept, self.loss(batch)
        loss = super().training_step(batch, batch_idx)
        return loss if before is None else loss + before
