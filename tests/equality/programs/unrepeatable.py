"""Forwards that cannot run twice are refused by name; with the option that the error names they train. Others are as in torch's
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from sp_lightning.capabilities.activations.host_ring import HostRing
from sp_lightning.capabilities.activations.recompute import Unrepeatable
from sp_lightning.core.torch_compat.private import current_graph_task
from tests.equality.rows import program, tiers
from tests.support.kernels import Block
from tests.support.models import Module, Stack, twice, vectors
from tests.support.poison import crowded
from tests.support.runs import Outcome
from tests.support.simdevice import simulated


def refused(name: str, said: str, *equal: str, variant: str = "recompute, k=1", tier: int = 2, **more: Any) -> Any:
    """A program that is refused in one variant, and equal in others."""
    return program(
        f"recompute: {name}", {variant: tier, **tiers(rest=equal)}, refused={variant: said}, **more
    )  # fmt: skip


# ---------------------------------------------------------------------- what cannot be put back


@refused(
    "a forward that writes its weight",
    r"Unrepeatable: 'inner.bias' of 'net.blocks.4' has been modified by an inplace operation between forward and backward",
    "keep", "offload", of=twice, variant="recompute", covers="it cannot be undone",
)  # fmt: skip
class WritesWeight(Block):
    def factor(self, x: Tensor) -> float:
        with torch.no_grad():
            self.inner.bias.mul_(0.9)
        return 1.0


@refused(
    "a forward that writes its weight's data",
    r"Unrepeatable: 'inner.bias' of 'net.blocks.4' has been modified by an inplace operation between forward and backward",
    "keep", "offload", of=twice, variant="recompute", covers="it cannot be undone",
)  # fmt: skip
class WritesWeightData(Block):
    def factor(self, x: Tensor) -> float:
        self.inner.bias.data.mul_(0.9)
        return 1.0


@refused(
    "a forward that writes its input",
    r"Unrepeatable: A tensor that 'net.blocks.4' was given has been written since its forward began",
    "keep", "offload", of=twice, variant="recompute", covers="it cannot be undone",
)  # fmt: skip
class WritesInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.relu_(x))


@refused(
    "a backward in a forward, of the layer's weights",
    r"Unrepeatable: The forward of 'net.blocks.0' changes the gradient of 'net.blocks.0.inner.weight', and would",
    "keep", "offload", of=twice, variant="recompute", covers="it cannot be undone",
)  # fmt: skip
class RunsBackward(Block):
    def factor(self, x: Tensor) -> float:
        self.inner(x.detach()).square().mean().backward()
        return 1.0


@refused(
    "an error of the second run", "LookupError: one value per batch.*'net.blocks.4' ran again in backward", of=twice,
    variant="recompute", covers="it says that it is one of the second run",
)  # fmt: skip
class RaisesInBackward(Block):
    def forward(self, x: Tensor) -> Tensor:
        if current_graph_task() != -1:
            raise LookupError("one value per batch")
        return super().forward(x)


@refused(
    "a weight written in the layer's backward",
    "Unrepeatable: 'inner.weight' of 'net.blocks.4' has been modified by an inplace operation", of=twice, repairable=False,
    covers="the second run has saved it before; plain Lightning raises autograd's error",
)  # fmt: skip
class WritesInBackward(Block):
    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        if inner.requires_grad:
            inner.register_hook(self.write)
        return x + torch.tanh(inner)

    def write(self, gradient: Tensor) -> None:
        with torch.no_grad():
            self.inner.weight.mul_(0.9)


@refused(
    "a forward that catches every exception", "AssertionError: .*'net.blocks.4' ran again in backward", of=twice,
    variant="recompute", covers="torch ends the second run by an exception",
)  # fmt: skip
class CatchesEverything(Block):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return x + torch.tanh(self.inner(x))
        except Exception:
            return torch.sin(x)


def compiled(source: str) -> Any:
    """A function of TorchScript that has never been called: its first call is another one than those that follow."""
    return torch.jit.CompilationUnit(f"def scripted(x: Tensor, y: Tensor) -> Tensor:\n    return {source}\n").scripted


SCRIPTED = r"Unrepeatable: 'net.blocks.0.(gate|sum|mask)' is TorchScript, which may save other tensors"
OTHER_GRAPH = "its second run saves the tensors of another graph: gradients were wrong without an error"


@refused(
    "TorchScript in the middle of a layer",
    SCRIPTED,
    of=twice, variant="recompute", covers=OTHER_GRAPH,
)  # fmt: skip
class ScriptedInTheMiddle(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate = compiled("torch.sigmoid(x) * y")

    def factor(self, x: Tensor) -> Any:
        return torch.tanh(self.gate(self.inner(x), x))


@refused(
    "TorchScript at the end of a layer",
    SCRIPTED,
    of=twice, variant="recompute", covers=OTHER_GRAPH,
)  # fmt: skip
class ScriptedAtTheEnd(Block):
    """As schnetpack sums the messages of atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = compiled("x.new_zeros(x.shape).index_add(0, torch.arange(x.size(0)), x)")

    def forward(self, x: Tensor) -> Any:
        return self.sum(super().forward(x), x)


@refused(
    "a module in TorchScript",
    r"Unrepeatable: 'net.blocks.0.gelus' is TorchScript, which may save other tensors",
    of=twice, variant="recompute",
    covers=OTHER_GRAPH, repairable=False,
)  # fmt: skip
class ScriptedModule(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gelus = torch.jit.script(nn.Sequential(nn.GELU(), nn.Sigmoid()))

    def factor(self, x: Tensor) -> Any:
        return self.gelus(x)


@refused("TorchScript that saves nothing", SCRIPTED, of=twice, variant="recompute", covers="nobody knows before")
class ScriptedMask(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mask = compiled("(x > 0).to(y.dtype) * 2 + (y < x)")

    def factor(self, x: Tensor) -> Any:
        return self.mask(x.detach(), x.detach().flip(0))


class WritesAnother(Block):
    """Writes a weight of a layer that it holds out of sight, in a list."""

    def __init__(self, write: Callable[[Any], None]) -> None:
        super().__init__()
        self.write = write
        self.others: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        for other in self.others:
            self.write(other)
        return super().forward(x)


class WritesAnotherLast(WritesAnother):
    """Nothing is saved for backward after the write, so that torch stops the second run before it."""

    def forward(self, x: Tensor) -> Tensor:
        output = Block.forward(self, x)
        for other in self.others:
            self.write(other)
        return output


def _multiply(other: Any) -> None:
    with torch.no_grad():
        other.weight.mul_(0.9)


def _multiply_data(other: Any) -> None:
    other.weight.data.mul_(0.9)


def _multiply_all(other: Any) -> None:
    torch._foreach_mul_([other.weight.data], 0.9)


def _multiply_a_view(other: Any) -> None:
    other.weight.detach()[0].mul_(0.9)


def _exchange(other: Any) -> None:
    other.weight.data = other.weight.data * 0.9


def _make_ones(other: Any) -> None:
    with torch.no_grad():
        other.weight.fill_(1.0)


def writes_another(write: Callable[[Any], None], target: int = 3, kind: type = WritesAnother) -> Callable[[], Module]:
    """Makes a module whose second block writes a weight of another one."""

    def make() -> Module:
        stack = Stack()
        blocks = [kind(write) for _ in range(5)]
        blocks[1].others = [blocks[target].inner]
        stack.blocks = nn.ModuleList(blocks)
        return Module(stack)

    return make


STAYS = "recompute, k=1, net.blocks.3 stays"
for write in (_multiply, _multiply_data, _multiply_all, _multiply_a_view, _exchange):
    tier = 2 if write in (_multiply_data, _exchange) else 3
    program(
        f"recompute: a weight of another layer, {write.__name__}", {"recompute, k=1": tier, STAYS: tier},
        checkpointed=True, covers="the second run writes it again, as in torch's checkpoint",
    )(writes_another(write))  # fmt: skip
program(
    "recompute: the same values in another layer", tiers(rest=["recompute, k=1"]), covers="a second write shows nothing"
)(writes_another(_make_ones))  # fmt: skip
program(
    "recompute: a write behind what is saved", tiers(rest=["recompute, k=1"]), covers="torch stops the second run before"
)(writes_another(_multiply, kind=WritesAnotherLast))  # fmt: skip


class GivesAnother(WritesAnother):
    """Gives a weight of another layer a gradient, without a call of that layer."""

    def __init__(self) -> None:
        super().__init__(lambda other: other.weight.square().mean().backward())


@program(
    "recompute: a gradient of another layer", tiers(rest=["recompute, k=1", STAYS]),
    checkpointed=True, covers="a forward gives it without a call of that layer: twice, as in torch's checkpoint",
)  # fmt: skip
def gives_another() -> Module:
    stack = Stack()
    stack.blocks = nn.ModuleList(GivesAnother() for _ in range(5))
    giver: Any = stack.blocks[1]
    giver.others = [stack.blocks[3].inner]
    return Module(stack)


BETWEEN = r"has been modified by an inplace operation between forward and backward"


@refused(
    "a weight written between",
    rf"Unrepeatable: .*'inner.bias' of 'net.blocks.2' {BETWEEN}",
    variant="recompute",
    tier=1,
)
class WritesBetween(Module):
    """Where plain autograd does not mind: it has not saved the bias."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        with torch.no_grad():
            self.net.blocks[2].inner.bias.mul_(0.5)  # type: ignore[index, union-attr]
        return loss


class Masks(Module):
    """Keeps pruned weights at zero, in a hook that Lightning calls between forward and backward."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            for block in self.net.blocks:  # type: ignore[union-attr]
                block.inner.bias.mul_(0.5)


refused("a hook that masks weights", r"Unrepeatable: 'inner.bias' of 'net.blocks.4' has been modified", tier=1)(Masks)


class Table(nn.Embedding):
    """Looks up rows. Only torch's own class is known to need no second forward."""


@refused(
    "an embedding normalized between", r"\w+: .*, a hook \(on_before_zero_grad\) or an optimizer",
    batches=lambda: [torch.arange(8)] * 3,
)  # fmt: skip
class Normalizes(Module):
    """Normalizes an embedding, the only weight of its unit, in a hook that Lightning calls between forward and backward."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(Table(8, 16), Stack()))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        weight = self.net[0].weight
        weight.data = nn.functional.normalize(weight.data, dim=-1)


@refused(
    "a step between two backwards",
    r"Unrepeatable: .*'weight' of 'net.head' has been modified by an inplace operation between forward and backward"
    r".*an optimizer.*activations=\"offload\"\)",
    "keep, k=1", "offload, k=1",
)  # fmt: skip
class StepsBetween(Module):
    """A fused step bumps no version, so that plain autograd goes on, with what it has saved."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.automatic_optimization = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        optimizer.step()
        self.manual_backward(loss)
        optimizer.step()


@program(
    "recompute: an unseen write between two backwards",
    tiers(rest=["recompute, k=1", "offload, k=1"]),
    checkpointed=True,
)
class WritesUnseenBetween(StepsBetween):
    """Writes of which torch shows nothing, between two backwards."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        for block in self.net.blocks:  # type: ignore[union-attr]
            block.inner.bias.data.mul_(0.9)
        self.manual_backward(loss)
        optimizer.step()


class Squashes(Block):
    """Its first operator saves its output alone."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(torch.sigmoid(x)))


class AddsInPlace(Stack):
    """Residual connections that write what the layers were given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Squashes() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x += block(x)
        return self.head(x)


refused(
    "an input written after the layer",
    r"Unrepeatable: .*A tensor that 'net.blocks.4' was given has been written since"
    r'.*Write x = x \+ layer\(x\) in place of x \+= layer.*activations="offload"',
    "keep, k=1", "offload, k=1", covers="torch's own error names no layer",
)(lambda: Module(AddsInPlace()))  # fmt: skip


# ---------------------------------------------------------------------- auto


@contextmanager
def in_60_kb() -> Iterator[None]:
    with crowded(), simulated(capacity=60_000):
        yield


def some_offloaded(ours: Outcome) -> None:
    assert "offload" in ours.trainer.strategy.activations.values()


for name, make in {
    "weight": twice(WritesWeight),
    "TorchScript": twice(ScriptedInTheMiddle),
    "another weight": writes_another(_multiply),
    "another gradient": gives_another,
    "between": WritesBetween,
    "input": lambda: Module(AddsInPlace()),
}.items():
    program(
        f"auto: what cannot run twice, {name}", tiers("auto, k=1"), batches=lambda: [*vectors(), *vectors()], inside=in_60_kb,
        also=some_offloaded, covers="it must not end a run that plain Lightning finishes",
    )(make)  # fmt: skip


# ---------------------------------------------------------------------- what computes other values


class Bounded(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return torch.tanh(weight)


@refused(
    "weights that torch caches",
    r"Unrepeatable: .*orward of 'net\.blocks\.\d' saved other tensors.*\"offload\".*torch says:\n", variant="recompute",
)  # fmt: skip
class CachedParametrizations(Module):
    """torch keeps parametrized weights in a global dictionary, so that the second call of a layer saves other tensors."""

    def __init__(self) -> None:
        super().__init__(Stack(3))
        for block in self.net.blocks:
            parametrize.register_parametrization(block.inner, "weight", Bounded())

    def loss(self, batch: Any) -> Tensor:
        with parametrize.cached():
            return super().loss(batch) + super().loss(batch + 1)


class EightBits(nn.Module):
    """A frozen layer of bitsandbytes in 8 bits, and an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        bnb = pytest.importorskip("bitsandbytes")
        self.base = bnb.nn.Linear8bitLt(16, 16, has_fp16_weights=False).requires_grad_(False)
        self.base.weight = self.base.weight.to("cpu")  # which quantises
        self.adapter = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.adapter(x))


@program("recompute: layers of bitsandbytes", tiers(rest=["recompute", "offload"]))
def with_eight_bits() -> Module:
    """The first forward moves the 8-bit weights."""
    return Module(nn.Sequential(nn.Linear(16, 16), *(EightBits() for _ in range(3)), nn.Linear(16, 16)))


program(
    "offload: layers of bitsandbytes alone", tiers(rest=["recompute"]), covers="the other layers are recomputed",
    strategy={"activations": {"net.1": "offload", "net.2": "offload", "net.3": "offload", "**": "recompute"}},
)(with_eight_bits)  # fmt: skip


def of(block: type[nn.Module], depth: int = 3) -> Callable[[], Module]:
    return lambda: Module(nn.Sequential(nn.Linear(16, 16), *(block() for _ in range(depth)), nn.Linear(16, 16)))


@program(
    "recompute: a cast that is autocast's own in the second run", tiers(rest=["recompute, k=1, bf16-mixed"]), of=of
)
class ReadsAfterwards(Block):
    """Other code reads the whole weight after the linear layer, so the second run finds it on the device."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01 * self.inner.weight.square().mean()


@program(
    "recompute: another tensor in place of a cast", tiers("recompute, k=1, bf16-mixed"), of=lambda block: of(block, 1),
    batches=lambda: vectors(1), strategy={"layers": ["net.1"]}, checkpointed=True,
)  # fmt: skip
class ComputesWithAnother(nn.Module):
    """The second run computes with other values of the weight's form."""

    runs: ClassVar[list[None]] = []

    def __init__(self) -> None:
        super().__init__()
        self.runs.clear()
        self.inner = nn.Linear(16, 16, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(None)
        weight = self.inner.weight
        if len(self.runs) > 1:
            weight = (weight + 1).to(torch.bfloat16)
        return x + nn.functional.linear(x, weight)


_calls: list[int] = []


def second(block: type[nn.Module]) -> Callable[[], Module]:
    """Makes a stack whose second block is of this class."""

    def make() -> Module:
        stack = Stack()
        stack.blocks[1] = block()
        return Module(stack)

    return make


@refused(
    "another graph in the second run",
    r"Unrepeatable: The forward of 'net.blocks.1' saved other tensors when it ran again in backward",
    variant="recompute", of=second,
)  # fmt: skip
class Fickle(nn.Module):
    """Does something else each time, by a global variable."""

    def __init__(self) -> None:
        super().__init__()
        _calls.clear()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        _calls.append(1)
        return x + (torch.tanh(self.inner(x)) if len(_calls) % 2 else self.inner(torch.cat([x, x])).exp()[:4].sin())


@refused(
    "less saved in the second run",
    r"Unrepeatable: The forward of 'net.blocks.1' saved other tensors when it ran again in backward",
    variant="recompute", of=second,
)  # fmt: skip
class Shrinks(Fickle):
    """Saves less each second time."""

    def forward(self, x: Tensor) -> Tensor:
        _calls.append(1)
        x = x + torch.tanh(self.inner(x))
        return x.exp() if len(_calls) % 2 else x


# ---------------------------------------------------------------------- what surrounds the forward is gone in backward


class Norm(nn.LayerNorm):
    pass


class Louder(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.5


class NormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.act, self.scale = Norm(16), nn.Linear(16, 16), nn.Tanh(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.inner(self.norm(x))) * self.scale


def blocks() -> Module:
    stack = Stack()
    stack.blocks = nn.ModuleList(NormBlock() for _ in range(5))
    return Module(stack)


def louder(module: Any, args: Any, output: Tensor) -> Tensor:
    return output * 1.5


def louder_inputs(module: Any, args: Any) -> Any:
    return tuple(each * 1.5 for each in args)


class LouderLinear(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 1.5 if func is nn.functional.linear else result


@contextmanager
def handle(made: Any) -> Iterator[None]:
    try:
        yield
    finally:
        made.remove()


@contextmanager
def exchanged(owner: Any, **attributes: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def in_evaluation(block: Any) -> Iterator[None]:
    block.eval()
    try:
        yield
    finally:
        block.train()


def patched(owner: Any, name: str) -> Any:
    """``owner``'s function gives half as much again."""
    own = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *args, **options: own(*args, **options) * 1.5)


def of_norm(norm: Any, hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda module, *rest: hook(module, *rest) if module is norm else None


AROUND: dict[str, Callable[[Any], Any]] = {
    "hook": lambda block: handle(block.norm.register_forward_hook(louder)),
    "pre-hook": lambda block: handle(block.inner.register_forward_pre_hook(louder_inputs)),
    "global hook": lambda block: handle(register_module_forward_hook(of_norm(block.norm, louder))),
    "global pre-hook": lambda block: handle(register_module_forward_pre_hook(of_norm(block.norm, louder_inputs))),
    "forward of an instance": lambda block: patched(block.norm, "forward"),
    "forward of a class": lambda block: patched(Norm, "forward"),
    "class": lambda block: exchanged(block.norm, __class__=Louder),
    "function": lambda block: patched(nn.functional, "layer_norm"),
    "function mode": lambda block: LouderLinear(),
    "hook on the layer": lambda block: handle(block.register_forward_hook(louder)),
    "pre-hook on the layer": lambda block: handle(block.register_forward_pre_hook(louder_inputs)),
    "backward hook": lambda block: handle(block.inner.register_full_backward_hook(lambda _, g, out: (g[0] * 1.5,))),
    "attribute": lambda block: exchanged(block, scale=1.5),
    "attribute of torch's": lambda block: exchanged(block.norm, eps=0.5),
    "submodule": lambda block: exchanged(block, act=nn.ReLU()),
    "evaluation": in_evaluation,
}


class Steered(Module):
    """Something is around the forward of its blocks, as with activation steering and ablations."""

    def __init__(self, kind: str) -> None:
        super().__init__(blocks().net)
        self.kind = kind

    def loss(self, batch: Any) -> Tensor:
        with AROUND[self.kind](self.net.blocks[1]):  # type: ignore[index, union-attr]
            return super().loss(batch)


for kind in AROUND:
    program(
        f"recompute: {kind} around a forward", tiers(rest=["recompute, k=1"]), checkpointed=True,
        covers="the second forward runs without it, as in torch's checkpoint",
    )(lambda kind=kind: Steered(kind))  # fmt: skip
program(
    "offload: no room in host memory", tiers("offload, k=1"), covers="what has no room is kept, not computed again",
    inside=lambda: mock.patch.object(HostRing, "free_bytes", -1),
)(lambda: Steered("hook"))  # fmt: skip


@program(
    "recompute: returned gradients", tiers(rest=["recompute, k=1", "recompute, k=1, simulated"]), checkpointed=True,
)  # fmt: skip
class AsksForGradients(Steered):
    """Through ``torch.autograd.grad``, which only returns them."""

    def __init__(self) -> None:
        super().__init__("hook")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        torch.autograd.grad(loss, list(self.net.parameters()))


@program(
    "recompute: an error that is caught",
    tiers(long=["recompute, k=1, plain, losses alone", "recompute, k=1, simulated, losses alone"]),
    also=lambda ours: None if ours.module.caught else pytest.fail("nothing was raised"),
)
class Catches(WritesBetween):
    """Catches the error, and goes on without the write."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        try:
            self.manual_backward(self.loss(batch))
        except Unrepeatable:
            self.caught = True
        optimizer.zero_grad()
        self.manual_backward(Module.loss(self, batch))
        optimizer.step()
