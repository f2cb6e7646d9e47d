"""A deep copy of a module is a plain one, which has none of the engine's hooks: it can be scripted, exported and traced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import Module, Stack, vectors
from tests.support.runs import assert_same, fit, superpipeline
from tests.support.starts import start
from tests.support.tiers import first

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),  # export itself
]

WAYS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "script": lambda net, x: torch.jit.script(net)(x),
    "trace": lambda net, x: torch.jit.trace(net, x)(x),
    "export": lambda net, x: torch.export.export(net, (x,)).module()(x),
    "strict export": lambda net, x: torch.export.export(net, (x,), strict=True).module()(x),
    "compile": lambda net, x: torch.compile(net, backend="eager", fullgraph=True)(x),
}


class Copied(Module):
    """Makes a program of a copy, inside the first step and after it."""

    def __init__(self, way: str) -> None:
        super().__init__(Stack(3))
        self.way, self.seen = WAYS[way], []  # type: ignore[var-annotated]

    def make(self, batch: Tensor) -> None:
        net = copy.deepcopy(self.net).eval()
        self.seen.append(self.way(net, batch).detach())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.make(batch)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.make(torch.ones(2, 16))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("way", "activations"),
    first(
        [(way, activations) for way in WAYS for activations in ("keep", "recompute")],
        ("script", "keep"),
        ("script", "recompute"),
        why="seconds of compilation, and ways that worked",
    ),
)
def test_a_deep_copy_becomes_a_program(way: str, activations: Any) -> None:
    """TorchScript compiled the engine's hooks ("Unknown type name 'nn.Module'"), and Dynamo met them ("Skip inlining")."""
    torch._dynamo.reset()
    plain = fit(lambda: Copied(way), vectors(), max_steps=2)
    ours = fit(lambda: Copied(way), vectors(), superpipeline(k=1, activations=activations), max_steps=2)
    assert_same(ours, plain)
    pairs = zip(ours.module.seen, plain.module.seen, strict=True)  # type: ignore[arg-type]
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.rest("takes tenths of a second")
def test_a_module_itself_is_not_scripted_during_a_run() -> None:
    class Scripts(Module):
        def on_train_epoch_end(self) -> None:
            torch.jit.script(self.net)

    with pytest.raises(RuntimeError, match=r"torch\.jit\.script .*'Stack'.*copy\.deepcopy\(module\).*after the run"):
        start(superpipeline(), Scripts(Stack()))
    module = Module(Stack())
    start(superpipeline(), module)
    net, x = module.net.eval(), torch.ones(2, 16)
    assert torch.equal(torch.jit.script(net)(x), net(x))


@pytest.mark.rest("takes tenths of a second")
def test_a_copy_keeps_hooks_of_the_user() -> None:
    class Hooked(Module):
        def on_train_epoch_end(self) -> None:
            before = [len(child._forward_pre_hooks) for child in self.net.modules()]
            handle = self.net.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
            copied, x = copy.deepcopy(self.net), torch.ones(2, 16)
            assert [len(child._forward_pre_hooks) for child in copied.modules()].count(1) == 1
            assert torch.equal(copied.eval()(x), self.net.eval()(x))
            handle.remove()
            assert [len(child._forward_pre_hooks) for child in self.net.modules()] == before, (
                "the original keeps its own"
            )

    start(superpipeline(), Hooked(Stack()))
