"""In a run a module looks as on plain Lightning: to code that inspects it, to pickle, and to whoever calls it in another way."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import pickletools
import warnings
import weakref
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from sp_lightning.core.device.own_threads import OwnThreads
from sp_lightning.core.torch_compat import around_calls
from tests.support.engine import ModuleCall, listen, streamer_of
from tests.support.models import Block, Module, Stack, vectors
from tests.support.runs import assert_same, fit, superpipeline
from tests.support.starts import start
from tests.support.tiers import first

MODES = ("keep", "recompute", "offload")


# ---------------------------------------------------------------------- what an inspection finds


def looks(module: nn.Module) -> list[Any]:
    """What code can ask a module for: its class, its attributes and hooks, what it is called by."""
    names = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    return [
        (name, type(each), sorted(vars(each)), [len(getattr(each, hooks)) for hooks in names], each.forward.__func__)
        for name, each in module.named_modules()
    ]


def global_hooks() -> dict[str, int]:
    return {name: len(hooks) for name, hooks in vars(torch_module).items() if name.endswith("_hooks")}


class Looking(Block):
    """Looks at itself and all others in its forward."""

    looks: ClassVar[list[Callable[[], None]]] = []

    def forward(self, x: Tensor) -> Tensor:
        for look in self.looks if torch.is_grad_enabled() else ():
            look()
        return super().forward(x)


class Inspects(Module):
    """Looks at all modules at every moment of a run."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(Stack(3), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), Looking()))
        self.seen: list[Any] = []

    def look(self, *_: Any) -> None:
        self.seen.append((looks(self.net), global_hooks()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        Looking.looks[:] = [self.look]
        self.look()
        return super().training_step(batch, batch_idx)

    on_before_backward: Any = look
    on_before_zero_grad: Any = look
    on_train_batch_end: Any = look
    on_validation_batch_end: Any = look


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("activations", first(MODES, "keep", "recompute", why="modes that are alike"))
def test_an_inspection_finds_what_it_finds_on_plain_lightning(activations: Any) -> None:
    """Forward hooks, hooks for all modules and an own ``forward`` were there, and RF-DETR chose another algorithm."""
    ours = fit(Inspects, vectors(), superpipeline(k=1, activations=activations), vectors(1), max_steps=2)
    plain = fit(Inspects, vectors(), "auto", vectors(1), max_steps=2)
    assert_same(ours, plain)
    found, expected = ([*dict.fromkeys(map(repr, each.module.seen))] for each in (ours, plain))
    assert found == expected  # recomputed forwards find it again
    assert nn.Module.__call__ is CALL


CALL = nn.Module.__call__


# ---------------------------------------------------------------------- pickles


def pickled(value: Any) -> bytes:
    return pickle.dumps(value)


def saved(value: Any) -> bytes:
    """The pickle in what ``torch.save`` writes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    with zipfile.ZipFile(stream) as file:
        return file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))


class Pickles(Module):
    """Pickles itself in the middle of a step, in a user's hook, and between steps."""

    def __init__(self) -> None:
        super().__init__(Stack())
        with warnings.catch_warnings(action="ignore"):  # Lightning advises against it
            self.save_hyperparameters({"net": self.net}, logger=False)
        self.seen: list[Any] = []

    def see(self, *_: Any) -> None:
        for content in (pickled(self.net), saved(self.net), pickled(self.hparams)):
            names = [name for _, name, _ in pickletools.genops(content) if isinstance(name, str)]
            assert not any("sp_lightning" in name for name in names)
        for each in (pickle.loads(pickled(self.net)), copy.deepcopy(self.net)):
            assert {type(weight) for weight in each.parameters()} == {nn.Parameter}
            assert {type(place) for module in each.modules() for place in (module._parameters, module._buffers)} == {
                dict
            }
            self.seen.append([weight.detach().clone() for weight in each.parameters()])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        handle = self.net.blocks[1].register_forward_hook(self.see)  # type: ignore[index, union-attr]
        self.see()
        loss = super().training_step(batch, batch_idx)
        handle.remove()
        return loss

    on_before_backward: Any = see
    on_train_batch_end: Any = see

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "options",
    first(
        [{}, {"activations": "recompute"}, {"optimizer_overlap": "forward"}, {"precision": "bf16-mixed"}],
        {"activations": "recompute"},
        why="other ways to hold weights",
    ),
)
def test_pickles_and_copies_have_nothing_of_a_run(options: dict[str, Any]) -> None:
    """They had hooks of ours, and could not be loaded where this package is not installed."""
    trainer = {name: options[name] for name in options if name == "precision"}
    strategy = superpipeline(k=1, **{name: options[name] for name in options if name not in trainer})
    ours, plain = fit(Pickles, vectors(2), strategy, **trainer), fit(Pickles, vectors(2), **trainer)
    assert_same(ours, plain)
    for mine, theirs in zip(ours.module.seen, plain.module.seen, strict=True):
        assert all(map(torch.equal, mine, theirs))


COPIES: list[nn.Module] = []


def copies_a_layer(module: Any, inputs: Any) -> None:
    assert module.forward.__func__ is type(module).forward
    content = pickled(module)
    assert b"sp_lightning" not in content
    COPIES.extend([pickle.loads(content), copy.deepcopy(module)])


class CopiesInPreHook(Module):
    """Pickles and copies a layer between the beginning of its call and that of its forward."""

    def __init__(self) -> None:
        super().__init__(Stack())
        block: Any = self.net.blocks[1]  # type: ignore[index, union-attr]
        block.drop.p = 0.0
        block.register_forward_pre_hook(copies_a_layer)


@pytest.mark.rest("takes tenths of a second")
def test_a_copy_that_a_pre_hook_makes_runs_by_itself() -> None:
    COPIES.clear()
    ours = fit(CopiesInPreHook, vectors(2), superpipeline(k=1, activations="recompute"))
    copies, x = [*COPIES], torch.ones(2, 16)
    assert_same(ours, fit(CopiesInPreHook, vectors(2)))
    for each in copies:
        each._forward_pre_hooks.clear()
        before = each(x)
        with torch.no_grad():
            for weight in each.parameters():
                weight.zero_()
        assert not torch.equal(each(x), before), "it ran the original's forward"


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


WAYS = (instance_forward, class_forward, other_class, pre_hook_that_exchanges_forward)


class Patches(Module):
    """In every second batch a layer's forward is another one, until the loss is there."""

    def __init__(self, way: Callable[[Any], Iterator[None]]) -> None:
        super().__init__(Stack())
        self.around = contextmanager(way)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2:
            return super().training_step(batch, batch_idx)
        with self.around(self.net.blocks[1]):  # type: ignore[index, union-attr]
            return super().training_step(batch, batch_idx)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("activations", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_a_forward_that_is_another_one_for_a_batch_counts(way: Any, activations: Any) -> None:
    """The one that was there as the step began ran in its place, silently."""
    ours = fit(lambda: Patches(way), vectors(4), superpipeline(k=1, activations=activations))
    plain = fit(lambda: Patches(way), vectors(4))
    assert_same(ours, plain)
    assert not torch.equal(plain.losses[0], fit(lambda: Module(Stack()), vectors(4)).losses[0])


class KeepsForward(Module):
    """A user's pre-hook keeps the forward that it finds."""

    kept: Any

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        handle = self.net.blocks[1].register_forward_pre_hook(self.keep)  # type: ignore[index, union-attr]
        loss = super().training_step(batch, batch_idx)
        handle.remove()
        return loss

    def keep(self, module: Any, inputs: Any) -> None:
        self.kept = module.forward
        assert inspect.signature(self.kept) == inspect.signature(Block.forward.__get__(module))


@pytest.mark.rest("takes tenths of a second")
def test_a_forward_that_a_pre_hook_has_kept_is_the_module_s_own() -> None:
    """It ran in the mode of a run that was over."""
    from sp_lightning.capabilities.activations.calls import UnitModes

    ours = fit(lambda: KeepsForward(Stack()), vectors(2), superpipeline(k=1, activations="recompute"))
    plain = fit(lambda: KeepsForward(Stack()), vectors(2))
    assert_same(ours, plain)
    gradients = []
    for module in (ours.module, plain.module):
        x = torch.ones(1, 16, requires_grad=True)
        with mock.patch.object(UnitModes, "call", side_effect=AssertionError):
            module.eval().kept(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


# ---------------------------------------------------------------------- other ways to call


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


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("way", "activations"),
    first(
        [(way, activations) for way in OTHERS for activations in MODES],
        *((way, "recompute") for way in OTHERS),
        why="the same in other modes",
    ),
)
def test_a_call_that_the_engine_does_not_see_is_right(way: str, activations: Any) -> None:
    ours = fit(lambda: Calls(OTHERS[way]), vectors(2), superpipeline(k=1, activations=activations))
    assert_same(ours, fit(lambda: Calls(OTHERS[way]), vectors(2)))


class WrapsAll(Module):
    """Puts code of its own around all calls and leaves it there, as some tools for profiling do."""

    calls = 0

    def on_train_start(self) -> None:
        before: Any = nn.Module.__call__

        def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            type(self).calls += 1
            return before(module, *args, **kwargs)

        nn.Module.__call__ = counted  # type: ignore[method-assign]


@pytest.mark.rest("takes tenths of a second")
def test_code_of_others_around_all_calls_may_stay() -> None:
    try:
        ours = [fit(lambda: WrapsAll(Stack()), vectors(2), superpipeline(k=1)) for _ in range(2)]
        assert not around_calls._around
        with listening(Stack(1)) as (net, calls):  # a wrapper of an earlier run does not run it a second time
            net(torch.ones(1, 16))
            assert calls == ["enter", "leave"]
    finally:
        nn.Module.__call__ = CALL  # type: ignore[method-assign]
    plain = fit(lambda: Module(Stack()), vectors(2))
    for each in ours:
        assert_same(each, plain)
    assert WrapsAll.calls > 20


# ---------------------------------------------------------------------- whose calls they are


class Notes:
    """Notes calls."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.threads = calls, OwnThreads()

    def enter(self, visits: Any, inputs: Any) -> Any:
        self.calls.append("enter")
        return visits

    def leave(self, visits: Any, output: Any) -> None:
        self.calls.append("leave")


@contextmanager
def listening(net: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    calls: list[str] = []
    (ours,) = listen(Notes(calls), {net: ()})
    yield net, calls
    ours.remove()


def test_two_engines_may_know_one_module() -> None:
    net = Block()
    with listening(net) as (_, first_calls), listening(net) as (_, second_calls):
        net(torch.ones(1, 16))
    assert first_calls == second_calls == ["enter", "leave"]
    assert nn.Module.__call__ is CALL


def test_an_engine_that_is_dropped_is_forgotten() -> None:
    """A run that ended without a word kept its model for as long as the process."""
    net, calls = Block(), list[str]()
    made: list[ModuleCall] = listen(Notes(calls), {net: ()})
    assert nn.Module.__call__ is not CALL
    net_is_there = weakref.ref(net)
    del made, net
    gc.collect()
    assert net_is_there() is None
    assert nn.Module.__call__ is CALL


def test_after_a_run_nothing_is_around_calls() -> None:
    module = Module(Stack())
    start(superpipeline(k=1), module)
    assert streamer_of(module.trainer.strategy) is None
    assert nn.Module.__call__ is CALL
    assert not around_calls._around
