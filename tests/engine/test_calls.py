"""Each call of a module ends by itself: inside another one, and where it has not begun; whose calls they are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from sp_lightning.core.device.own_threads import OwnThreads
from sp_lightning.core.torch_compat import around_calls
from sp_lightning.core.weights.layer import AllRows
from tests.equality.programs.checkpoints import HEADS, numbers
from tests.support.engine import engine_of, listen
from tests.support.loops import Loop, assert_streams
from tests.support.models import Module, Stack
from tests.support.runs import superpipeline
from tests.support.simdevice import simulated
from tests.support.tiers import some
from tests.support.ways import start

CALL = nn.Module.__call__


class Listens:
    """Notes calls by number. ``enter`` raises for an input of zeros."""

    def __init__(self) -> None:
        self.entered: list[Any] = []
        self.left: list[Any] = []
        self.engine = SimpleNamespace(threads=OwnThreads())

    def enter(self, visits: Any, inputs: Any) -> Any:
        (x,) = inputs
        if not x.any():
            raise RuntimeError("no memory")
        self.entered.append(float(x.sum()))
        return self.entered[-1:]

    def leave(self, visits: Any, output: Any) -> None:
        self.left += visits


class Calls(nn.Module):
    """Does something inside its call."""

    inside: Callable[[Tensor], None] = staticmethod(lambda x: None)

    def forward(self, x: Tensor) -> Tensor:
        self.inside(x)
        return x


@contextmanager
def listening(*modules: nn.Module) -> Iterator[Listens]:
    listener = Listens()
    calls = listen(listener, dict.fromkeys(modules, ()))
    yield listener
    for each in calls:
        each.remove()


class Routes(AllRows):
    """Notes the routed calls that are running. Those of zeros cannot be read."""

    watches_calls = True

    def __init__(self) -> None:
        self.running: list[float] = []

    def begin_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not args[0].any():
            raise RuntimeError("no memory")
        self.running.append(float(args[0].sum()))

    def end_call(self) -> None:
        self.running.pop()


def fails_inside(module: nn.Module, running: Callable[[], Any], expected: Any) -> Callable[[Tensor], None]:
    def inside(x: Tensor) -> None:
        if x.sum() == 2:
            with pytest.raises(RuntimeError, match="no memory"):
                module(torch.zeros(1))
            assert running() == expected

    return inside


def test_a_call_that_has_not_begun_does_not_end_the_call_around_it() -> None:
    """The end of a call whose ``enter`` had raised took the outer call for its own."""
    module = Calls()
    with listening(module) as listener:
        module.inside = fails_inside(module, lambda: listener.left, [])
        module(torch.tensor([2.0]))
    assert listener.left == [2.0]


@pytest.mark.parametrize("comes", [True, False])
def test_a_routed_call_ends_its_own(comes: bool) -> None:
    """Also where its layers do not come. The experts of the outer call were those of no call any more, and all of them came."""
    module, rows, listener = Calls(), Routes(), Listens()
    layer: Any = SimpleNamespace(rows=rows, index=0, name="experts")
    module.inside = fails_inside(module, lambda: rows.running, [2.0])
    with mock.patch.object(listener, "enter", **({"return_value": ()} if comes else {"side_effect": MemoryError})):
        (calls,) = listen(listener, {module: (layer,)})
        if comes:
            module(torch.tensor([2.0]))
        else:
            with pytest.raises(MemoryError):
                module(torch.tensor([2.0]))
    calls.remove()
    assert rows.running == []


@pytest.mark.parametrize(("error", "ended"), [(RuntimeError, [3.0, 2.0]), (KeyboardInterrupt, [3.0, 2.0])])
@pytest.mark.parametrize("where", ["in its forward", "in a hook"])
def test_an_error_ends_the_call_of_its_module_alone(where: str, error: type[BaseException], ended: list[float]) -> None:
    """After Ctrl-C torch calls no hook."""
    inner, outer = Calls(), Calls()

    def refuses(module: nn.Module, *args: Any) -> None:
        if module is inner:
            raise error("refused")

    def inside(x: Tensor) -> None:
        with pytest.raises(error):
            inner(x + 1)
        assert listener.left == ended[:1]

    outer.inside = inside
    if where == "in its forward":
        inner.inside = lambda x: refuses(inner)
    handle = register_module_forward_pre_hook(refuses if where == "in a hook" else lambda *_: None)
    try:
        with listening(inner, outer) as listener:
            outer(torch.tensor([2.0]))
    finally:
        handle.remove()
    assert listener.left == ended


# ---------------------------------------------------------------------- whose calls they are


def test_two_engines_may_know_one_module() -> None:
    net = Calls()
    with listening(net) as one, listening(net) as other:
        net(torch.ones(1))
    assert one.left == other.left == [1.0]
    assert nn.Module.__call__ is CALL


def test_an_engine_that_is_dropped_is_forgotten() -> None:
    """A run that ended without a word kept its model for as long as the process."""
    net = Calls()
    made = listen(Listens(), {net: ()})
    assert nn.Module.__call__ is not CALL
    net_is_there = weakref.ref(net)
    del made, net
    gc.collect()
    assert net_is_there() is None
    assert nn.Module.__call__ is CALL


def test_after_a_run_nothing_is_around_calls() -> None:
    module = Module(Stack())
    start(superpipeline(k=1), module)
    assert engine_of(module.trainer.strategy) is None
    assert nn.Module.__call__ is CALL
    assert not around_calls._around


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("bf16", some([False, True], False, why="the same in mixed precision"))
@pytest.mark.parametrize("name", ["head", "chunks", "between", "loss"])
def test_a_backward_of_a_loop_ends_with_the_outermost_graph_task(name: str, bf16: bool) -> None:
    """In a loop no call tells that a step begins."""
    with simulated():
        assert_streams(HEADS[name], numbers(), Loop(bf16=bf16), k=1, k_prime=1)
