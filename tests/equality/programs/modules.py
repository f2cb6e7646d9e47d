"""In a run a module looks as on plain Lightning: to code that inspects it, copies it, or calls it in another way."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import pickletools
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from tests.equality.rows import program, tiers
from tests.support.models import Block, Module, Stack, vectors
from tests.support.moments import At
from tests.support.runs import Outcome

RECOMPUTED = tiers(rest=["recompute, k=1"], long=["keep, k=1", "offload, k=1"])
TWO = partial(vectors, 2)

# ---------------------------------------------------------------------- what an inspection finds


def looks(module: nn.Module) -> list[Any]:
    """What code can ask a module for: its class, its attributes and hooks, what it is called by."""
    names = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    return [
        (name, type(each), sorted(vars(each)), [len(getattr(each, hooks)) for hooks in names], each.forward.__func__)
        for name, each in module.named_modules()
    ]


class Looking(Block):
    """Looks at itself and all others in its forward."""

    looks: ClassVar[list[Callable[[], None]]] = []

    def forward(self, x: Tensor) -> Tensor:
        for look in self.looks if torch.is_grad_enabled() else ():
            look()
        return super().forward(x)


@program(
    "modules: inspected at every moment", tiers("keep, k=1", "recompute, k=1", rest=["offload, k=1"]), validated=True,
    max_steps=2,
)  # fmt: skip
class Inspects(Module):
    """Forward hooks, hooks for all modules and an own ``forward`` were there, and RF-DETR chose another algorithm."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(Stack(3), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), Looking()))
        self.seen: dict[str, None] = {}  # recomputed forwards find it again

    def look(self, *_: Any) -> None:
        hooks = {name: len(hooks) for name, hooks in vars(torch_module).items() if name.endswith("_hooks")}
        self.seen[repr((looks(self.net), hooks, torch_module.Module.__call__.__name__))] = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        Looking.looks[:] = [self.look]
        self.look()
        return super().training_step(batch, batch_idx)

    on_before_backward: Any = look
    on_before_zero_grad: Any = look
    on_train_batch_end: Any = look
    on_validation_batch_end: Any = look


# ---------------------------------------------------------------------- pickles and copies


def saved(value: Any) -> bytes:
    """The pickle in what ``torch.save`` writes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    with zipfile.ZipFile(stream) as file:
        return file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))


@program(
    "modules: pickled and copied", batches=TWO,
    variants=tiers(long=["recompute, k=1", "keep, k=1", "keep, k=1, bf16-mixed"]),  # a fused reference has a local function
)  # fmt: skip
class Pickles(Module):
    """Pickles had hooks of ours, and could not be loaded where this package is not installed."""

    def __init__(self) -> None:
        super().__init__(Stack())
        with warnings.catch_warnings(action="ignore"):  # Lightning advises against it
            self.save_hyperparameters({"net": self.net}, logger=False)
        self.seen: list[Any] = []

    def see(self, *_: Any) -> None:
        for content in (pickle.dumps(self.net), saved(self.net), pickle.dumps(self.hparams)):
            names = [name for _, name, _ in pickletools.genops(content) if isinstance(name, str)]
            assert not any("sp_lightning" in name for name in names)
        for each in (pickle.loads(pickle.dumps(self.net)), copy.deepcopy(self.net)):
            assert {type(weight) for weight in each.parameters()} == {nn.Parameter}
            assert {type(place) for m in each.modules() for place in (m._parameters, m._buffers)} == {dict}
            self.seen.append([weight.detach().clone() for weight in each.parameters()])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        handle = self.net.blocks[1].register_forward_hook(self.see)  # type: ignore[index, union-attr]
        self.see()
        loss = super().training_step(batch, batch_idx)
        handle.remove()
        return loss

    on_before_backward: Any = see
    on_train_batch_end: Any = see


COPIES: list[nn.Module] = []


def copies_a_layer(module: Any, inputs: Any) -> None:
    assert module.forward.__func__ is type(module).forward
    content = pickle.dumps(module)
    assert b"sp_lightning" not in content
    COPIES[:] = [pickle.loads(content), copy.deepcopy(module)]


def run_by_themselves(ours: Outcome) -> None:
    x = torch.ones(2, 16)
    for each in COPIES:
        each._forward_pre_hooks.clear()
        before = each(x)
        with torch.no_grad():
            for weight in each.parameters():
                weight.zero_()
        assert not torch.equal(each(x), before), "it ran the original's forward"


@program("modules: copied by a pre-hook", tiers(rest=["recompute, k=1"]), batches=TWO, also=run_by_themselves)
class CopiesInPreHook(Module):
    """Pickles and copies a layer between the beginning of its call and that of its forward."""

    def __init__(self) -> None:
        super().__init__(Stack())
        block: Any = self.net.blocks[1]  # type: ignore[index, union-attr]
        block.drop.p = 0.0
        block.register_forward_pre_hook(copies_a_layer)


WAYS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "script": lambda net, x: torch.jit.script(net)(x),
    "trace": lambda net, x: torch.jit.trace(net, x)(x),
    "export": lambda net, x: torch.export.export(net, (x,)).module()(x),
    "strict export": lambda net, x: torch.export.export(net, (x,), strict=True).module()(x),
    "compile": lambda net, x: torch.compile(net, backend="eager", fullgraph=True)(x),
}


class Copied(Module):
    """TorchScript compiled the engine's hooks ("Unknown type name 'nn.Module'"), and Dynamo met them ("Skip inlining")."""

    def __init__(self, way: str) -> None:
        super().__init__(Stack(3))
        self.way, self.seen = WAYS[way], []  # type: ignore[var-annotated]
        torch._dynamo.reset()

    def make(self, batch: Tensor) -> None:
        net = copy.deepcopy(self.net).eval()
        self.seen.append(self.way(net, batch).detach())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.make(batch)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.make(torch.ones(2, 16))


for way in WAYS:
    both = ["keep, k=1", "recompute, k=1"]
    program(
        f"modules: a copy becomes a program, {way}", tiers(rest=both if way == "script" else (), long=both),
        covers=Copied.__doc__ or "", max_steps=2,
    )(partial(Copied, way))  # fmt: skip


@program("modules: a copy keeps hooks of the user", tiers(rest=["keep, k=1"]), at="on_train_epoch_end")
def _(m: Any) -> None:
    """And the original keeps its own."""
    before = [len(child._forward_pre_hooks) for child in m.net.modules()]
    handle = m.net[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    copied, x = copy.deepcopy(m.net), torch.ones(2, 16)
    assert [len(child._forward_pre_hooks) for child in copied.modules()].count(1) == 1
    m.seen.append(copied.eval()(x).detach())
    assert torch.equal(m.seen[-1], m.net.eval()(x))
    handle.remove()
    assert [len(child._forward_pre_hooks) for child in m.net.modules()] == before


for name, done, said in (
    ("scripted", lambda m: torch.jit.script(m.net), r"script .*'Sequential'.*copy\.deepcopy\(module\).*after the run"),
    ("traced", lambda m: torch.jit.trace(m.net, torch.ones(2, 16)), r"trace was called during a run.*log_graph=False"),
):  # fmt: skip
    program(
        f"modules: {name} in a run", tiers(rest=["keep, k=1"]), at="on_train_start",
        refused={"keep, k=1": rf"RuntimeError: .*torch\.jit\.{said}"}, covers="a program would have no weights after the run",
    )(done)  # fmt: skip


def becomes_a_program(ours: Outcome) -> None:
    net, x = ours.module.net.eval(), torch.ones(2, 16)  # type: ignore[union-attr]
    assert torch.equal(torch.jit.trace(net, x)(x), net(x))
    assert torch.equal(torch.jit.script(net)(x), net(x))


program(
    "modules: scripted and traced after a run", tiers(rest=["keep, k=1"]), also=becomes_a_program,
    covers="nothing of the engine's is left in a module",
)(lambda: Module(Stack()))  # fmt: skip

# ---------------------------------------------------------------------- a layer's forward is another one for a while


class Doubled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return Block.forward(self, x) * 2


def instance_forward(layer: Any) -> Iterator[None]:
    forward = layer.forward
    layer.forward = lambda x: forward(x) * 2
    yield
    del layer.forward


def class_forward(layer: Any) -> Iterator[None]:
    forward = Block.forward
    Block.forward = lambda self, x: forward(self, x) * 2  # type: ignore[method-assign]
    yield
    Block.forward = forward  # type: ignore[method-assign]


def other_class(layer: Any) -> Iterator[None]:
    layer.__class__ = Doubled
    yield
    layer.__class__ = Block


def pre_hook_that_exchanges_forward(layer: Any) -> Iterator[None]:
    """It counts from the next call on. A second one keeps what it found, and calls that."""
    kept: list[Any] = []

    def exchange(module: Any, inputs: Any) -> None:
        if not kept:
            kept.append(module.forward)
            module.forward = lambda x: kept[0](x) * 2

    handle = layer.register_forward_pre_hook(exchange)
    layer(torch.ones(1, 16))
    yield
    handle.remove()
    del layer.forward


class Patches(Module):
    """The one that was there as the step began ran in its place, silently."""

    def __init__(self, way: Callable[[Any], Iterator[None]]) -> None:
        super().__init__(Stack())
        self.around = contextmanager(way)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2:
            return super().training_step(batch, batch_idx)
        with self.around(self.net.blocks[1]):  # type: ignore[index, union-attr]
            return super().training_step(batch, batch_idx)


for patch in (instance_forward, class_forward, other_class, pre_hook_that_exchanges_forward):
    program(
        f"modules: a forward that is another one for a batch, {patch.__name__}", RECOMPUTED, covers=Patches.__doc__ or ""
    )(partial(Patches, patch))  # fmt: skip


def kept_is_its_own(ours: Outcome) -> None:
    from sp_lightning.capabilities.activations.calls import UnitModes

    module: Any = ours.module.eval()
    with mock.patch.object(UnitModes, "call", side_effect=AssertionError):
        found, expected = (forward(torch.ones(1, 16)) for forward in (module.kept, module.net.blocks[1]))
    assert torch.equal(found, expected)


@program("modules: a forward that a pre-hook has kept", tiers(rest=["recompute, k=1"]), also=kept_is_its_own)
class KeepsForward(Module):
    """It ran in the mode of a run that was over."""

    kept: Any

    def __init__(self) -> None:
        super().__init__(Stack())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        handle = self.net.blocks[1].register_forward_pre_hook(self.keep)  # type: ignore[index, union-attr]
        loss = super().training_step(batch, batch_idx)
        handle.remove()
        return loss

    def keep(self, module: Any, inputs: Any) -> None:
        self.kept = module.forward
        assert inspect.signature(self.kept) == inspect.signature(Block.forward.__get__(module))


# ---------------------------------------------------------------------- other ways to call

CALL = nn.Module.__call__


def a_copy(block: Any) -> Any:
    made = block.__new__(type(block))
    made.__dict__ = block.__dict__.copy()
    return made


OTHERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "as it was before": lambda block, x: CALL(block, x),
    "forward": lambda block, x: block.forward(x),
    "forward of a shallow copy": lambda block, x: copy.copy(block).forward(x),
    "shallow copy": lambda block, x: copy.copy(block)(x),
    "its attributes in another object": lambda block, x: a_copy(block)(x),
    "_call_impl": lambda block, x: block._call_impl(x),
    "functional_call": lambda block, x: torch.func.functional_call(block, dict(block.named_parameters()), x),
}


class Calls(Module):
    """Calls blocks in another way than by ``nn.Module.__call__`` as it is in a run."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(Stack())
        self.call = call

    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        x = net.stem(batch)
        for block in net.blocks:
            x = self.call(block, x)
        return net.head(x).square().mean()


for name, call in OTHERS.items():
    program(
        f"modules: calls that the engine does not see, {name}", RECOMPUTED, covers=Calls.__doc__ or "", batches=TWO
    )(partial(Calls, call))


@contextmanager
def called_as_before() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "__call__", CALL)
        yield


@program(
    "modules: code of others around all calls", tiers("keep, k=1"), at="on_train_start", on=At, inside=called_as_before
)
def _(m: Any) -> None:
    """It stays there, as that of some tools for profiling does."""
    if type(m.trainer.strategy).__name__ == "SuperpipelineStrategy":
        before: Any = nn.Module.__call__
        nn.Module.__call__ = lambda self, *args, **kwargs: before(self, *args, **kwargs)  # type: ignore[method-assign]
